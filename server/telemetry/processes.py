"""What the kernel says of an engine's process: memory, processor time, open files, read from /proc when somebody asks."""

import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Places in /proc/PID/stat after the name, which may hold anything and ends with the last parenthesis.
USER_TICKS, SYSTEM_TICKS, RESIDENT_PAGES = 11, 12, 21


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One look at a process.

    Attributes:
        resident_memory_bytes: Memory it has, shared pages included.
        cpu_seconds: Processor time it has used.
        num_open_fds: Files and sockets it has open.
    """

    resident_memory_bytes: int
    cpu_seconds: float
    num_open_fds: int


def read_process(process_id: int, proc: Path = Path("/proc")) -> ProcessReading | None:
    """Return what is known of a process; None if it is gone, or where there is no /proc."""
    folder = proc / str(process_id)
    try:
        fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        num_open_fds = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
    return ProcessReading(int(fields[RESIDENT_PAGES]) * PAGE_BYTES, ticks / TICKS_PER_SECOND, num_open_fds)
