"""Which folder engines share their weights through."""

import tempfile
from pathlib import Path

MOUNTS_FILE = Path("/proc/self/mounts")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def weights_folder(setting: str, num_engines: int, mounts_file: Path = MOUNTS_FILE) -> str:
    """Return the folder that engines of one model are told; empty for none.

    Args:
        setting: `off`, a folder, which is used in any case, or `auto`: the folder of temporary files, where there is more than one
            engine to share anything and files are not memory themselves. They take about four times the size of the weights.
        num_engines: Of the model.
        mounts_file: Linux's list of what is mounted where.
    """
    if setting == "off":
        return ""
    if setting != "auto":
        return setting
    folder = Path(tempfile.gettempdir()).resolve()
    return "" if num_engines == 1 or _is_in_memory(folder, mounts_file) else str(folder)


def _is_in_memory(folder: Path, mounts_file: Path) -> bool:
    """Tell whether what is written to a folder takes memory; where there is no telling, it is taken to."""
    try:
        mounts = [line.split()[1:3] for line in mounts_file.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return True
    kinds = {place.replace("\\040", " "): kind for place, kind in mounts}  # of two at one place the last one counts
    kind = next((kinds[str(place)] for place in (folder, *folder.parents) if str(place) in kinds), "")
    return kind in ("", *MEMORY_FILE_SYSTEMS)
