"""Processes of a server that are killed at random moments while versions change, and what is left after that."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.harness.served import descendants, environment_of, wait_for_event
from benchmarks.swaps.folder import Folder
from benchmarks.swaps.timeline import seconds_of
from dragoman.v1 import generation_pb2, generation_pb2_grpc

ROLES = ("server", "front end", "engine")
KILLED = ("start", "proof", "death")
"""Causes for which a version is refused whose engine was killed."""
START_SECONDS = 120.0
END_SECONDS = 20.0
SWAP_SECONDS = 6.0
"""About how long a swap takes; a moment in it is drawn from so many seconds."""
PORTS = ("--host=127.0.0.1", "--port=0", "--http=false", "--metrics-port=0")
FLAGS = ("--models-poll-seconds=0.1", "--restart-backoff-initial-seconds=0.1", *PORTS)
ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Kill:
    """One of them.

    Attributes:
        role: Of the process.
        seconds: After the swap began.
        problems: What was not as it has to be, afterwards.
    """

    role: str
    seconds: float
    problems: list[str] = field(default_factory=list)


class KilledServer:
    """A server that may end at any time, and is started again.

    Attributes:
        address: Of its gRPC port.
    """

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        """Start it, and wait until it serves."""
        self._scratch = tempfile.TemporaryDirectory()
        self._log = Path(self._scratch.name) / "log"
        self._events: list[dict[str, Any]] = []
        self._num_read = 0
        command = [sys.executable, "-m", "dragoman", "serve", "--models", str(folder), *FLAGS, *flags]
        with self._log.open("wb") as log:
            environment = environment_of(ROOT) | {"TMPDIR": self._scratch.name}
            self.process = subprocess.Popen(command, stderr=log, cwd=ROOT, env=environment)
        self.address = f"127.0.0.1:{wait_for_event(self.process, self._log, 'serving', START_SECONDS)['port']}"

    def clear(self) -> None:
        """End whatever is still there, and tidy up."""
        for pid in self.everything():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._scratch.cleanup()

    def everything(self) -> list[int]:
        """Return its process and all that it started, directly or not; also what is nobody's child any more."""
        mark = f"TMPDIR={self._scratch.name}".encode()
        found = descendants(self.process.pid)
        found += [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if pid not in found and is_marked(pid, mark)]
        return [pid for pid in found if is_running(pid)]

    def of_role(self, role: str) -> list[int]:
        """Return its processes of a role; the engines among them that are not ready yet."""
        if role == "server":
            return [self.process.pid]
        module = "dragoman.server.engine.process" if role == "engine" else "dragoman.server.fronts.process"
        return [pid for pid in self.everything()[1:] if module in command_of(pid)]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what it has logged of a name."""
        return [event for event in self.all_events() if event["event"] == name]

    def all_events(self) -> list[dict[str, Any]]:
        """Return all that it has logged."""
        with self._log.open(encoding="utf-8", errors="replace") as log:  # only what is new is read: it may be long
            log.seek(self._num_read)
            content = log.read()
            whole = content[: content.rfind("\n") + 1]
            self._num_read += len(whole.encode("utf-8"))
        self._events += [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return self._events

    def stop(self) -> int:
        """End it in order; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def kill_at_random(models: Mapping[str, tuple[Path, Path]], num_kills: int, flags: Sequence[str], seed: int) -> list[Kill]:
    """Kill so many processes, each in the middle of a swap; return what came of it.

    After each of them the server, or if it was the one a new one, has to answer for all models by the versions that their folders
    hold, with as many engines as they need, and nothing else may be left.

    Args:
        models: Two bundles of each model, versions of it.
        num_kills: How many.
        flags: Of the server.
        seed: Of who is killed, and when.
    """
    draws, kills = random.Random(seed), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(Path(scratch) / "models", models, probation_seconds=1.0)
        server = KilledServer(folder.path, flags)
        try:
            for number in range(num_kills):
                folder.swap(list(models)[number % len(models)])
                kill = Kill(
                    draws.choice(ROLES if server.of_role("front end") else ("server", "engine")), draws.uniform(0, SWAP_SECONDS)
                )
                time.sleep(kill.seconds)
                doomed = draws.choice(server.of_role(kill.role) or [server.process.pid])
                os.kill(doomed, signal.SIGKILL)
                if doomed == server.process.pid:
                    server.process.wait()
                    if left := _left(server):
                        kill.problems.append(f"left behind: {[command_of(pid)[-80:] for pid in left]}")
                    server.clear()
                    server = KilledServer(folder.path, flags)
                kill.problems += _problems(server, folder)
                kills.append(kill)
                print(f"{number + 1}/{num_kills}", kill.role, f"{kill.seconds:.1f} s", *kill.problems, flush=True)
            code = server.stop()
            if code or (left := _left(server)):
                kills[-1].problems.append(f"at the end: exit code {code}" if code else f"left behind at the end: {left}")
        finally:
            server.clear()
    return kills


def _problems(server: KilledServer, folder: Folder) -> list[str]:
    """Wait a while for all to be as it has to be; return what is not."""
    until = time.monotonic() + 60.0
    while (problems := _look(server, folder)) and time.monotonic() < until:
        if server.process.poll() is not None:
            return [f"the server ended with exit code {server.process.returncode}"]
        time.sleep(0.2)
    return problems


def _look(server: KilledServer, folder: Folder) -> list[str]:
    problems = []
    for model, content in folder.wanted().items():
        with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            request = generation_pb2.GenerateRequest(model=model, text="A dog runs.", max_new_tokens=4)
            try:
                answered = stub.Generate(request, timeout=10).model_version
            except grpc.RpcError as error:
                problems.append(f"{model}: {error}")
                continue
        if answered != content and not _is_refused(server, model, folder.asked[model][-1:]):
            problems.append(f"{model}: answered by {answered} instead of {content}")
    num_engines = len(server.of_role("engine"))
    if num_engines != len(folder.wanted()) and not problems:
        problems.append(f"{num_engines} engines for {len(folder.wanted())} models")
    return problems


def _is_refused(server: KilledServer, model: str, asked: Sequence[float]) -> bool:
    """Whether the version that came last is refused because its engine was killed: then the one before is the policy's.

    Args:
        server: That refuses it.
        model: Whose it is.
        asked: When it came, seconds since 1970; nothing for one that is there from the start.
    """
    refused = [event for event in server.events("a version is refused") if event["model"] == model]
    return any(event["cause"] in KILLED and seconds_of(event) >= came for event in refused for came in asked)


def _left(server: KilledServer) -> list[int]:
    """Return which processes of a server that has ended are still there after a while."""
    until = time.monotonic() + END_SECONDS
    while (left := server.everything()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_marked(pid: int, mark: bytes) -> bool:
    """Whether a process was started with something in its environment."""
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def command_of(pid: int) -> str:
    """Return a process's command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
