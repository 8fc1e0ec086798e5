"""A real `dragoman serve` in its own process, its log, metrics and processes; the one way to wait.

Everything that tests and benchmarks know about a running server besides its protocols is here, so that scenarios name no log event,
no process title and no file of `/proc` themselves.
"""

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LONG = bool(os.environ.get("TEST_LONG"))
"""Whether scenarios run in their long form."""
START_SECONDS, STOP_SECONDS = 120.0, 90.0


class Event:
    """Names of log events that scenarios wait for. They are no documented contract, and are said here alone."""

    SCORER_LOADED, SCORER_NOT_LOADED = "scorer loaded", "the scorer cannot be loaded"
    SERVING, DRAINING, DRAIN_TIME_OVER, STOPPED = "serving", "draining", "drain time is over", "stopped"
    CANNOT_SERVE = "cannot serve"
    CALL, ITEM, CALLS_NOT_LOGGED = "call", "item", "lines of failed calls not written"
    ENGINE_READY, ENGINE_RESTARTS = "engine ready", "engine ended, restarting"
    ENGINE_CANNOT_START = "engine cannot start"
    FRONTEND_READY, FRONTEND_RESTARTS = "front end listens", "front end ended, restarting"
    RELOADED, NOT_RELOADED = "reloaded", "cannot be used, what was read before stays in use"
    VERSION_LOADING, VERSION_PROVED = "loading a version", "a version is loaded and proved"
    VERSION_REFUSED, VERSION_ENDED = "a version is refused", "a version has ended"
    VERSIONS_SERVE, NOT_SATISFIED = "versions that serve", "what is wanted of a model cannot be had"
    OPERATOR_CHANGE = "a change is made"
    MODEL_LOADED, MODEL_UNLOADED = "a model is awake", "a model has fallen asleep"
    MODEL_NOT_LOADED = "a model cannot be woken"


def wait_until(condition: Callable[[], bool], what: object, seconds: float = 60, pause_seconds: float = 0.01) -> None:
    """Return once a condition holds; fail with the name of what did not happen if that takes longer."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(pause_seconds)


class Server:
    """A running `dragoman serve`; settings of the caller's environment do not reach it, except through `environment`.

    `events` is the log so far: JSON lines as they are, other lines as `{"event": line}`. Addresses of HTTP and of metrics are URLs.
    """

    def __init__(
        self,
        models: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        source: Path = ROOT,
    ) -> None:
        """Start it, below a command such as `nohup` and from another checkout if these are given, and wait until it serves."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
        usual = {"DRAGOMAN_PORT": "0", "DRAGOMAN_HTTP_PORT": "0", "DRAGOMAN_METRICS_PORT": "0", "PYTHONPATH": str(source)}
        usual["DRAGOMAN_REPLICAS"] = "1"  # what is measured to be fastest may be another number each time
        usual["DRAGOMAN_RESULT_CACHE_MIB"] = "0"  # equal requests are to be computed
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "dragoman", "serve", "--models", str(models), "--host", "127.0.0.1", *flags],
            stderr=subprocess.PIPE,
            cwd=source,
            env=kept | usual | dict(environment or {}),
            text=True,
        )
        self.num_engines, self.num_frontends = (
            int(flags[flags.index(name) + 1]) if name in flags else 1 for name in ("--replicas", "--front-ends")
        )
        self.callers_file = Path()
        self.events: list[dict[str, Any]] = []
        self._arrivals: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            serving = self.wait_for(Event.SERVING, START_SECONDS)
        except BaseException:  # the caller has no handle on the process
            self.process.kill()
            self.wait()
            raise
        self.port: int = serving["port"]
        self.address = f"127.0.0.1:{self.port}"
        self.http_address = f"http://127.0.0.1:{serving.get('http_port')}"
        self.metrics_address = f"http://127.0.0.1:{serving['metrics_port']}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            event = json.loads(line) if line.startswith("{") else {"event": line.rstrip()}
            self.events.append(event)
            self._arrivals.put(event)
        self._arrivals.put(None)

    def wait_for(self, name: str, timeout_seconds: float = 60, **fields: object) -> dict[str, Any]:
        """Return the next log event of that name, and with those fields; what was returned or skipped before is not seen again."""
        end = time.monotonic() + timeout_seconds
        while True:
            try:
                event = self._arrivals.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"never logged: {name!r} with {fields}") from None
            assert event is not None, f"the server ended before it logged {name!r}: {self.events[-5:]}"
            if event["event"] == name and fields.items() <= event.items():
                return event

    def logged(self, name: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["event"] == name]

    @property
    def admin_address(self) -> str:
        return f"127.0.0.1:{self.logged('admin service listens')[0]['port']}"

    def engine_pids(self) -> list[int]:
        """Return the process ids of all engines that have been ready, in that order."""
        return [event["engine_pid"] for event in self.logged(Event.ENGINE_READY)]

    def engines(self, model: str = "") -> list[int]:
        """Return the running engines of a model, or of all models, in the order in which they were ready."""
        ready = (event for event in self.logged(Event.ENGINE_READY) if model in ("", event["model"]))
        return [event["engine_pid"] for event in ready if is_running(event["engine_pid"])]

    def engine(self, replica: int) -> int:
        """Return the process id of the engine with that number that was ready last."""
        ready = [event for event in self.logged(Event.ENGINE_READY) if event.get("replica", 0) == replica]
        return int(ready[-1]["engine_pid"])

    def frontends(self) -> dict[int, int]:
        """Return the process ids of the frontends by number, the last of each; none where the server itself is the frontend."""
        return {event["front_end"]: event["pid"] for event in self.logged(Event.FRONTEND_READY)}

    def wait_until_whole(self, num_models: int = 1) -> None:
        wait_until(lambda: self.metric("dragoman_engine_up") == num_models * self.num_engines, "all engines are up", 120)
        if self.num_frontends > 1:
            self.wait_for_metric(self.num_frontends, "dragoman_front_end_up")

    def wait_until_idle(self) -> None:
        gauges = ("slots_in_use", "num_requests_running", "num_requests_waiting", "num_tokens_waiting")
        wait_until(lambda: not any(self.metric(f"dragoman_{name}") for name in gauges), "nothing runs or waits")

    def problems(self) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event.get("level") in ("error", "critical") or "Traceback" in str(event)]

    def metrics_text(self) -> str:
        return str(urllib.request.urlopen(f"{self.metrics_address}/metrics", timeout=10).read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value, summed over the label sets that match; 0 if it has none."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in self.metrics_text().splitlines()
            if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted)
        )

    def wait_for_metric(self, expected: float, name: str, **labels: str) -> None:
        wait_until(lambda: self.metric(name, **labels) == expected, f"{name}{labels or ''} is {expected}")

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(timeout=STOP_SECONDS)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def serving(models: Path, *flags: str, callers: str = "", operators: str = "", **keywords: Any) -> Iterator[Server]:
    """Start a server, with files of callers and of operators if their texts are given; in the end its drain must end cleanly.

    After an error it is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("auth", callers), ("admin", operators)):
            if text:
                (Path(folder) / f"{name}.toml").write_text(text)
                flags = (*flags, f"--{name}-tokens-file", f"{folder}/{name}.toml")
        server = Server(models, *flags, **keywords)
        server.callers_file = Path(folder) / "auth.toml"
        try:
            yield server
            if server.process.poll() is None:
                assert server.terminate() == 0
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.wait()


def dragoman(*arguments: object, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
    variables = kept | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120)


def start_in_vain(models: Path | str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ports = {"DRAGOMAN_PORT": "0", "DRAGOMAN_HTTP_PORT": "0", "DRAGOMAN_METRICS_PORT": "0"}
    return dragoman("serve", "--models", models, "--host", "127.0.0.1", *flags, folder=ROOT, **(ports | environment))


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes for a while: what is in engines does not go on, and what comes is not answered."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGCONT)


def descendants(root: int) -> list[int]:
    """Return the ids of a process and of all that it started, directly or not, zombies included."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if fields := _stat(int(path.parent.name)):
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:  # grows during the loop
        found += sorted(children.get(pid, ()))
    return found


