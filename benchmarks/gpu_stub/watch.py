"""What the stub device saw: calls, kernels, graphs, memory, faults; read by the program that runs on it.

It is a snapshot whenever it is asked for. Kernels have the names that their compiler gave them, taken apart by `c++filt` where
there is one.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_stub.build import CORE


class Launches(NamedTuple):
    """How often a kernel was launched.

    Attributes:
        run: At once.
        captured: Into a graph.
        replayed: By a graph.
    """

    run: int
    captured: int
    replayed: int


@dataclass(slots=True)
class Seen:
    """What was counted since the last `reset`.

    Attributes:
        calls: Of each function, those that were called.
        kernels: By name; products of cuBLAS go by the function that was called.
        streams: Pieces of work on each stream; 0 is the default stream.
        memory: `used_bytes`, `peak_bytes`, `host_bytes`, `num_allocations`, `num_frees`, `num_refusals`.
        graphs: `num_captures`, `num_broken_captures`, `num_instances`, `num_launches`, and `num_stray_works`: what was done at
            once while a stream was captured, so that no graph has it.
        faults: What a device would have punished, with how often.
    """

    calls: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, Launches] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON can have it."""
        return asdict(self) | {"kernels": {name: launches._asdict() for name, launches in self.kernels.items()}}

    def launches_of(self, *parts: str) -> Launches:
        """Return the launches of all kernels whose names have any of these parts."""
        found = [launches for name, launches in self.kernels.items() if any(part in name for part in parts)]
        return Launches(*(sum(numbers) for numbers in zip(*found, strict=True))) if found else Launches(0, 0, 0)


class Watch:
    """The stub device, from within a program that it was loaded into."""

    def __init__(self) -> None:
        """Find it.

        Raises:
            OSError: If the program does not run in the bed.
        """
        self._core = ctypes.CDLL(CORE)
        self._core.stub_dump.argtypes = (ctypes.c_char_p,)
        self._core.stub_fail.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        self._core.stub_set_bytes.argtypes = (ctypes.c_size_t,)

    def reset(self) -> None:
        """Count from 0; memory, streams and graphs stay what they are."""
        self._core.stub_reset()

    def read(self) -> Seen:
        """Return what was counted."""
        with tempfile.NamedTemporaryFile() as file:
            if self._core.stub_dump(os.fsencode(file.name)):
                raise OSError("what was counted cannot be written")
            return parse(Path(file.name).read_text(encoding="utf-8").splitlines())

    def fail(self, name: str, status: int, *, after: int = 0, times: int = 1) -> None:
        """Have a function fail `times` times, after so many more calls that do what they should."""
        self._core.stub_fail(name.encode(), status, after, times)

    def set_bytes(self, num_bytes: int) -> None:
        """Change how much memory the device has; what is in use stays in use."""
        self._core.stub_set_bytes(num_bytes)


def parse(lines: Iterable[str]) -> Seen:
    """Return what a dump says."""
    seen = Seen()
    kernels: list[tuple[str, Launches]] = []
    for line in lines:
        kind, name, *numbers = line.split("\t")
        match kind:
            case "call":
                seen.calls[name] = int(numbers[0])
            case "kernel":
                kernels.append((name, Launches(*map(int, numbers))))
            case "stream":
                seen.streams[int(name)] = int(numbers[0])
            case "fault":
                seen.faults[name] = int(numbers[0])
            case "memory" | "graphs":
                getattr(seen, kind)[name] = int(numbers[0])
            case _:
                raise ValueError(f"{line!r} is no line of a dump")
    for name, (_, launches) in zip(_readable([name for name, _ in kernels]), kernels, strict=True):
        before = seen.kernels.get(name, Launches(0, 0, 0))
        seen.kernels[name] = Launches(*(a + b for a, b in zip(before, launches, strict=True)))
    return seen


def _readable(names: list[str]) -> list[str]:
    if not names or shutil.which("c++filt") is None:
        return names
    return subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
