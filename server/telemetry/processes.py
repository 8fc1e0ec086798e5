"""Memory and CPU time of processes from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Field indexes in /proc/PID/stat after the name, which may contain anything and ends with the last parenthesis.
USER_TICKS, SYSTEM_TICKS, RESIDENT_PAGES = 11, 12, 21


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Memory and CPU time of a process; resident memory includes shared pages."""

    resident_memory_bytes: int
    cpu_seconds: float


def read_process(process_id: int, proc: Path = Path("/proc")) -> ProcessReading | None:
    """Return a process's memory and CPU time; None if the process or /proc does not exist."""
    try:
        fields = (proc / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
    return ProcessReading(int(fields[RESIDENT_PAGES]) * PAGE_BYTES, ticks / TICKS_PER_SECOND)
