"""Versions of models change under calls: none fails, and each is answered by a version that was the policy's then."""

import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.conftest import ONLY_LINUX
from tests.system.harness.callers import NATIVE, Callers, connection, generate
from tests.system.harness.grpc_client import failure
from tests.system.harness.models import FLAGS, ModelFolder
from tests.system.harness.server import (
    LONG,
    Event,
    Server,
    is_engine,
    is_running,
    kill,
    next_engine,
    processes,
    resident_bytes,
    serving,
    stopped,
    wait_until,
)

pytestmark = [pytest.mark.e2e, ONLY_LINUX]

AT_ONCE = "[swap]\nprobation_seconds = 0\n"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def server(topology: tuple[str, ...], folder: ModelFolder) -> Iterator[Server]:
    if not folder.asked:
        folder.put("beta", "1", "other")
    with serving(folder.path, *FLAGS, *topology) as server:
        yield server
        server.wait_until_idle()
        assert server.metric("dragoman_engine_restarts_total") == 0
        # A version may be taken away before its scorer is read, which is after it serves.
        assert {event["event"] for event in server.problems()} <= {Event.SCORER_NOT_LOADED}, server.problems()
        everything = processes(server)
    wait_until(lambda: not any(map(is_running, everything)), "all processes have ended", 5)


@pytest.fixture
def model(server: Server, folder: ModelFolder) -> Iterator[str]:
    """Name of a model of the scenario's own; it is taken away in the end, and its engines have to go with it."""
    name = f"model-{len(folder.asked)}"
    folder.say(name, AT_ONCE)
    yield name
    wait_until(lambda: is_complete(server, name), "all engines of all versions are up")
    folder.remove(name)
    wait_until(lambda: server.engines(name) == [], "its engines have ended")


def serves(server: Server, model: str, version: str | None) -> None:
    server.wait_for(Event.VERSIONS_SERVE, model=model, default=version)


