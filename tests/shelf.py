"""Folders that a whole run of the tests shares: each is made once, by the worker that first asks for it; the others wait.

Nothing is kept from one run to the next, so that no test passes on what older code has made.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


class Shelf:
    """What has been made, by name; no test may change it.

    Args:
        folder: Where it lies, the same for all workers.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def get(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the folder of a name; `make` is called with where it shall lie, which does not exist, if it is not there yet.

        If that fails, the next who asks tries again.
        """
        path, scratch = self._folder / name, self._folder / f"{name}.unfinished"
        with FileLock(self._folder / f"{name}.lock"):
            if not path.exists():
                shutil.rmtree(scratch, ignore_errors=True)  # of a worker that was interrupted
                make(scratch)
                os.rename(scratch, path)
        return path
