"""The process and its machine: usable cores, memory and CPU time, the C allocator, the controlling terminal, process exit."""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Linux option of `prctl`: signal sent to the process when its parent ends.
PR_SET_PDEATHSIG = 1

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores(quota_file: Path = CGROUP_QUOTA) -> int:
    """Return the number of cores by affinity and cgroup v2 CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file outside a container, and `max` is not a number
        return cores


# Blocks of at least this size are mapped separately, and returned to the system when freed.
LARGE_BYTES = 2**20
# The largest threshold that glibc accepts, and the free memory above which it trims by itself.
KEPT_BLOCK_BYTES, KEPT_BYTES = 2**25, 2**28
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of malloc.h


def return_large_blocks() -> None:
    """Make the allocator return large freed blocks to the system; no effect without glibc.

    glibc raises its threshold to the size of freed blocks, up to 32 MiB: after a few large messages, later ones would be kept.
    """
    _call_libc("mallopt", _M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_freed_memory() -> None:
    """Make the allocator keep free blocks for reuse; no effect without glibc.

    An engine allocates and frees the same megabytes with every batch; for a small model, clearing new pages would take longer than
    the computation. `trim_memory` returns them when the engine is idle.
    """
    _call_libc("mallopt", _M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    _call_libc("mallopt", _M_TRIM_THRESHOLD, KEPT_BYTES)


def trim_memory_soon() -> None:
    """Schedule `trim_memory` in a second on the event loop, which it blocks for less than a millisecond."""
    asyncio.get_running_loop().call_later(1.0, trim_memory)


def trim_memory() -> None:
    """Return free memory to the system; no effect without glibc."""
    _call_libc("malloc_trim", 0)


def _call_libc(name: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None)[name](*arguments)


class Terminal:
    """The process's controlling terminal."""

    def __init__(self) -> None:
        self._was_there = _is_there()

    @property
    def is_gone(self) -> bool:
        """Whether the terminal existed at the start and has been closed."""
        return self._was_there and not _is_there()


def _is_there() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a child process that runs a module.

    Its import path is exactly this process's: -P keeps the working directory out.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return [sys.executable, "-P", "-m", module, *arguments], os.environ | {"PYTHONPATH": path}


async def start_process(
    module: str, *arguments: str, stdout: int | None = None, stderr: int | None = None, pass_fds: Sequence[int] = ()
) -> Process:
    """Start a module in a child process, which leads a group; its standard input closes when this process ends.

    Raises `OSError` if no process can be started.
    """
    command, environment = module_command(module, *arguments)
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=stdout, stderr=stderr, env=environment, pass_fds=pass_fds, start_new_session=True
    )


def kill_group(process: Process) -> None:
    """Kill a child of `start_process`, unless it has ended, and the processes that it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end_with_parent(clean_up: Callable[[], None] = lambda: None) -> None:
    """Start a thread that ends this child of `start_process`, with its group, when its parent has ended.

    On Linux a process stopped by SIGSTOP is continued for that.
    """

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock must be free when the interpreter ends
            pass
        clean_up()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    if sys.platform == "linux":
        _call_libc("prctl", PR_SET_PDEATHSIG, int(signal.SIGCONT))


def last_line(errors: bytes) -> str:
    """Return the last line that a process wrote, shortened to its end."""
    return errors.decode(errors="replace").strip().rpartition("\n")[2][-300:]


def freeze_heap() -> None:
    """Exempt startup objects from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def end_process(code: int) -> NoReturn:
    """Flush the standard streams and exit at once.

    gRPC's own shutdown would end calls not yet passed on as CANCELLED, which clients do not retry; a broken connection ends them as
    UNAVAILABLE.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            if stream is not None:  # None where the process was started without it
                stream.flush()
    os._exit(code)


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
