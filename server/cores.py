"""How many cores this process may really use, and who gets which."""

import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class TooFewCores(Exception):
    """There are not enough cores for every engine to have its own and the front end one that is nobody's."""


def divide_cores(num_engines: int, num_threads: int) -> list[tuple[int, ...]]:
    """Give each engine the last cores of this process's affinity that are left, one for each of its threads.

    Raises:
        TooFewCores: If none would be left over for the front end.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_taken = num_engines * num_threads
    if num_taken >= len(cores):
        wanted = f"{num_engines} x {num_threads} threads and the front end"
        raise TooFewCores(f"{wanted} need {num_taken + 1} cores; there are {len(cores)}")
    return [tuple(cores[start : start + num_threads]) for start in range(len(cores) - num_taken, len(cores), num_threads)]


def available_cores(quota_file: Path = CGROUP_QUOTA) -> int:
    """Return the cores of this process's affinity, or fewer where its container has a smaller CPU quota; at least 1.

    Args:
        quota_file: Of cgroup v2: quota and period in microseconds, or `max` for no quota.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file outside a container, and `max` is not a number
        return cores
