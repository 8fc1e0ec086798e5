"""A real `dragoman serve` with one model, on free ports of this machine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05


class ServedModel:
    """The server's process, started on entering and stopped with SIGTERM on leaving; settings in the environment do not reach it.

    Its log goes to a file, at the default level, so that what a request costs is what it costs in earnest.

    Attributes:
        address: Of its gRPC port.
        front_pid: Of the front end.
        engine_pid: Of the model's engine.
    """

    def __init__(self, bundle: Path, *flags: str) -> None:
        """Describe the server; flags are `dragoman serve`'s."""
        self._bundle, self._flags = bundle.resolve(), flags
        self.address = ""
        self.front_pid = self.engine_pid = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "models").mkdir()
        (folder / "models" / self._bundle.name).symlink_to(self._bundle)
        self._log = folder / "log"
        command = [sys.executable, "-m", "dragoman", "serve", "--models", str(folder / "models"), "--host", "127.0.0.1"]
        ports = ["--port", "0", "--metrics-port", "0", "--metrics-host", "127.0.0.1"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, *ports, *self._flags], stderr=log, cwd=ROOT, env=environment)
        try:
            self.engine_pid = wait_for_event(self._process, self._log, "engine ready", START_SECONDS)["engine_pid"]
            self.address = f"127.0.0.1:{wait_for_event(self._process, self._log, 'serving', START_SECONDS)['port']}"
        except BaseException:
            self._stop(signal.SIGKILL)
            raise
        self.front_pid = self._process.pid
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process.poll() is not None:
            self._stop(signal.SIGKILL)
            raise RuntimeError(f"the server ended by itself with exit code {self._process.returncode}")
        code = self._stop(signal.SIGTERM)
        if code and kind is None:
            raise RuntimeError(f"the server stopped with exit code {code}")

    def _stop(self, number: signal.Signals) -> int:
        """End the process and tidy up; return its exit code."""
        self._process.send_signal(number)
        try:
            return self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()


def wait_for_event(process: subprocess.Popen[bytes], log: Path, name: str, seconds: float) -> dict[str, Any]:
    """Return the first event of that name in a server's log.

    Raises:
        RuntimeError: If the server ends, or does not get there in time, with the end of its log.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        has_ended = process.poll() is not None
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            event = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            if event.get("event") == name:
                return dict(event)
        if has_ended:
            break
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server did not get to {name!r}:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def cpu_seconds(pid: int) -> float:
    """Return the processor time a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