def is_running(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def is_stopped(pid: int) -> bool:
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").glob("*/stat"))


def processes(server: Server) -> set[int]:
    """Return the running processes of a server: its own and all that it started."""
    return {pid for pid in descendants(server.process.pid) if is_running(pid)}


def is_engine(pid: int) -> bool:
    return "dragoman.server.engine" in _proc(pid, "cmdline")


def next_engine(server: Server, before: set[int]) -> int:
    """Return the process id of an engine that was not among those before, as soon as there is one."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        for pid in processes(server) - before:
            if is_engine(pid):
                return pid
        time.sleep(0.002)
    raise AssertionError("no engine was started")


def footprint(pids: Iterable[int]) -> dict[int, dict[str, int]]:
    """Return what each process holds: open descriptors, threads, resident bytes.

    Failed calls of this process are in reference cycles with their tracebacks, and keep their connections until they are collected.
    """
    gc.collect()
    return {
        pid: {
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "bytes": resident_bytes(pid),
        }
        for pid in pids
    }


def growth(before: Mapping[int, Mapping[str, int]], max_bytes: int = 64 * 2**20) -> list[str]:
    """Return which processes hold more than they did: gRPC keeps some idle threads, and allocators some memory."""
    room = {"descriptors": 0, "threads": 4, "bytes": max_bytes}
    now = footprint(before)
    return [
        f"{what} of process {pid}: {before[pid][what]}, now {now[pid][what]}"
        for pid in before
        for what in room
        if now[pid][what] > before[pid][what] + room[what]
    ]


def wait_until_not_grown(before: Mapping[int, Mapping[str, int]], max_bytes: int = 64 * 2**20, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while grown := growth(before, max_bytes):
        assert time.monotonic() < end, grown
        time.sleep(0.2)


def cpu_seconds(*pids: int) -> float:
    fields = [_stat(pid) for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields if each) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, without what it shares with others."""
    pages = _proc(pid, "statm").split() or ("0", "0", "0")
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's `stat` behind its name; nothing if it has gone."""
    return _proc(pid, "stat").rpartition(")")[2].split()


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