def seconds_of(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def periods_of(server: Server, model: str, changes: Sequence[float]) -> list[tuple[str, float, float]]:
    """Return the versions that were to answer, and since when and until when, by the log and the times of changes of the folder.

    A publication takes a moment: from the line that says that a version was proved, or from the change of the folder, to the line
    that says that all frontends have it. A call that was under way in that moment may be answered by either.
    """
    found: list[tuple[str, float, float]] = []
    proved = 0.0
    for event in server.events:
        if event["event"] == Event.VERSION_PROVED and event["model"] == model:
            proved = seconds_of(event)
        elif event["event"] == Event.VERSIONS_SERVE and event["model"] == model:
            version, now = event["versions"][event["default"]], seconds_of(event)
            if found and found[-1][0] == version:
                continue
            if found:
                found[-1] = (*found[-1][:2], now)
            found.append((version, proved or max(time for time in changes if time <= now), math.inf))
            proved = 0.0
    return found


def ask(server: Server, model: str = "alpha", **fields: Any) -> Any:
    with connection(server) as channel:
        return generate(channel, model=model, **fields).result()


def health(server: Server, service: str) -> Any:
    with connection(server) as channel:
        try:
            return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status
        except grpc.RpcError as error:
            return error.code().name


def is_complete(server: Server, model: str) -> bool:
    """Return whether no further engine of a version is to start."""
    num_versions = server.metric("dragoman_version_state", model=model, state="serving")
    return 0 < num_versions * server.num_engines == server.metric("dragoman_engine_up", model=model)


def wait_until_settled(server: Server, model: str) -> None:
    """Wait until as many engines of a model are left as there have to be, in the metrics as among the processes."""
    server.wait_for_metric(server.num_engines, "dragoman_engine_up", model=model)
    wait_until(lambda: len(server.engines(model)) == server.num_engines, "old engines have ended")


def test_swaps_forwards_and_back_lose_nothing(server: Server, folder: ModelFolder, model: str) -> None:
    one, two = folder.put(model, "1", "one"), folder.content("two")
    serves(server, model, "1")
    wait_until_settled(server, model)
    num_swaps, num_done = 20 if LONG else 2, server.metric("dragoman_version_swaps_total", model=model, outcome="done")
    memory = []
    with Callers(server, [model, "beta"], pause_seconds=0.1, max_new_tokens=6) as callers:
        for number in range(num_swaps):
            folder.put(model, "2", "two")
            serves(server, model, "2")
            server.wait_for(Event.VERSION_ENDED, model=model, version="1")
            wait_until_settled(server, model)
            folder.remove(model, "2")
            serves(server, model, "1")
            wait_until_settled(server, model)
            memory.append(sum(map(resident_bytes, processes(server))))
            if number:
                callers.wait_for_more()
    assert callers.failures == [] and callers.answered_differently() == []
    assert {answer.kind for answer in callers.answers} == set(NATIVE)
    assert {answer.version for answer in callers.answers if answer.model == model} == {one, two}
    periods = periods_of(server, model, folder.asked[model])
    assert [version for version, *_ in periods] == [one, two] * num_swaps + [one]
    for answer in callers.answers:
        if answer.model == model:
            allowed = {version for version, since, until in periods if since <= answer.ended and answer.began <= until}
            assert answer.version in allowed, answer
    assert memory[-1] < 1.2 * memory[0] + 32 * 2**20
    assert server.metric("dragoman_version_swaps_total", model=model, outcome="done") == num_done + 2 * num_swaps
    assert server.metric("dragoman_version_state", model=model, version="1", state="serving") == 1
    assert server.metric("dragoman_version_state", model=model, version="2") == 0
    assert health(server, model) == health(server, "") == SERVING


def test_a_canary_gets_its_share_and_requests_may_name_versions(server: Server, folder: ModelFolder, model: str) -> None:
    one, two = folder.put(model, "1", "one"), folder.put(model, "2", "two")
    folder.say(model, AT_ONCE + '[labels]\ncanary = "2"\nstable = "1"\n[weights]\ncanary = 0.3\n')
    with connection(server) as channel:

        def is_served(label: str) -> bool:
            return generate(channel, model=model, model_version=label).exception() is None

        def version_of(request_id: str) -> str:
            return str(generate(channel, 1, model=model, request_id=request_id).result().model_version)

        wait_until(lambda: is_served("stable") and is_served("canary"), "both labels are served")
        answered = {f"r-{number}": version_of(f"r-{number}") for number in range(100)}
        assert 15 <= Counter(answered.values())[two] <= 45
        assert {name: version_of(name) for name in list(answered)[:10]} == dict(list(answered.items())[:10])
    named = {"1": one, "2": two, "stable": one, "canary": two, one: one, two: two}
    assert {name: ask(server, model, model_version=name).model_version for name in named} == named
    for name, content in named.items():  # Triton's clients send 1
        path = f"{server.http_address}/v2/models/{model}/versions/{name}/generate"
        assert requests.post(path, json={"text_input": "a dog", "max_tokens": 1}, timeout=60).json()["model_version"] == content
    code, reason = failure(lambda: ask(server, model, model_version="3"))
    assert code == "NOT_FOUND" and reason.startswith(f"model_version: '3' of model {model} is not served; served: ")
    folder.say(model, AT_ONCE + '[labels]\nstable = "1"\n')
    wait_until(lambda: {ask(server, model).model_version for _ in range(8)} == {two}, "the canary has everything")
    assert ask(server, model, model_version="stable").model_version == one
    assert f"'canary' of model {model} is not served" in failure(lambda: ask(server, model, model_version="canary"))[1]


def test_a_stream_ends_on_the_version_that_it_began_on(server: Server, folder: ModelFolder, model: str) -> None:
    one, two = folder.put(model, "1", "one"), folder.content("two")
    serves(server, model, "1")
    wait_until_settled(server, model)
    request = GenerateRequest(model=model, text="a dog runs", max_new_tokens=900)
    with connection(server) as channel:
        stream = GenerationStub(channel).GenerateStream(request, timeout=120)
        next(stream)
        engines = server.engines(model)
        with stopped(*engines):  # it has not ended before the swap, however fast this machine is
            folder.put(model, "2", "two")
            serves(server, model, "2")
            assert ask(server, model).model_version == two
            assert all(map(is_running, engines))
            assert server.metric("dragoman_version_state", model=model, version="1", state="retiring") == 1
        last = list(stream)[-1].result
    assert last.model_version == one and len(last.tokens) == 900
    server.wait_for(Event.VERSION_ENDED, model=model, version="1")
    wait_until_settled(server, model)


def test_a_model_that_is_taken_away_finishes_what_it_has_and_may_come_back(server: Server, folder: ModelFolder, model: str) -> None:
    one = folder.put(model, "1", "one")
    serves(server, model, "1")
    wait_until_settled(server, model)
    assert ask(server, model).model_version == one and health(server, model) == SERVING
    with connection(server) as channel:
        request = GenerateRequest(model=model, text="a dog", max_new_tokens=900)
        stream = GenerationStub(channel).GenerateStream(request, timeout=60)
        next(stream)
        folder.remove(model, "1")
        serves(server, model, None)
        code, reason = failure(lambda: ask(server, model))
        assert code == health(server, model) == "NOT_FOUND" and f"'{model}' is not loaded; loaded: " in reason
        assert health(server, "") == SERVING
        assert list(stream)[-1].result.model_version == one
    server.wait_for(Event.VERSION_ENDED, model=model, version="1")
    assert server.metric("dragoman_engine_up", model=model) == server.metric("dragoman_model_ready", model=model) == 0
    folder.put(model, "2", "two")
    serves(server, model, "2")
    assert ask(server, model).model_version == folder.content("two")


def test_a_frontend_that_is_started_again_does_not_need_the_folder(models: ModelFolder) -> None:
    """A serving version is in memory; its folder may hold other files by now, and other models do not notice."""
    versions = {"alpha": models.put("alpha", "1", "one"), "beta": models.put("beta", "1", "other")}
    with serving(models.path, *FLAGS, "--front-ends", "2") as server:
        for name in versions:
            (models.path / name / "1" / "bundle.json").write_text("{}")
            server.wait_for(Event.VERSION_REFUSED, model=name)
        kill(server.frontends()[1])
        server.wait_for(Event.FRONTEND_READY, front_end=1)
        with connection(server, 1) as channel:
            assert {name: generate(channel, model=name).result().model_version for name in versions} == versions


@pytest.mark.parametrize("when", ["loading", "probation", "finishing"])
def test_a_drain_in_the_middle_of_a_swap_is_an_orderly_end(models: ModelFolder, when: str) -> None:
    models.put("alpha", "1", "one")
    models.say("alpha", AT_ONCE if when == "finishing" else "[swap]\nprobation_seconds = 600\n")
    with serving(models.path, *FLAGS, "--drain-seconds", "30") as server, connection(server) as channel:
        stream = GenerationStub(channel).GenerateStream(GenerateRequest(text="a dog runs", max_new_tokens=900), timeout=60)
        next(stream)
        before = processes(server)
        models.put("alpha", "2", "two")
        if when == "loading":
            os.kill(next_engine(server, before), signal.SIGSTOP)
        else:
            serves(server, "alpha", "2")
        everything = processes(server)
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].HasField("result"), "what runs has the drain"
        assert server.wait() == 0 and not any("Traceback" in str(event) for event in server.events)
    wait_until(lambda: not any(map(is_running, everything)), "all processes have ended", 5)


