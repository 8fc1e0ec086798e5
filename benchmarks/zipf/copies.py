"""Many models out of one bundle: the same graphs and weights under other names."""

import json
import os
import shutil
from pathlib import Path

MANIFEST = "bundle.json"


def copy_models(bundle: Path, folder: Path, count: int) -> list[str]:
    """Put so many models into a folder; return their names.

    Files are linked, so that twenty models take the disk of one; each manifest is its own, for it has the name.
    """
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    names = [f"{manifest['name']}-{number:02}" for number in range(1, count + 1)]
    for name in names:
        shutil.copytree(bundle, folder / name, copy_function=os.link)
        (folder / name / MANIFEST).unlink()
        (folder / name / MANIFEST).write_text(json.dumps(manifest | {"name": name}), encoding="utf-8")
    return names
