"""How the rounds of two servers become a row, and the server that does nothing."""

import os
from typing import Any

import pytest

from benchmarks.engine_share import Share
from benchmarks.harness.load import Load, Outcome, Record, run
from benchmarks.harness.noop import NoopServer
from benchmarks.overhead import (
    BATCH,
    BEFORE,
    NOOP,
    SERVED,
    UNARY,
    Round,
    busiest,
    describe,
    front_end_share,
    row,
    summarise,
    typical_answer,
    verdicts,
)
from dragoman.v1 import generation_pb2


def record(*latencies: float, code: str = "OK") -> Record:
    """One caller after another, from second 1 on."""
    outcomes, now = [], 1.0
    for latency in latencies:
        outcomes.append(Outcome(now, now, now + latency, code))
        now += latency
    return Record(outcomes, cpu_seconds=0.25, wall_seconds=9.0)


def a_round(rate: float, front: float, engine: float) -> Round:
    return Round(rate, [0.001] * 99 + [0.004], {"sender": 0.01, "front end": front, "engine": engine}, 1.0)


def a_noop_round(rate: float) -> Round:
    return Round(rate, [0.0005] * 100, {"sender": 0.01, "server": 0.02}, 1.0)


def test_a_turn_is_measured_from_its_first_call_to_its_last_answer() -> None:
    done = summarise(record(0.5, 0.25, 1.25), {"engine": 1.0})
    assert done.rate == pytest.approx(3 / 2)
    assert done.seconds == pytest.approx([0.25, 0.5, 1.25])
    assert (done.num_answers, done.wall_seconds) == (3, pytest.approx(2.0))
    assert done.cpu_seconds == {"sender": 0.25, "engine": 1.0}


@pytest.mark.parametrize("bad", [record(), record(0.5, code="UNAVAILABLE")])
def test_a_turn_without_answers_does_not_count(bad: Record) -> None:
    with pytest.raises(RuntimeError, match="every call should be answered"):
        summarise(bad, {})


def test_medians_of_the_rounds_make_the_row() -> None:
    served = [a_round(100.0, 0.03, 0.09), a_round(400.0, 0.05, 0.07), a_round(90.0, 0.01, 0.08)]
    noop = [a_noop_round(rate) for rate in (250.0, 10.0, 200.0)]
    line = row(Load("", [], 1, 1.0, concurrency=16), {SERVED: served, NOOP: noop})
    assert (line["requests"], line["concurrency"]) == (UNARY, 16) and not any(BEFORE in column for column in line)
    assert (line["dragoman/s"], line["no-op/s"], line["share"]) == (100.0, 200.0, 0.5)
    assert (line["dragoman p50 ms"], line["dragoman p99 ms"], line["no-op p50 ms"]) == (1.0, 1.0, 0.5)
    assert (line["dragoman: front end µs"], line["dragoman: engine µs"], line["no-op: server µs"]) == (300, 800, 200)
    assert line["busiest"] == "engine 0.08"


def test_an_older_server_has_its_own_share() -> None:
    found = {SERVED: [a_round(100.0, 0.03, 0.09)], NOOP: [a_noop_round(400.0)], BEFORE: [a_round(80.0, 0.03, 0.09)]}
    line = row(Load("", [], 1, 1.0, concurrency=64, batch_size=16), found)
    assert (line["requests"], line["share"], line["before/s"], line["before: share"]) == (BATCH, 0.25, 80.0, 0.2)
    assert front_end_share([line]) == [f"- {BATCH}: the no-op server's processor time for a request is 66.7% of the front end's"]


def test_the_busiest_process_is_named() -> None:
    assert busiest([a_round(1.0, 0.96, 0.5)]) == "front end 0.96"


def test_targets_count_where_throughput_is_highest() -> None:
    rows: list[dict[str, Any]] = [
        {"requests": UNARY, "concurrency": 1, "dragoman/s": 50.0, "share": 0.9},
        {"requests": UNARY, "concurrency": 64, "dragoman/s": 80.0, "share": 0.3},
    ]
    assert verdicts(rows) == [f"- MISSED: 30.0% of the no-op server's requests a second, {UNARY}, concurrency 64 (at least 35%)"]
    rows[1]["share"] = 0.35
    rows.append({"requests": BATCH, "concurrency": 64, "dragoman/s": 70.0, "share": 0.81})
    assert [line.partition(" of the")[0] for line in verdicts(rows)] == ["- kept: 35.0%", "- kept: 81.0%"]


def test_what_is_not_inside_the_runner_is_outside() -> None:
    text = describe(Share(64, 0.0034, 0.9, 1.0, 1.0, 1.0))
    assert text == "- of a step with 64 rows (3.40 ms), 10.0% is spent outside ONNX Runtime"


def test_the_server_that_does_nothing_gives_its_answer_to_every_call() -> None:
    answer = generation_pb2.GenerateResponse(text="Ein Hund.", tokens=[3, 4, 5])
    with NoopServer(answer) as noop:
        assert typical_answer(noop.address, ["a", "b"]) == answer
        done = run(Load(noop.address, ["a", "b"], 1, 0.2, concurrency=4))
        pid = noop.pid
    assert done.outcomes and {outcome.code for outcome in done.outcomes} == {"OK"}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_answer_of_median_size_is_typical(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        def __init__(self, channel: object) -> None:
            pass

        def Generate(self, request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateResponse:
            return generation_pb2.GenerateResponse(text=request.text)

    monkeypatch.setattr("benchmarks.overhead.generation_pb2_grpc.GenerationStub", Stub)
    assert typical_answer("127.0.0.1:1", ["aaaaa", "a", "aaa"]).text == "aaa"


def test_a_batch_is_answered_request_by_request() -> None:
    answer = generation_pb2.GenerateResponse(text="Ein Hund.", tokens=[3, 4, 5])
    with NoopServer(answer) as noop:
        done = run(Load(noop.address, ["a", "b"], 1, 0.2, concurrency=8, batch_size=4))
    assert len(done.outcomes) >= 8 and len(done.outcomes) % 4 == 0
    assert {outcome.code for outcome in done.outcomes} == {"OK"}
