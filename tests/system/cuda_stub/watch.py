"""The stub device's counts, read by the program that runs on it: calls, kernels, graphs, memory, faults.

Kernels have their compiler's names, taken apart by `c++filt` where there is one.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.system.cuda_stub.build import CORE


@dataclass(slots=True)
class Seen:
    """Counts since the last `reset`.

    Attributes:
        calls: Of each function that was called.
        kernels: By name, launches that were `run` at once, `captured` into a graph, and `replayed` by one; products of cuBLAS go by
            the function that was called.
        streams: Pieces of work on each stream; 0 is the default stream.
        memory: `used_bytes`, `peak_bytes`, `host_bytes`, `num_allocations`, `num_frees`, `num_refusals`.
        graphs: `num_captures`, `num_broken_captures`, `num_instances`, `num_launches`, and `num_stray_works`: work that was done at
            once while a stream was captured, so that no graph has it.
        faults: Errors that a device would have punished.
    """

    calls: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON can have it."""
        return asdict(self)


class Watch:
    """The stub device, from within a program that it was loaded into."""

    def __init__(self) -> None:
        """Find it.

        Raises:
            OSError: If the program does not run on the stub device.
        """
        self._core = ctypes.CDLL(CORE)
        self._core.stub_dump.argtypes = (ctypes.c_char_p,)
        self._core.stub_fail.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        self._core.stub_set_bytes.argtypes = (ctypes.c_size_t,)

    def reset(self) -> None:
        """Count from 0; memory, streams and graphs stay as they are."""
        self._core.stub_reset()

    def fail(self, name: str, status: int, *, after: int = 0, times: int = 1) -> None:
        """Have a function fail `times` times, after so many more calls that succeed."""
        self._core.stub_fail(name.encode(), status, after, times)

    def set_bytes(self, num_bytes: int) -> None:
        """Change the size of the device's memory."""
        self._core.stub_set_bytes(num_bytes)

    def read(self) -> Seen:
        """Return the counts."""
        with tempfile.NamedTemporaryFile() as file:
            assert self._core.stub_dump(os.fsencode(file.name)) == 0
            lines = Path(file.name).read_text(encoding="utf-8").splitlines()
        seen = Seen()
        for kind, name, *numbers in (line.split("\t") for line in lines):
            if kind == "kernel":
                before = seen.kernels.setdefault(_readable(name), {"run": 0, "captured": 0, "replayed": 0})
                before |= {key: before[key] + int(number) for key, number in zip(before, numbers, strict=True)}
            else:
                getattr(seen, kind if kind in ("memory", "graphs") else f"{kind}s")[name] = int(numbers[0])
        return seen


def _readable(name: str) -> str:
    if shutil.which("c++filt") is None:
        return name
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
