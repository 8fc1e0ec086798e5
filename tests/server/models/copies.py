"""Bundles of other names, for tests."""

import json
import shutil
from pathlib import Path


def copy(bundle: Path, to: Path, name: str) -> Path:
    """Copy a bundle under another model's name."""
    shutil.copytree(bundle, to)
    manifest = to / "bundle.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": name}))
    return to
