"""How many cores this process may really use."""

import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


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
