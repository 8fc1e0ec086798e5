"""Elastic threads: a step uses all cores while no other engine of the machine computes, and the engine's own threads otherwise.

Both sessions map the same weights and compute the same bits.
"""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import onnxruntime

# Linux's `struct flock`: type, whence, start, length, process id.
_FLOCK = "hhqqi0q"
# Time without wide steps after one that took longer than a narrow one, doubled each time up to the most.
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.02, 1.0
# Weight of the latest narrow step in the average.
LATEST = 0.1


class WideSteps(Struct, frozen=True):
    """Steps that are faster with more threads, as measured by `plan`."""

    num_threads: int = 0  # of wide steps; 0 for none
    # Seconds of a step with the engine's own threads, by number of rows, a power of two; others are no faster with more threads.
    narrow_seconds: dict[int, float] = {}


class BusyMark:
    """Mark that this process computes, visible to all processes that have the same file: a lock on a byte of it.

    The kernel removes the mark of a process that ends, however it ends.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file; raise `OSError` if that is impossible, or locks are: not every file system has them."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.utime(self._file)  # temporary folders are cleaned of what is old
        self._byte = int.from_bytes(os.urandom(7))
        self._is_set = False
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._byte)

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *_: object) -> None:
        self.clear()

    def set(self) -> None:
        """Set the mark; no effect if it is set."""
        if not self._is_set:
            with contextlib.suppress(OSError):  # the system has no more locks
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte)
            self._is_set = True

    def clear(self) -> None:
        """Remove the mark; no effect without one."""
        if self._is_set:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._byte)
            self._is_set = False

    @property
    def is_another_set(self) -> bool:
        """Whether another process has set its mark."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)


class Elastic:
    """Choice between narrow and wide for each step, by the marks of other engines and by what wide steps took lately.

    A core taken by another process stops a wide step at its barriers, so that it takes longer than a narrow one.
    """

    def __init__(self, mark: BusyMark, wide: WideSteps, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_threads = wide.num_threads
        self._mark, self._clock = mark, clock
        self._narrow_seconds = dict(wide.narrow_seconds)
        self._not_before, self._pause = 0.0, MIN_PAUSE_SECONDS

    def is_wide(self, num_rows: int = 1) -> bool:
        """Return whether the next step is to be wide, and mark this engine as computing."""
        self._mark.set()
        is_faster = _bucket(num_rows) in self._narrow_seconds and self._clock() >= self._not_before
        return is_faster and not self._mark.is_another_set

    def note(self, num_rows: int, is_wide: bool, seconds: float) -> None:
        """Learn from a step."""
        bucket = _bucket(num_rows)
        if (usual := self._narrow_seconds.get(bucket)) is None:
            return
        if not is_wide:
            self._narrow_seconds[bucket] = usual + LATEST * (seconds - usual)
        elif seconds <= usual:
            self._pause = MIN_PAUSE_SECONDS
        else:
            self._not_before = self._clock() + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def rest(self) -> None:
        """Let other engines be wide: this one has nothing to compute."""
        self._mark.clear()


def _bucket(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()


class Sessions:
    """A graph's session and, with `elastic`, one with more threads."""

    def __init__(
        self,
        narrow: "onnxruntime.InferenceSession",
        wide: "onnxruntime.InferenceSession | None" = None,
        elastic: Elastic | None = None,
    ) -> None:
        self.narrow, self._wide, self._elastic = narrow, wide, elastic

    def choose(self, num_rows: int = 1) -> "onnxruntime.InferenceSession":
        """Return the session for a run as long as a step of some rows."""
        is_wide = self._elastic is not None and self._elastic.is_wide(num_rows)
        return self._wide if is_wide and self._wide is not None else self.narrow

    def note(self, session: "onnxruntime.InferenceSession", num_rows: int, seconds: float) -> None:
        """Learn from a step."""
        if self._elastic is not None:
            self._elastic.note(num_rows, session is self._wide, seconds)


def open_mark(folder: Path | None) -> BusyMark | None:
    """Return a new mark in the folder of shared weights; None without that folder, or where marks are impossible."""
    with contextlib.suppress(OSError):
        return None if folder is None else BusyMark(folder / "busy")
    return None