def marked(mark: str) -> set[int]:
    """Return the running processes that were started with something in their environment, whoever their parent is."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0") and is_running(int(path.parent.name)):
                found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("flags", [(), ("--front-ends", "2")], ids=["one", "two frontends"])
def test_kills_during_swaps_leave_nothing_half_done(models: ModelFolder, flags: tuple[str, ...]) -> None:
    """Afterwards the server, or one started anew, answers by the version in the folder, with one engine, and nothing is left."""
    contents = {"1": models.put("alpha", "1", "one"), "2": models.content("two")}
    models.say("alpha", "[swap]\nprobation_seconds = 1\nmax_latency_factor = 10\n")
    draws = random.Random(len(flags))
    roles = ["server", "engine", *(["frontend"] if flags else [])]
    draws.shuffle(roles)

    def engines() -> list[int]:
        return [pid for pid in processes(server) if is_engine(pid)]

    def is_as_it_has_to_be() -> bool:
        """A version whose engine was killed is refused, and then the one before is the policy's."""
        refused = [event for event in server.logged(Event.VERSION_REFUSED) if seconds_of(event) >= changed]
        is_excused = bool(refused) and refused[-1]["cause"] in ("start", "proof", "death")
        with connection(server) as channel:
            call = generate(channel)
            if call.exception() is not None:
                return False
            return (call.result().model_version == contents[wanted] or is_excused) and len(engines()) == 1

    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        with ExitStack() as stack:

            def start() -> Server:
                return stack.enter_context(serving(models.path, *FLAGS, *flags, environment={"TMPDIR": scratch}))

            server = start()
            for number in range(50 if LONG else len(roles)):
                role, changed, wanted = roles[number % len(roles)], time.time(), "12"[number % 2 == 0]
                models.put("alpha", "2", "two") if wanted == "2" else models.remove("alpha", "2")
                time.sleep(draws.uniform(0, 2.5))
                doomed = {"server": [server.process.pid], "engine": engines(), "frontend": list(server.frontends().values())}
                with suppress(ProcessLookupError):  # it may have ended just now
                    kill(draws.choice(doomed[role]))
                if role == "server":
                    server.wait()
                    wait_until(lambda: not marked(f"TMPDIR={scratch}"), "nothing is left behind", 20)
                    server = start()
                wait_until(is_as_it_has_to_be, f"after a kill of {role} the version in the folder answers, by one engine")
        wait_until(lambda: not marked(f"TMPDIR={scratch}"), "nothing is left in the end", 20)
