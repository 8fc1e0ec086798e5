"""Folders that a run of the tests shares: each is made once, by the worker that first needs it; the others wait.

Nothing is kept from one run to the next, so that no test passes on the output of older code.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]


class Shelf:
    """Shared folders by name, below a folder that is the same for all workers; no test may change them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def get(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the folder of a name; `make` writes it to a path that does not exist yet, and is tried again after a failure."""
        path, scratch = self._folder / name, self._folder / f"{name}.unfinished"
        with FileLock(self._folder / f"{name}.lock"):
            if not path.exists():
                shutil.rmtree(scratch, ignore_errors=True)  # of a worker that was interrupted
                make(scratch)
                os.rename(scratch, path)
        return path


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Shared folders of this run, beside the temporary folders of its workers."""
    own = tmp_path_factory.getbasetemp()
    return Shelf((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shelf")


@pytest.fixture(scope="session")
def shipped_bundle(shelf: Shelf) -> Callable[..., Path]:
    """Return the bundle of a shipped checkpoint, by name and precision; the command line exports it."""

    def bundle(name: str, precision: str = "fp32") -> Path:
        def export(folder: Path) -> None:
            options = [str(ROOT / "model/pretrained" / name), str(folder / name), "--precision", precision]
            subprocess.run([sys.executable, "-m", "dragoman", "export", *options], cwd=ROOT, check=True, capture_output=True)

        return shelf.get(f"shipped-{name}-{precision}", export) / name

    return bundle
