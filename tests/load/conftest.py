"""A server with scripted answers, plans and results made by hand, and `dragoman load` as a process."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from dragoman.load.plan import Lengths, Plan, Server, Work
from dragoman.load.result import Result
from dragoman.load.run import Run
from dragoman.load.tally import Outcome, Tally
from dragoman.load.worker import Progress
from tests.client.fake_server import Behaviour, FakeServer, Service

ROOT = Path(__file__).resolve().parents[2]


class LoadService(Service):
    """Answers every request at once; probes are kept in `probes`, all others in `requests`.

    `script` has the behaviours of the next requests, `refusals` those of the next probes. While `stall` or `stall_probes` is set,
    no request or probe is answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.address = ""
        self.probes: list[Any] = []
        self.refusals: deque[Behaviour] = deque()
        self.stall, self.stall_probes = threading.Event(), threading.Event()
        self.num_cancelled = 0

    def begin(self, request: Any) -> Behaviour | None:
        if not hasattr(request, "request_id"):  # the models are asked for
            return None
        is_probe = "-probe-" in request.request_id
        (self.probes if is_probe else self.requests).append(request)
        script = self.refusals if is_probe else self.script
        behave = script.popleft() if script else self.behaviours.get(request.text, str)
        return partial(self._act, self.stall_probes if is_probe else self.stall, behave)

    def _act(self, stall: threading.Event, behave: Behaviour, context: Any) -> None:
        while stall.is_set() and context.is_active():
            time.sleep(0.005)
        self.num_cancelled += not context.is_active()
        behave(context)


@contextlib.contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[LoadService]:
    """Serve scripted answers, over TLS with credentials."""
    with FakeServer(LoadService(), credentials) as server:
        server.service.address = server.target
        yield server.service
        server.service.stall.clear()
        server.service.stall_probes.clear()


@pytest.fixture
def server() -> Iterator[LoadService]:
    with serving() as service:
        yield service


def make_plan(target: str = "127.0.0.1:1", token: str | None = None, work: dict[str, Any] | None = None, **fields: Any) -> Plan:
    """Return a plan of sources of three words."""
    return Plan(server=Server(target, token=token), work=Work(**{"words": Lengths("constant", (3.0,))} | (work or {})), **fields)


def run_of(plan: Plan, progress: Progress) -> Run:
    """Return a run of one process that has told its progress."""
    run = Run(plan)
    run.add(0, progress)
    return run


def make_result(latencies: list[list[float]], slos: dict[str, float] | None = None, **fields: Any) -> Result:
    """Return a result from the latencies of each second: every request is due and answered in its second."""
    tally, plan = Tally(), make_plan(seconds=float(len(latencies)), slos=slos or {})
    for second, times in enumerate(latencies):
        tally.slice_at(second)
        for seconds in times:
            due = second + 0.25
            tally.record(Outcome("unary", False, due, due + seconds, generated_tokens=10), plan.slos, 0.0, plan.seconds)
    run = run_of(plan, Progress(tally, sum(map(len, latencies)), 0, 0.1, plan.seconds, is_last=True))
    model = {"name": "en-de", "version": "3", "precision": "fp32", "device": "cpu", "max_slots": "64"}
    result = run.result({"--server": "somewhere:8500"}, {"python": "3"})
    return msgspec.structs.replace(result, **{"warnings": [], "models": [model]} | fields)


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start `dragoman load` as a process, which is killed if it still runs at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    command = [sys.executable, "-m", "dragoman", "load", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
