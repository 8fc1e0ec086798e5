"""Processes under measurement: a server with one model, its processor time and memory, and commands that run to their end."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.actor import Actor
from benchmarks.harness.load import GRPC, Load, Record, Sender
from dragoman.export.bundle import Bundle
from tests.system.harness.server import ROOT, Server, cpu_seconds, is_engine, processes, serving, wait_until

GIB = 2**30
POLL_SECONDS = 0.02
FRONTEND, ENGINE = "frontend", "engine"


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """A server's use of a machine's cores."""

    replicas: int  # engines of the model
    threads: int  # threads of each
    slots: int  # slots of each
    frontends: int = 1  # processes that answer callers

    @property
    def total_slots(self) -> int:
        """Slots of all engines."""
        return self.replicas * self.slots

    def flags(self) -> list[str]:
        """Return the flags of `dragoman serve`."""
        engines = f"--num-threads={self.threads}", f"--max-slots={self.slots}", f"--replicas={self.replicas}"
        return [*engines, f"--front-ends={self.frontends}"]

    def __str__(self) -> str:
        frontends = f", {self.frontends} frontends" if self.frontends > 1 else ""
        return f"{self.replicas} × {self.threads}, {self.slots} slots{frontends}"


class Dragoman:
    """A running server with one model, and senders of load on it.

    Attributes:
        server: The process.
        model: Name of the model.
    """

    def __init__(self, server: Server, model: str, stack: ExitStack) -> None:
        self.server, self.model, self._stack = server, model, stack
        self._senders: dict[str, Actor] = {}

    def address(self, protocol: str = GRPC) -> str:
        """Return the address of a protocol."""
        return self.server.http_address if protocol in ("HTTP/JSON", "OIP REST") else self.server.address

    def pids(self) -> dict[str, list[int]]:
        """Return the processes: engines, and all others."""
        found = sorted(processes(self.server))
        engines = [pid for pid in found if is_engine(pid)]
        return {FRONTEND: [pid for pid in found if pid not in engines], ENGINE: engines}

    def run(self, load: Load, protocol: str = GRPC) -> tuple[Record, dict[str, float]]:
        """Send a load; return its outcomes, and the processor seconds of the sender, the frontends and the engines."""
        if protocol not in self._senders:
            sender = Actor(Sender, protocol, self.address(protocol), self.model)
            self._senders[protocol] = self._stack.enter_context(sender)
        before = {name: cpu_seconds(*pids) for name, pids in self.pids().items()}
        record: Record = self._senders[protocol].call("run", load)
        used = {name: cpu_seconds(*pids) - before[name] for name, pids in self.pids().items()}
        return record, {"sender": record.cpu_seconds, **used}


@contextmanager
def dragoman(bundle: Path, *flags: str, source: Path = ROOT, has_http: bool = False) -> Iterator[Dragoman]:
    """Run a server with one model and default settings, but for flags, until the block ends.

    Raises:
        RuntimeError: If it does not end with exit code 0.
    """
    model = Bundle.open(bundle, is_checked=False).manifest.name
    replicas = max((int(flag.partition("=")[2]) for flag in flags if flag.startswith("--replicas=")), default=1)
    http = () if has_http else ("--http=false",)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / model).symlink_to(bundle.resolve())
        server = stack.enter_context(serving(Path(folder), *http, *flags, source=source))
        wait_until(lambda: len(set(server.engine_pids())) >= replicas, f"{replicas} engines are ready", 300)
        with ExitStack() as senders:
            yield Dragoman(server, model, senders)
        if code := server.terminate():
            raise RuntimeError(f"the server ended with exit code {code}")


def memory_mib(pid: int | str = "self") -> dict[str, float]:
    """Return memory of a process: resident, proportional share (`pss`), and anonymous."""
    wanted = {"Rss:": "rss", "Pss:": "pss", "Anonymous:": "anonymous"}
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines())
    return {wanted[parts[0]]: int(parts[1]) / 1024 for parts in lines if parts[0] in wanted}


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    seconds: float  # wall clock, start included
    peak_gib: float  # most memory it had resident at once, mapped files included
    output: str  # text of both streams


def run_python(arguments: Sequence[str], log: Path) -> Finished:
    """Run Python with arguments to its end; both streams go to a log.

    Raises:
        RuntimeError: If it fails, with the end of its log.
    """
    started, peak = time.monotonic(), 0
    with log.open("wb") as file:
        redirect = [(os.POSIX_SPAWN_DUP2, file.fileno(), number) for number in (1, 2)]
        command = [sys.executable, *arguments]  # spawned, so that it inherits no memory of this process that would count
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=redirect)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            peak = max(peak, _peak_kib(pid))
            time.sleep(POLL_SECONDS)
    text = log.read_text(encoding="utf-8", errors="replace")
    if ended[1]:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{text[-2000:]}")
    return Finished(time.monotonic() - started, peak * 1024 / GIB, text)


def _peak_kib(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return next((int(parts[1]) for parts in lines if parts[0] == "VmHWM:"), 0)
