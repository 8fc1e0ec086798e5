"""Ways in which a new version can be bad: the old one serves on, nothing is lost, and all that tell of versions say why."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from dragoman.client.repository import RepositoryClient
from tests.system.conftest import ONLY_LINUX
from tests.system.harness.callers import Callers, connection, generate
from tests.system.harness.models import FLAGS, ModelFolder, seal
from tests.system.harness.server import Event, Server, is_running, kill, next_engine, processes, serving, wait_until
from tests.system.test_versions import AT_ONCE, seconds_of, serves

pytestmark = [pytest.mark.e2e, ONLY_LINUX]

# Without these capabilities root obeys the modes of files.
AS_OTHERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def start_options() -> dict[str, Any]:
    """Return how a server is started for which the modes of files count, whoever runs the tests."""
    return {"prefix": AS_OTHERS} if not os.geteuid() and shutil.which("setpriv") else {}


@pytest.fixture(scope="module")
def server(folder: ModelFolder) -> Iterator[Server]:
    folder.put("beta", "1", "other")
    shutil.copytree(folder.bundle("three"), folder.path / ".three")
    flags = ("--front-ends", "2", "--admin-port", "0", "--load-timeout-seconds", "7")
    with serving(folder.path, *FLAGS, *flags, **start_options()) as server:
        yield server
        server.wait_until_idle()
        tracebacks = {event["event"] for event in server.events if "Traceback" in str(event)}
        assert tracebacks <= {Event.ENGINE_CANNOT_START}


@pytest.fixture
def model(folder: ModelFolder) -> str:
    return f"model-{len(folder.asked)}"


@pytest.fixture
def one(server: Server, folder: ModelFolder, model: str) -> Iterator[str]:
    folder.say(model, AT_ONCE)
    version = folder.put(model, "1", "one")
    serves(server, model, "1")
    yield version
    shutil.rmtree(folder.path / model)
    wait_until(lambda: server.engines(model) == [], "its engines have ended")


def flip_a_byte(folder: Path) -> None:
    weights = bytearray((folder / "decoder.weights").read_bytes())
    weights[1000] ^= 1
    (folder / "decoder.weights").write_bytes(weights)


def take_others_weights(folder: Path) -> None:
    """Its checksums and its version are those of what it holds; only its answers are not those that were exported."""
    three = folder.parent / ".three"
    for path in folder.glob("*.weights"):
        shutil.copy(three / path.name, path)
    seal(folder)


def damage_a_graph(folder: Path) -> None:
    (folder / "decoder.onnx").write_bytes(b"this is no graph")
    seal(folder)


Change = Callable[[Path], None]
FILES: tuple[tuple[Change, str, str], ...] = (
    (flip_a_byte, "bundle", r"decoder\.weights.*(checksum|SHA-256)"),
    (take_others_weights, "proof", r"sample \d+"),
    (partial(seal, format_version=99), "bundle", r"format.* 99"),
    (damage_a_graph, "start", r"the engine cannot start: .*decoder\.onnx"),
    (lambda folder: (folder / "encoder.weights").unlink(), "bundle", r"encoder\.weights: no such file"),
    (partial(seal, name="beta"), "bundle", r"is of model 'beta', not of 'model-\d'"),
    (lambda folder: (folder / "encoder.weights").chmod(0), "bundle", r"encoder\.weights.*[Pp]ermission denied"),
)


def is_refused(server: Server, model: str, version: str, cause: str, reason: str) -> dict[str, Any]:
    """Wait until a version is refused, and look that all say so who have to; return the line of the log."""
    line = server.wait_for(Event.VERSION_REFUSED, model=model, version=version)
    assert (line["cause"], line["level"]) == (cause, "error")
    assert re.search(reason, line["reason"]) and "\n" not in line["reason"], line["reason"]
    server.wait_for_metric(1, "dragoman_version_state", model=model, version=version, state="refused", cause=cause)
    with RepositoryClient(server.admin_address) as operators:
        listed = {one.name: one for each in operators.models()[0] if each.name == model for one in each.versions}
    assert (listed[version].state, listed[version].cause, listed[version].reason) == ("refused", cause, line["reason"])
    ready, *troubles = requests.get(f"{server.metrics_address}/readyz?verbose", timeout=10).text.splitlines()
    assert ready == "ready" and f"{model}: version {version} is refused ({cause}): {line['reason']}" in troubles
    return line


def is_answered_by(server: Server, model: str, version: str) -> bool:
    """Return whether a version answers on twenty new connections, one after the other, so that both frontends have it."""
    for _ in range(20):
        with connection(server) as channel:
            call = generate(channel, model=model)
            if call.exception() is not None or call.result().model_version != version:
                return False
    return True


def serves_alone(server: Server, model: str, version: str, engine: int) -> None:
    wait_until(lambda: is_answered_by(server, model, version), "the version answers in both frontends")
    wait_until(lambda: server.engines(model) == [engine], "the other engine has ended")
    server.wait_for_metric(1, "dragoman_engine_up", model=model)


def say(server: Server, folder: ModelFolder, model: str, text: str, label: str) -> None:
    """Write `model.toml`, and wait until it is in use: of a label that leads nowhere the log tells."""
    folder.say(model, f'{text}[labels]\n{label} = "nowhere"\n')
    server.wait_for(Event.NOT_SATISFIED, model=model, problem=f"labels.{label}: there is no version 'nowhere'")


def test_files_that_are_bad_are_refused_one_after_the_other(server: Server, folder: ModelFolder, model: str, one: str) -> None:
    (old,) = server.engines(model)
    files = FILES if os.geteuid() or start_options() else FILES[:-1]
    with Callers(server, [model], pause_seconds=0.2, max_new_tokens=4) as callers:
        for version, (change, cause, reason) in enumerate(files, 2):
            folder.put(model, str(version), "two", change)
            is_refused(server, model, str(version), cause, reason)
            serves_alone(server, model, one, old)
    assert server.metric("dragoman_version_swaps_total", model=model, outcome="refused") == len(files)
    assert {event["default"] for event in server.logged(Event.VERSIONS_SERVE) if event["model"] == model} == {"1"}
    assert callers.failures == [] and {answer.version for answer in callers.answers} == {one}


def test_engines_that_crash_hang_or_do_not_fit_are_given_up(server: Server, folder: ModelFolder, model: str, one: str) -> None:
    (old,) = server.engines(model)
    two = folder.content("two")

    def put(version: str, number: signal.Signals) -> int:
        before = processes(server)
        folder.put(model, version, "two")
        engine = next_engine(server, before)
        os.kill(engine, number)
        return engine

    with Callers(server, [model], pause_seconds=0.2, max_new_tokens=4) as callers:
        put("2", signal.SIGKILL)
        is_refused(server, model, "2", "start", "killed by signal 9")
        serves_alone(server, model, one, old)
        hanging = put("3", signal.SIGSTOP)
        is_refused(server, model, "3", "start", r"it is not ready after 7 s \(load_timeout_seconds\)")
        serves_alone(server, model, one, old)
        assert not is_running(hanging)
        say(server, folder, model, "[settings]\nmax_slots = 100000000\n", "first")
        folder.put(model, "4", "two")
        is_refused(server, model, "4", "memory", r"it may take \d+ MiB, and \d+ MiB of (the machine is free|the container's limit)")
        serves_alone(server, model, one, old)
        assert callers.failures == [] and {answer.version for answer in callers.answers} == {one}

        say(server, folder, model, "[swap]\nprobation_seconds = 600\n", "second")
        folder.put(model, "5", "two")
        serves(server, model, "5")
        time.sleep(1.0)  # the reason tells for how long it has served
        kill(server.engines(model)[-1])
        refused = is_refused(server, model, "5", "death", r"its engine ended within \d+\.\d s of beginning to serve")
        serves_alone(server, model, one, old)
        assert server.metric("dragoman_version_swaps_total", model=model, outcome="rolled_back") == 1
        callers.wait_for_more()
    # Only what was in the dead engine, or came before it was known to be dead, has an error to show.
    for failure in callers.failures:
        assert failure.status == "UNAVAILABLE" and failure.began <= seconds_of(refused) + 0.5, failure
    assert {answer.version for answer in callers.answers} - {""} == {one, two}


def test_a_flat_folder_whose_files_are_replaced_serves_what_it_had(server: Server, folder: ModelFolder, model: str) -> None:
    """The old files are gone then: its engine and its tokenisers are all there is of the old version."""
    flat, scratch, last = folder.path / model, folder.path / ".next", folder.path / ".last"
    folder.asked[model] = []
    one, two = folder.content("one"), folder.content("two")

    def replace(bundle: str, change: Change = lambda _: None) -> None:
        folder.copy(bundle, scratch, model)
        change(scratch)
        if flat.exists():
            flat.rename(last)
        scratch.rename(flat)
        shutil.rmtree(last, ignore_errors=True)

    replace("one")
    serves(server, model, one)
    (old,) = server.engines(model)
    replace("two", flip_a_byte)
    server.wait_for(Event.VERSION_REFUSED, model=model, cause="bundle")
    server.wait_for_metric(1, "dragoman_version_state", model=model, version="", state="refused", cause="bundle")
    serves_alone(server, model, one, old)
    replace("two")
    serves(server, model, two)
    kill(server.engines(model)[-1])
    assert server.wait_for(Event.VERSION_REFUSED, model=model, cause="death")["version"] == two
    serves_alone(server, model, one, old)
    shutil.rmtree(flat)


def test_with_a_gap_a_bad_version_costs_the_gap_alone(server: Server, folder: ModelFolder, model: str, one: str) -> None:
    say(server, folder, model, AT_ONCE + 'mode = "restart"\n', "third")
    (old,) = server.engines(model)
    folder.put(model, "2", "two", damage_a_graph)
    server.wait_for(Event.VERSION_REFUSED, model=model, version="2", cause="start")
    serves(server, model, "1")
    wait_until(lambda: is_answered_by(server, model, one), "version 1 is back")
    assert not is_running(old)
    folder.put(model, "3", "two")
    serves(server, model, "3")
    wait_until(lambda: is_answered_by(server, model, folder.content("two")), "version 3 answers")
    (last,) = server.engines(model)
    assert last == server.engine_pids()[-1]
