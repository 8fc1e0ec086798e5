"""Answers of real servers are compared bit for bit, and what differs or is missing is told."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import sameness
from benchmarks.harness.setting import Setting, has_setting
from benchmarks.sameness import BATCH, LOADS, SEARCHES, Asked, ask, measure, requests, row, verdict
from dragoman.v1 import generation_pb2

TEXTS = ["a dog runs over the grass", "two men stand on a ladder", "one child plays", "a dog"]
SETTINGS = [
    Setting(replicas, 1, 16, fronts)
    for replicas in ((1, 2) if has_setting("replicas") else (1,))
    for fronts in ((1, 2) if has_setting("front_ends") else (1,))
]


def test_every_search_is_asked_for_and_samples_have_seeds() -> None:
    asked = requests(TEXTS, 2 * len(SEARCHES))
    assert [request.text for request in asked[:5]] == [*TEXTS, TEXTS[0]]
    assert len({request.request_id for request in asked}) == len(asked)
    assert {request.HasField("seed") for request in asked if request.do_sample} == {True}
    assert max(request.num_beams for request in asked) == 8 and any(request.return_alternatives for request in asked)


@pytest.mark.e2e
def test_answers_are_the_same_alone_and_in_company_whatever_processes_there_are(
    endless: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sameness, "CONCURRENCY", 8)
    asked = [request for request in requests(TEXTS, 2 * len(SEARCHES)) if not request.forced_prefix]
    for request in asked:
        request.max_new_tokens = 24
    rows = measure(endless[1], asked, SETTINGS, ["--warmup=false", "--max-slots-per-request=8"])
    assert len(rows) == len(SETTINGS) * (len(LOADS) + 1)
    assert {line["answers"] for line in rows} == {len(asked)}
    assert verdict(rows, len(asked))[0], rows


def test_what_differs_and_what_is_missing_is_told() -> None:
    found = Asked({"a": b"1", "b": b"2"}, Counter({"UNAVAILABLE": 1}))
    line = row(Setting(2, 1, 64, 1), "alone", found, {"a": b"1", "b": b"3", "c": b"4"})
    assert (line["answers"], line["different"], line["not answered"], line["first of them"]) == (2, 1, "1 UNAVAILABLE", "b")
    assert verdict([line], 3) == (False, "- MISSED: 1 of 2 answers differ, 1 are missing")
    assert verdict([line | {"different": 0, "answers": 3}], 3) == (True, "- kept: 0 of 3 answers differ, 0 are missing")


def test_only_the_time_an_answer_took_may_differ() -> None:
    asked = Asked()
    for name, text, seconds in (("a", "x", 1.0), ("b", "x", 2.0)):
        timings = generation_pb2.Timings(total_seconds=seconds)
        asked.take(generation_pb2.GenerateResponse(request_id=name, text=text, timings=timings))
    assert asked.answers["a"].replace(b"a", b"b") == asked.answers["b"]


@pytest.mark.parametrize("load", [*LOADS])
def test_a_request_without_an_answer_is_counted(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sameness, "NUM_NOISY", 1)
    found = asyncio.run(ask("127.0.0.1:1", requests(TEXTS, 3), load))
    assert not found.answers and found.failures == Counter({"UNAVAILABLE": 3})
    assert BATCH not in LOADS
