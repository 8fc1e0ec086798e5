"""The stub device's counts, read by the program that runs on it: calls, kernels, graphs, memory, faults."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.system.cuda_stub.bed import CORE


class Watch:
    def __init__(self) -> None:
        self._core = ctypes.CDLL(CORE)
        self._core.stub_dump.argtypes = (ctypes.c_char_p,)
        self._core.stub_fail.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        self._core.stub_set_bytes.argtypes = (ctypes.c_size_t,)

    def reset(self) -> None:
        self._core.stub_reset()

    def fail(self, name: str, status: int, *, after: int = 0) -> None:
        """Have a function fail once, after so many more calls that succeed."""
        self._core.stub_fail(name.encode(), status, after, 1)

    def set_bytes(self, num_bytes: int) -> None:
        self._core.stub_set_bytes(num_bytes)

    def read(self) -> dict[str, Any]:
        """Return counts since the last `reset`, as they can be written as JSON.

        Of `kernels`, by name, launches that were `run` at once, `captured` into a graph, and `replayed` by one; products of cuBLAS
        go by the function that was called. Of `streams`, pieces of work on each; 0 is the default stream. Of `graphs`, captures,
        launches, and `num_stray_works`: work that was done at once while a stream was captured, so that no graph has it. `faults`
        are errors that a device would have punished. Besides there are `calls` of each function, and `memory`.
        """
        with tempfile.NamedTemporaryFile() as file:
            assert self._core.stub_dump(os.fsencode(file.name)) == 0
            lines = Path(file.name).read_text(encoding="utf-8").splitlines()
        seen: dict[str, Any] = {name: {} for name in ("calls", "kernels", "streams", "memory", "graphs", "faults")}
        for kind, name, *numbers in (line.split("\t") for line in lines):
            if kind == "kernel":
                before = seen["kernels"].setdefault(_readable(name), {"run": 0, "captured": 0, "replayed": 0})
                before |= {key: before[key] + int(number) for key, number in zip(before, numbers, strict=True)}
            else:
                seen[kind if kind in seen else f"{kind}s"][name] = int(numbers[0])
        return seen


def _readable(name: str) -> str:
    """Return a compiler's name of a kernel as its source has it."""
    if shutil.which("c++filt") is None:
        return name
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
