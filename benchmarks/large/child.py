"""A step of the benchmark in a process of its own: how long it takes, and how much memory at the most."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """What a process took.

    Attributes:
        seconds: Wall clock, start included.
        peak_gib: Most memory it had in RAM at once, mapped files included.
        output: What it wrote to its standard output.
    """

    seconds: float
    peak_gib: float
    output: str


def run(arguments: Sequence[str], log: Path) -> Measured:
    """Run `python` with arguments to its end.

    Args:
        arguments: After the interpreter's name.
        log: What it says on both streams goes there.

    Raises:
        RuntimeError: If it fails, with the last it said.
    """
    started = time.monotonic()
    with log.open("wb") as file:
        redirect = [(os.POSIX_SPAWN_DUP2, file.fileno(), stream) for stream in (1, 2)]
        command = [sys.executable, *arguments]
        pid, peak = os.posix_spawn(sys.executable, command, os.environ, file_actions=redirect), 0
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            peak = max(peak, _peak_kib(pid))
            time.sleep(LOOK_SECONDS)
    status = ended[1]
    seconds, output = time.monotonic() - started, log.read_text(encoding="utf-8", errors="replace")
    if status:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{output[-2000:]}")
    return Measured(seconds, peak * 1024 / GIB, output)


def _peak_kib(pid: int) -> int:
    """Return the most memory that a process had in RAM so far, 0 when it has ended; what it inherits from us is not counted."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return next((int(parts[1]) for parts in lines if parts[0] == "VmHWM:"), 0)


def result_of(measured: Measured) -> Any:
    """Return what a step printed as its last line, as JSON."""
    return json.loads(measured.output.splitlines()[-1])


def memory_mib() -> dict[str, int]:
    """Return what this process has in RAM: all, its share where pages are others' too, and what is nobody else's and in no file."""
    wanted = {"Rss": "rss", "Pss": "pss", "Anonymous": "anonymous"}
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines())
    return {wanted[parts[0][:-1]]: int(parts[1]) // 1024 for parts in lines if parts[0][:-1] in wanted}
