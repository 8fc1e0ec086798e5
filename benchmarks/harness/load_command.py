"""The load generator as users run it: `dragoman load` in a process of its own, and the JSON report that it writes."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from dragoman.load.result import Result, read_result

ROOT = Path(__file__).parents[2]
END_SECONDS = 120.0
# It ended by itself, or was ended; in both cases there is a report.
_CODES = (0, 130)


class LoadCommand:
    """A run of `dragoman load`, started on entering.

    Args:
        flags: Its options; `--output` is added.
    """

    def __init__(self, *flags: str) -> None:
        self._flags = flags

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name) / "report.json"
        command = [sys.executable, "-m", "dragoman", "load", *self._flags, f"--output={self._output}"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def stop(self) -> Result:
        """Have it send no more; return what it came to, once every call has ended."""
        self._process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self, seconds: float = END_SECONDS) -> Result:
        """Return what it came to, once it has ended.

        Raises:
            RuntimeError: If it failed, with what it said.
        """
        _, said = self._process.communicate(timeout=seconds)
        if self._process.returncode not in _CODES:
            raise RuntimeError(f"dragoman load ended with {self._process.returncode}: {said[-2000:]}")
        return read_result(self._output)


def run_load(seconds: float, *flags: str) -> Result:
    """Run `dragoman load` for so long and return its report."""
    with LoadCommand(f"--duration={seconds:g}", *flags) as load:
        return load.wait(seconds + END_SECONDS)
