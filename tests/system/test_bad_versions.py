"""Ways in which a new version can be bad: the old one serves on, nothing is lost, and all that tell of versions say why."""

import os
import re
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.swaps.callers import Callers
from benchmarks.swaps.timeline import seconds_of
from dragoman.client.repository import RepositoryClient
from tests.system.harness.models import FLAGS as VERSION_FLAGS
from tests.system.harness.models import ModelFolder, seal
from tests.system.harness.server import is_running, next_engine, processes, wait_until
from tests.system.test_versions import AT_ONCE, ask, serves, until_more_are_answered

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of processes")]

FLAGS = (*VERSION_FLAGS, "--admin-port", "0")
# What a root without these may do to files is what their modes say.
AS_OTHERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


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


def say_another_format(folder: Path) -> None:
    seal(folder, format_version=99)


def damage_a_graph(folder: Path) -> None:
    (folder / "decoder.onnx").write_bytes(b"this is no graph")
    seal(folder)


def lose_a_file(folder: Path) -> None:
    (folder / "encoder.weights").unlink()


def close_a_file(folder: Path) -> None:
    (folder / "encoder.weights").chmod(0)


def do_nothing(folder: Path) -> None: ...


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


Change = Callable[[Path], None]
FILES: dict[str, tuple[str, Change, str, str]] = {
    "a flipped byte": ("two", flip_a_byte, "bundle", r"decoder\.weights.*(checksum|SHA-256)"),
    "wrong answers": ("two", take_others_weights, "proof", r"sample \d+"),
    "another format": ("two", say_another_format, "bundle", r"format.* 99"),
    "a graph that cannot be loaded": ("two", damage_a_graph, "start", r"the engine cannot start: .*decoder\.onnx"),
    "a missing file": ("two", lose_a_file, "bundle", r"encoder\.weights: no such file"),
    "the manifest of another model": ("other", do_nothing, "bundle", r"is of model 'beta', not of 'alpha'"),
    "no right to read": ("two", close_a_file, "bundle", r"encoder\.weights.*[Pp]ermission denied"),
}


def is_refused(server: Any, version: str, cause: str, reason: str) -> None:
    """Wait until a version is refused, and look that all say so who have to."""
    line = server.wait_for("a version is refused", version=version)
    assert (line["model"], line["cause"], line["level"]) == ("alpha", cause, "error")
    assert re.search(reason, line["reason"]) and "\n" not in line["reason"], line["reason"]
    state = {"model": "alpha", "version": version, "state": "refused", "cause": cause}
    wait_until(lambda: server.metric("dragoman_version_state", **state) == 1, "the metrics say so")
    with RepositoryClient(server.admin_address) as operators:
        listed = {one.name: one for model in operators.models()[0] if model.name == "alpha" for one in model.versions}
    assert (listed[version].state, listed[version].cause, listed[version].reason) == ("refused", cause, line["reason"])
    with urllib.request.urlopen(f"{server.metrics_address}/readyz?verbose", timeout=10) as answer:
        ready, *troubles = answer.read().decode().splitlines()
    assert ready == "ready" and f"alpha: version {version} is refused ({cause}): {line['reason']}" in troubles


def alone(server: Any, one: str, old: int) -> None:
    """Look that the old version serves, by the engine that it had, and that no other is left."""
    assert ask(server).model_version == one
    wait_until(lambda: [pid for pid in server.engine_pids() if is_running(pid)] == [old], "the other engine has ended")
    wait_until(lambda: server.metric("dragoman_engine_up", model="alpha") == 1, "one engine is up")


def say(server: Any, models: ModelFolder, text: str, label: str) -> None:
    """Write `model.toml`, and wait until it is in use: of a label that leads nowhere the log tells."""
    models.say("alpha", f'{text}[labels]\n{label} = "nowhere"\n')
    server.wait_for("what is wanted of a model cannot be had", problem=f"labels.{label}: there is no version 'nowhere'")


def start_flags() -> dict[str, Any]:
    """Return how a server is started for which the modes of files count, whoever runs the tests."""
    if os.geteuid():
        return {}
    return {"prefix": AS_OTHERS} if shutil.which("setpriv") else {}


def test_files_that_are_bad_are_refused_one_after_the_other(serve: Any, models: ModelFolder) -> None:
    one = models.put("alpha", "1", "one")
    shutil.copytree(models.bundle("three"), models.path / ".three")
    started = start_flags()
    with (
        serve(models.path, *FLAGS, **started) as server,
        Callers(server.address, ["alpha"], ["a dog"], 20, max_new_tokens=4) as callers,
    ):
        (old,) = server.engine_pids()
        for number, (bundle, change, cause, reason) in enumerate(FILES.values(), 2):
            if change is close_a_file and not (os.geteuid() or started):
                continue
            models.put("alpha", str(number), bundle, change)
            is_refused(server, str(number), cause, reason)
            alone(server, one, old)
        assert server.metric("dragoman_version_swaps_total", outcome="refused") == number - 1
        assert not any(event["event"] == "versions that serve" and event["default"] != "1" for event in server.events)
    assert callers.failures == [] and {answer.version for answer in callers.answers} == {one}


