"""The lone request beside a full load: what is sent, what counts, and what is said of it."""

from pathlib import Path

import pytest

from benchmarks import lone
from benchmarks.harness.load import Load, Outcome, Record
from benchmarks.harness.served import ServedModel
from benchmarks.lone import BEFORE, NOW, NUM_CALLERS, Side, texts, turn, verdict


def test_long_texts_are_joined_and_short_ones_the_shortest() -> None:
    long, short = texts(["ccc", "a", "bb", "dddd"])
    assert long == ["ccc a bb", "dddd"]
    assert short == ["a", "bb", "ccc", "dddd"]


def test_only_what_came_once_the_load_was_full_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(load: Load) -> Record:
        if load.concurrency == NUM_CALLERS:
            outcomes = [Outcome(0, 0, ended, code) for ended, code in ((0.5, "OK"), (2.0, "OK"), (4.0, "OK"), (9.0, "UNAVAILABLE"))]
        else:
            outcomes = [Outcome(0, sent, sent + 0.25, "OK") for sent in (0.0, 0.9, 1.5, 3.0)]
        return Record(outcomes, 0.1, 5.0)

    monkeypatch.setattr(lone, "run", run)
    side = Side()
    turn(side, "address", ["long"], ["short"], 4.0, 1)
    assert side.seconds == pytest.approx([0.25, 0.25]) and side.rates == [0.5] and side.failures == 1
    assert side.row("now")["p99 ms"] == "250.0"


def test_the_verdict_is_by_the_hundredth_request() -> None:
    before = Side([0.1] * 99 + [9.0], [1.0])
    assert verdict({NOW: before}) == "There was no older server to compare with."
    assert verdict({NOW: Side([0.104] * 100, [1.0]), BEFORE: before}).startswith("- kept: p99 is 1.04 times")
    assert verdict({NOW: Side([0.1] * 98 + [0.2] * 2, [1.0]), BEFORE: before}).startswith("- MISSED: p99 is 2.00 times")
    assert verdict({NOW: Side([0.1] * 100, [1.0], failures=1), BEFORE: before}).startswith("- MISSED")


@pytest.mark.e2e
def test_both_loads_are_put_on_a_real_server(endless: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lone, "SETTLE_SECONDS", 0.0)
    side = Side()
    with ServedModel(endless[1], "--num-threads=1", "--warmup=false") as server:
        turn(side, server.address, ["a dog runs over the grass"], ["a dog"], 1.0, 1)
    assert side.failures == 0 and side.seconds and len(side.rates) == 1
