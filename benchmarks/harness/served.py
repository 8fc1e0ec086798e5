"""A real `dragoman serve` with one model, on free ports of this machine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.harness.setting import has_setting

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05
WITH_HTTP, WITHOUT_HTTP = ("--http-port=0",), ("--http=false",)


class ServedModel:
    """The server's process, started on entering and stopped with SIGTERM on leaving; settings in the environment do not reach it.

    Its log goes to a file, at the default level, so that what a request costs is what it costs in earnest.

    Attributes:
        address: Of its gRPC port.
        http_address: Of its HTTP port; empty where it has none.
        front_pid: Of the process that was started: the front end, or where there are several what looks after them.
        engine_pid: Of the model's engine; of the first one that was ready where there are several.
    """

    def __init__(self, bundle: Path, *flags: str, source: Path = ROOT, has_http: bool = False) -> None:
        """Describe the server; flags are `dragoman serve`'s, `source` is the checkout whose server it is."""
        self._bundle, self._flags, self._source = bundle.resolve(), flags, source.resolve()
        self.address = self.http_address = ""
        self._http = () if not has_setting("http", self._source) else WITH_HTTP if has_http else WITHOUT_HTTP
        self.front_pid = self.engine_pid = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "models").mkdir()
        (folder / "models" / self._bundle.name).symlink_to(self._bundle)
        self._log = folder / "log"
        command = [sys.executable, "-m", "dragoman", "serve", "--models", str(folder / "models"), "--host", "127.0.0.1"]
        ports = ["--port", "0", *self._http, "--metrics-port", "0", "--metrics-host", "127.0.0.1"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *ports, *self._flags], stderr=log, cwd=self._source, env=environment_of(self._source)
            )
        try:
            num_engines = num_replicas(self._flags)
            self.engine_pid = wait_for_event(self._process, self._log, "engine ready", START_SECONDS, num_engines)["engine_pid"]
            serving = wait_for_event(self._process, self._log, "serving", START_SECONDS)
            self.address = f"127.0.0.1:{serving['port']}"
            self.http_address = f"127.0.0.1:{serving['http_port']}" if self._http == WITH_HTTP else ""
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

    def processes(self) -> dict[str, list[int]]:
        """Return what runs now: the ids of the engines, and of all others, those of the front end."""
        return processes(self._process.pid, self._log)

    def _stop(self, number: signal.Signals) -> int:
        """End the process and tidy up; return its exit code."""
        self._process.send_signal(number)
        try:
            return self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()


def environment_of(source: Path) -> dict[str, str]:
    """Return what a program of a checkout is started with: our environment, but for settings, which are none of its."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")} | {"PYTHONPATH": str(source)}


def wait_for_event(process: subprocess.Popen[bytes], log: Path, name: str, seconds: float, count: int = 1) -> dict[str, Any]:
    """Return the first event of that name in a server's log, once there are so many of them.

    Raises:
        RuntimeError: If the server ends, or does not get there in time, with the end of its log.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        has_ended = process.poll() is not None
        if len(found := events(log, name)) >= count:
            return found[0]
        if has_ended:
            break
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server did not get to {name!r}:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def events(log: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of that name in a server's log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [dict(event) for event in found if event.get("event") == name]


def num_replicas(flags: Sequence[str]) -> int:
    """Return how many engines a server with these flags starts, where they say so; else 1."""
    return max((int(flag.partition("=")[2]) for flag in flags if flag.startswith("--replicas=")), default=1)


def processes(root: int, log: Path) -> dict[str, list[int]]:
    """Return what runs of a server: the ids of the engines that its log tells of, and of all others, those of the front end."""
    running = [pid for pid in descendants(root) if not _is_helper(pid)]
    engines = {int(event["engine_pid"]) for event in events(log, "engine ready") if event.get("engine_pid")}
    return {"front end": [pid for pid in running if pid not in engines], "engine": [pid for pid in running if pid in engines]}


def descendants(root: int) -> list[int]:
    """Return the ids of a process and of all that it started, directly or not, which are still there."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(_fields(path)[1]), []).append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    found = [root]
    for pid in found:  # grows while it is gone through
        found += sorted(children.get(pid, ()))
    return found


def _is_helper(pid: int) -> bool:
    """Whether it is a process of Python's own that looks after what others leave, and does nothing else."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


def cpu_seconds(*pids: int) -> float:
    """Return the processor time that processes have used, all their threads together."""
    fields = [_fields(Path(f"/proc/{pid}/stat")) for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _fields(path: Path) -> list[str]:
    """Return what a process's `stat` says behind its name."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