def test_engines_that_crash_hang_or_do_not_fit_are_given_up(serve: Any, models: ModelFolder) -> None:
    one, two = models.put("alpha", "1", "one"), models.content("two")
    with serve(models.path, *FLAGS, "--load-timeout-seconds", "4") as server:
        (old,) = server.engine_pids()
        with Callers(server.address, ["alpha"], ["a dog"], 20, max_new_tokens=4) as callers:

            def put(version: str, do: Callable[[int], None]) -> int:
                before = processes(server)
                models.put("alpha", version, "two")
                engine = next_engine(server, before)
                do(engine)
                return engine

            put("2", kill)
            is_refused(server, "2", "start", "killed by signal 9")
            alone(server, one, old)
            hanging = put("3", stop)
            is_refused(server, "3", "start", r"it is not ready after 4 s \(load_timeout_seconds\)")
            alone(server, one, old)
            assert not is_running(hanging)
            say(server, models, "[settings]\nmax_slots = 100000000\n", "first")
            models.put("alpha", "4", "two")
            is_refused(server, "4", "memory", r"it may take \d+ MiB, and \d+ MiB of (the machine is free|the container's limit)")
            alone(server, one, old)
            assert callers.failures == [] and {answer.version for answer in callers.answers} == {one}

            say(server, models, "[swap]\nprobation_seconds = 600\n", "second")
            models.put("alpha", "5", "two")
            serves(server, "5")
            time.sleep(1.0)
            new = server.engine_pids()[-1]
            assert new != old
            kill(new)
            is_refused(server, "5", "death", r"its engine ended within \d+\.\d s of beginning to serve")
            alone(server, one, old)
            assert server.metric("dragoman_version_swaps_total", outcome="rolled_back") == 1
            until_more_are_answered(callers)
        # Only what was in the dead engine, or came before it was known to be dead, has an error to show.
        refused = next(event for event in server.events if event["event"] == "a version is refused" and event["version"] == "5")
        for failure in callers.failures:
            assert failure.error.startswith("UNAVAILABLE") and failure.began <= seconds_of(refused) + 0.5, failure
        assert {answer.version for answer in callers.answers} - {""} == {one, two}
        assert server.terminate() == 0


@pytest.mark.parametrize("flags", [(), ("--front-ends", "2")], ids=["one", "two front ends"])
def test_a_flat_folder_whose_files_are_replaced_by_bad_ones_serves_what_it_had(
    serve: Any, models: ModelFolder, flags: tuple[str, ...]
) -> None:
    """The old files are gone then: its engine and its tokenisers are all there is of the old version."""
    flat = models.path / "alpha"
    shutil.copytree(models.bundle("one"), flat)
    one = models.content("one")

    def replace(change: Change) -> None:
        shutil.copytree(models.bundle("two"), models.path / ".next")
        change(models.path / ".next")
        flat.rename(models.path / ".last")
        (models.path / ".next").rename(flat)
        shutil.rmtree(models.path / ".last")

    with serve(models.path, *FLAGS, *flags) as server:
        (old,) = server.engine_pids()
        replace(flip_a_byte)
        server.wait_for("a version is refused", cause="bundle")
        wait_until(
            lambda: server.metric("dragoman_version_state", version="", state="refused", cause="bundle") == 1, "metrics say so"
        )
        alone(server, one, old)
        replace(do_nothing)
        serves(server, models.content("two"))
        kill(server.engine_pids()[-1])
        serves_again = server.wait_for("a version is refused", cause="death")
        assert serves_again["version"] == models.content("two")
        alone(server, one, old)
        for _ in range(20):
            assert ask(server).model_version == one
        assert server.terminate() == 0


def test_with_a_gap_a_bad_version_costs_the_gap_and_not_the_model(serve: Any, models: ModelFolder) -> None:
    one, two = models.put("alpha", "1", "one"), models.content("two")
    models.say("alpha", AT_ONCE + 'mode = "restart"\n')
    with serve(models.path, *FLAGS) as server:
        (old,) = server.engine_pids()
        models.put("alpha", "2", "two", damage_a_graph)
        server.wait_for("a version is refused", version="2", cause="start")
        serves(server, "1")
        assert ask(server).model_version == one and not is_running(old)
        models.put("alpha", "3", "two")
        serves(server, "3")
        assert ask(server).model_version == two
        (last,) = (pid for pid in server.engine_pids() if is_running(pid))
        assert last == server.engine_pids()[-1]
        assert server.terminate() == 0
