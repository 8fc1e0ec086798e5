"""The judge of swaps under load, and who calls meanwhile."""

import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.swaps import kills
from benchmarks.swaps.callers import MIX, Answer, Callers
from benchmarks.swaps.kills import KilledServer
from benchmarks.swaps.swapped import Swapped
from benchmarks.swaps.timeline import PROVED, REFUSED, SERVED, Timeline, seconds_of

BEGAN = 1_700_000_000.0


def line(event: str, seconds: float, model: str = "en-de", **fields: Any) -> dict[str, Any]:
    at = datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat().replace("+00:00", "Z")
    return {"event": event, "model": model, "timestamp": at} | fields


def served(seconds: float, *versions: str, model: str = "en-de") -> dict[str, Any]:
    return line(SERVED, seconds, model, versions={str(number): version for number, version in enumerate(versions)})


def allowed(timeline: Timeline, version: str, began: float, ended: float) -> bool:
    return timeline.allows("en-de", version, BEGAN + began, BEGAN + ended)


def test_lines_tell_their_times() -> None:
    assert abs(seconds_of(line(SERVED, 1.25)) - BEGAN - 1.25) < 1e-6


def test_an_answer_is_from_a_version_that_served_between_question_and_answer() -> None:
    timeline = Timeline([served(0, "one"), line(PROVED, 10, content="two"), served(11, "two")])
    assert allowed(timeline, "one", 1, 2) and not allowed(timeline, "two", 1, 2)
    assert allowed(timeline, "one", 9, 30), "it began when that served, however long it took"
    assert allowed(timeline, "one", 10.5, 12) and allowed(timeline, "two", 10.5, 12), "either, while it is published"
    assert not allowed(timeline, "one", 11.5, 12) and allowed(timeline, "two", 11.5, 12)
    assert not allowed(timeline, "two", 1, 9.9)
    assert not allowed(timeline, "three", 0, 100) and not timeline.allows("en-fr", "one", BEGAN, BEGAN + 1)


def test_a_rollback_begins_with_the_refusal_and_a_removal_with_what_was_done() -> None:
    rolled_back = Timeline([served(0, "one"), line(PROVED, 5), served(6, "two"), line(REFUSED, 8), served(9, "one")])
    assert not allowed(rolled_back, "one", 7, 7.9) and allowed(rolled_back, "one", 7, 8.1) and allowed(rolled_back, "two", 8.9, 10)
    events = [served(0, "one"), line(PROVED, 5), served(6, "two"), served(9, "one")]
    removed = Timeline(events, {"en-de": [BEGAN + 4, BEGAN + 8.5]})
    assert not allowed(removed, "one", 7, 8.4) and allowed(removed, "one", 7, 8.6)
    assert removed.changes("en-de") == [(BEGAN + 5, BEGAN + 6), (BEGAN + 8.5, BEGAN + 9)]


def test_versions_beside_each_other_and_other_models_do_not_end_one_another() -> None:
    timeline = Timeline([served(0, "one"), served(1, "other", model="en-fr"), served(2, "one", "two"), served(3, "two")])
    assert allowed(timeline, "one", 2.5, 2.6) and allowed(timeline, "two", 2.5, 2.6)
    assert not allowed(timeline, "one", 3.5, 4)
    assert [period.version for period in timeline.periods["en-de"]] == ["one", "two"]


def test_what_failed_or_came_from_another_version_breaks_a_promise() -> None:
    timeline = Timeline([served(0, "one"), line(PROVED, 10), served(11, "two")])

    def answer(began: float, version: str, error: str = "") -> Answer:
        return Answer("unary", "en-de", BEGAN + began, BEGAN + began + 0.5, version, error)

    good = [answer(1, "one"), answer(10.7, "one"), answer(12, "two")]
    swapped = Swapped(good, timeline, [(BEGAN + 9, BEGAN + 11)], (100.0, 101.0), (3, 3))
    assert all(is_kept for is_kept, _ in swapped.promises()) and swapped.num_in_publications() == 1
    assert [len(part) for part in swapped.divided().values()] == [1, 2]
    for bad in (answer(12, "one"), answer(3, "two"), answer(3, "", "UNAVAILABLE: ended")):
        broken = Swapped([*good, bad], timeline, swapped.swaps, (100.0, 101.0), (3, 3))
        assert sum(not is_kept for is_kept, _ in broken.promises()) == 1
    told = [Answer("score", "en-de", BEGAN + 1, BEGAN + 2, "one", text="a dog", score=score) for score in (-1.0, -2.0)]
    named_wrongly = Swapped([*good, *told], timeline, swapped.swaps, (100.0, 101.0), (3, 3))
    assert [text[:2] for is_kept, text in named_wrongly.promises() if not is_kept] == ["1 "]
    grown = Swapped(good, timeline, swapped.swaps, (100.0, 150.0), (3, 4), 1, ["en-de"])
    assert sum(not is_kept for is_kept, _ in grown.promises()) == 4


async def forget(*_: object) -> None: ...


async def stumble(*_: object) -> None:
    raise ValueError("nobody foresaw this")


@pytest.mark.parametrize(("call", "error"), [(forget, "it had no end"), (stumble, "ValueError('nobody foresaw this')")])
def test_a_request_of_which_nothing_is_heard_has_failed(monkeypatch: pytest.MonkeyPatch, call: Any, error: str) -> None:
    for kind in MIX:
        monkeypatch.setattr(Callers, f"_{kind}", call)
    with Callers("127.0.0.1:1", ["en-de"], ["a dog"], 1000) as callers:
        time.sleep(0.3)
    assert len(callers.failures) == callers._num_begun >= 10
    assert error in {failure.error for failure in callers.failures} <= {error, "it had no end"}


def test_callers_that_stop_calling_are_no_success() -> None:
    with pytest.raises(RuntimeError, match="gave up"), Callers("127.0.0.1:1", [], ["a dog"], 1000):
        time.sleep(0.3)


def test_a_version_may_be_refused_only_since_it_came_and_because_its_engine_was_killed() -> None:
    def is_refused(seconds: float, cause: str, model: str = "en-de", asked: float = 5) -> bool:
        refused = line(REFUSED, seconds, model, cause=cause)
        server: Any = SimpleNamespace(events=lambda name: [refused] if name == REFUSED else [])
        return kills._is_refused(server, "en-de", [BEGAN + asked])

    assert is_refused(6, "start") and is_refused(6, "death")
    assert not is_refused(4, "start"), "it has come again since"
    assert not is_refused(6, "bundle") and not is_refused(6, "start", "en-fr")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of processes")
def test_what_a_killed_server_leaves_is_found_though_it_is_nobodys_child() -> None:
    server = KilledServer.__new__(KilledServer)
    server._scratch = tempfile.TemporaryDirectory()
    command = ["sh", "-c", "setsid sleep 60 & echo $!"]
    with subprocess.Popen(
        command, env={"TMPDIR": server._scratch.name, "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE
    ) as process:
        server.process = process
        assert process.stdout is not None
        left = int(process.stdout.readline())
        process.wait()
        assert server.everything() == [left]
        server.clear()
    assert not server.everything()


def test_calls_of_every_kind_are_among_them() -> None:
    assert abs(sum(MIX.values()) - 1) < 1e-9 and all(share > 0 for share in MIX.values())
