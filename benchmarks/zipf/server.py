"""A `dragoman serve` of a folder of models, none of which is loaded at the start, and what its processes hold."""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness.replica import free_ports
from benchmarks.harness.served import ROOT, descendants, environment_of, wait_for_event
from dragoman.load.scrape import parse, read_url
from dragoman.server.telemetry.processes import read_process

START_SECONDS = 120.0
STOP_SECONDS = 60.0
READ_SECONDS = 0.1
ENGINE = b"dragoman.server.engine.process"
MIB = 2**20


class FolderServer:
    """The server, started on entering and ended with SIGTERM on leaving; settings in the environment do not reach it.

    Attributes:
        address: Of its gRPC port.
        pid: Of the process that was started.
    """

    def __init__(self, models: Path, log: Path, flags: Sequence[str]) -> None:
        """Describe it; flags are `dragoman serve`'s, the log goes to a file."""
        self._models, self._log, self._flags = models, log, flags
        port, self._metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._port = port

    def __enter__(self) -> Self:
        command = [
            sys.executable,
            "-m",
            "dragoman",
            "serve",
            f"--models={self._models}",
            "--host=127.0.0.1",
            f"--port={self._port}",
        ]
        ports = ["--http=false", "--metrics-host=127.0.0.1", f"--metrics-port={self._metrics_port}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, *ports, *self._flags], stderr=log, cwd=ROOT, env=environment_of(ROOT))
        self.pid = self._process.pid
        try:
            wait_for_event(self._process, self._log, "serving", START_SECONDS)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.terminate()

    def terminate(self) -> int:
        """Send SIGTERM, wait for the end, and return the exit code; one that does not end is killed."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()

    def metrics(self) -> dict[str, float]:
        """Return its metrics, summed over labels."""
        return parse(read_url(f"http://127.0.0.1:{self._metrics_port}/metrics"))


class MemoryWatch:
    """Reads again and again what a server's processes hold, from entering to leaving.

    Attributes:
        max_engine_bytes: The most that all engines together have had.
        max_engines: The most of them that there were at once.
        max_other_bytes: The most that the front ends and what looks after them have had together.
    """

    def __init__(self, pid: int) -> None:
        """Describe it; `pid` is the process that was started."""
        self._pid = pid
        self.max_engine_bytes = self.max_engines = self.max_other_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(READ_SECONDS):
            self.read()

    def read(self) -> None:
        """Read once."""
        engines: list[int] = []
        others: list[int] = []
        for pid in descendants(self._pid):
            try:
                is_engine = ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if (reading := read_process(pid)) is not None:
                (engines if is_engine else others).append(reading.resident_memory_bytes)
        self.max_engine_bytes = max(self.max_engine_bytes, sum(engines))
        self.max_other_bytes = max(self.max_other_bytes, sum(others))
        self.max_engines = max(self.max_engines, len(engines))
