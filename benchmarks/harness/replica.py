"""A `dragoman serve` that can be ended, killed and started again at the same address."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness.served import environment_of, num_replicas, processes, wait_for_event

ROOT = Path(__file__).parents[2]
START_SECONDS = 180.0
STOP_SECONDS = 90.0


class Replica:
    """One server with one model, as a context; it is not started by entering, and gone after leaving.

    Settings in the environment do not reach it. Its log goes to a file, at the default level.

    Attributes:
        address: Of its gRPC port, the same after every start.
        metrics_address: Of /metrics and /readyz.
        front_pid: Of the front end; 0 before the first start.
        engine_pid: Of the model's engine.
    """

    def __init__(self, bundle: Path, *flags: str, source: Path = ROOT) -> None:
        """Choose its ports; flags are `dragoman serve`'s, `source` is the checkout whose server it is."""
        self._bundle, self._flags, self._source = bundle.resolve(), flags, source.resolve()
        self._ports = free_ports(2)
        self.address, self.metrics_address = (f"127.0.0.1:{port}" for port in self._ports)
        self.front_pid = self.engine_pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def metrics_port(self) -> int:
        """The port of /metrics and /readyz."""
        return self._ports[1]

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "models").mkdir()
        (folder / "models" / self._bundle.name).symlink_to(self._bundle)
        self._log = folder / "log"
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def start(self) -> float:
        """Start it and wait until it serves; return how long that took.

        Raises:
            RuntimeError: If it ends, or does not get there in time, with the end of its log.
        """
        begun = time.monotonic()
        command = [sys.executable, "-m", "dragoman", "serve", "--models", str(self._log.parent / "models")]
        port, metrics_port = self._ports
        ports = ["--host=127.0.0.1", f"--port={port}", "--http=false", "--metrics-host=127.0.0.1", f"--metrics-port={metrics_port}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *ports, *self._flags], stderr=log, cwd=self._source, env=environment_of(self._source)
            )
        engines = num_replicas(self._flags)
        self.engine_pid = int(wait_for_event(self._process, self._log, "engine ready", START_SECONDS, engines)["engine_pid"])
        wait_for_event(self._process, self._log, "serving", START_SECONDS)
        self.front_pid = self._process.pid
        return time.monotonic() - begun

    def processes(self) -> dict[str, list[int]]:
        """Return what runs now: the ids of the engines, and of all others, those of the front end."""
        assert self._process is not None
        return processes(self._process.pid, self._log)

    def terminate(self, seconds: float = STOP_SECONDS) -> int:
        """Send SIGTERM, wait until it has drained and ended, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: If that takes longer than so many seconds.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(seconds)

    def wait_for(self, name: str, seconds: float = START_SECONDS) -> None:
        """Wait for the first event of that name in its log.

        Raises:
            RuntimeError: If it ends first, or does not get there in time.
        """
        assert self._process is not None
        wait_for_event(self._process, self._log, name, seconds)

    def kill(self) -> None:
        """End the front end with SIGKILL; its engine ends when it notices."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def log(self) -> str:
        """Return what it has logged since it was last started."""
        return self._log.read_text(encoding="utf-8", errors="replace")


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
