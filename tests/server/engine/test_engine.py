"""The step loop on a fake model: answers, slots, deadlines, refusals, failures, and what it reports."""

import pytest

from dragoman.server.engine.engine import MAX_CONSECUTIVE_FAILURES, EngineIsBroken
from dragoman.server.engine.forecast import MIN_STEPS
from dragoman.server.engine.messages import SearchOptions, Share
from dragoman.server.engine.snapshot import MAX_CALLERS, CallerUse, EngineSnapshot, StepTotals, summed_up
from dragoman.server.engine.watched import LEASE_SECONDS
from tests.server.engine.bench import ORIGIN, Bench

# A source is [answer length, ...]: see the bench's fake model.


def test_a_callers_own_limit_is_named() -> None:
    bench = Bench(max_slots=2)
    for i in range(4):
        bench.submit(i, [5, i], share=Share("few", max_waiting=1, max_slots=1))
    bench.submit(4, [5, 4], share=Share("narrow", max_slots=1), search=SearchOptions(num_beams=2))
    limits = {i: (end.reason, end.limit) for i, end in bench.finished.items()}
    assert limits == {2: ("queue_full", "max_waiting"), 3: ("queue_full", "max_waiting"), 4: ("queue_full", "max_slots")}
    assert bench.engine.statistics().at_their_limit["few"] > 0
    bench.step()
    assert bench.engine.statistics().at_their_limit.keys() == {"few"}, "one waits, and its slot is taken"
    bench.run()
    assert bench.engine.statistics().at_their_limit == {}


def test_a_retry_hint_is_about_the_callers_own_part() -> None:
    bench = Bench(max_slots=1, max_waiting_requests=40, step_seconds=0.1)
    bench.submit(0, [1, 0])
    bench.run()
    for i in range(1, 42):
        bench.submit(i, [1, i], share=Share("a") if i < 22 else Share("b", 3.0))
    assert bench.engine.statistics().without_claim == pytest.approx({"a": 2.1 * 0.1 * 4})
    bench.submit(42, [1, 42], share=Share("a"))
    assert bench.finished[42].retry_after_seconds == pytest.approx(2.1 * 0.1 * 4)
    bench.submit(43, [1, 43], share=Share("b", 3.0))
    assert bench.finished[21].reason == "queue_full", "by weight it was the other one's turn to leave"


@pytest.mark.parametrize("idle_seconds", [0, 3600])
def test_a_retry_hint_follows_the_rate_of_completions_and_forgets_idle_time(idle_seconds: float) -> None:
    bench = Bench(max_slots=1, max_waiting_requests=1, step_seconds=0.5)
    for i in range(20):  # one token each: two requests a second
        bench.wait(idle_seconds)
        bench.submit(i, [0, i])
        bench.run()
    for i in (100, 101, 102):
        bench.submit(i, [0])
    assert bench.finished[102].retry_after_seconds == pytest.approx(0.5, rel=0.05)


def test_only_sources_for_which_there_is_no_memory_even_alone_are_refused() -> None:
    bench = Bench(max_slots=4)
    bench.runner.memory_tokens = 5
    for number, length in enumerate([5, 6, 4, 6, 6, 6, 6, 6, 5]):
        bench.submit(number, [3] * length)
    bench.run()
    assert [bench.reasons[i] for i in range(9)] == ["eos", "queue_full", "eos", *["queue_full"] * 5, "eos"]
    assert all(end.retry_after_seconds > 0 for end in bench.finished.values() if end.reason == "queue_full")


def test_statistics_describe_the_last_steps_the_queue_and_the_caches() -> None:
    bench = Bench(max_slots=2, step_seconds=1)
    reserved, _ = bench.runner.cache_bytes()
    idle = bench.engine.statistics()
    assert (idle.cache_bytes_reserved, idle.cache_bytes_used, idle.queue_seconds) == (reserved, 0, 0)
    bench.submit(0, [3, 5])
    bench.run()  # three steps: its slot was held for 3 s
    for i, size in enumerate((8, 6, 5), 1):
        bench.submit(i, [30] * size)
    bench.engine.step()
    (report,) = bench.engine.take_reports().values()
    told = report.statistics
    assert (told.num_waiting, told.num_waiting_tokens, told.num_running, told.num_slots) == (1, 5, 2, 2)
    (step,), (prefill,) = told.steps, told.prefills
    assert (step.num_rows, step.seconds, prefill.num_rows, prefill.num_tokens) == (2, 1, 2, 14)
    assert told.queue_seconds == pytest.approx((2 + 1 + 1 - 2 - 0.5) * 3 / 2)
    bench.step(16)
    assert 0 < bench.engine.statistics().cache_bytes_used <= reserved
    bench.run()
    assert bench.engine.statistics().cache_bytes_used == 0
    ends = [bench.finished[i] for i in range(4)]
    assert all(end.admitted is not None and end.first_token is not None for end in ends)
    assert [(end.admitted, end.first_token, end.ended) for end in ends[:2]] == [(100, 101, 103), (103, 104, 133)]


@pytest.fixture
def busy() -> Bench:
    bench = Bench(max_slots=1, step_seconds=0.5)
    for i in range(MIN_STEPS // 4):
        bench.submit(i, [4, i])
        bench.run()
    for i in (100, 101):
        bench.submit(i, [4, i])
    bench.step()
    return bench


def test_a_deadline_that_cannot_be_met_is_refused_at_once(busy: Bench) -> None:
    num_steps, now = len(busy.runner.step_rows), busy.clock.now
    busy.submit(1000, [4, 1], deadline=now + 3.4)  # 101 and half of 100, 2 s each, and one step
    end = busy.finished[1000]
    assert (end.reason, end.admitted, end.num_generated, end.ended) == ("deadline_unmet", None, 0, now)
    assert end.needed_seconds == pytest.approx(3.5)
    assert len(busy.runner.step_rows) == num_steps and busy.engine.scheduler.num_waiting == 1
    busy.submit(1001, [1, 1], deadline=now + 3.5)
    busy.submit(1002, [1, 1], deadline=now + 3.4, priority=5)
    busy.submit(1003, [1, 1])
    busy.run()
    assert [busy.reasons[i] for i in (1001, 1002, 1003)] == ["deadline", "eos", "eos"]
    assert busy.order.index(1002) < busy.order.index(101)
    busy.submit(1004, [1, 1], deadline=busy.clock.now + 0.1)
    busy.run()
    assert busy.reasons[1004] == "eos", "an idle engine refuses nothing"


def look(bench: Bench) -> EngineSnapshot:
    (engine,) = bench.engine.snapshot().engines
    return engine


def test_a_snapshot_describes_every_slot() -> None:
    bench = Bench()
    bench.submit(1, [30, 1], share=Share("alice"))
    bench.submit(2, [30, 2, 3], share=Share("bob"), search=SearchOptions(num_beams=3, forced_prefix=[9, 9]))
    bench.step(2)
    assert [slot.num_tokens for slot in look(bench).slots] == [2, 0], "a forced prefix is not generated"
    bench.step(3)
    bench.submit(3, [30, 3], share=Share("alice"))
    snapshot = bench.engine.snapshot()
    slots = snapshot.engines[0].slots
    assert [slot.slot for slot in slots] == [0, 1, 2, 3]
    assert {(slot.request, slot.num_source_tokens, slot.num_tokens) for slot in slots} == {(1, 2, 5), (2, 3, 3)}
    assert {slot.max_new_tokens for slot in slots} == {40} and not any(slot.is_prefill for slot in slots)
    assert snapshot.callers == [CallerUse("alice", 1, 1), CallerUse("bob", 0, 1)]
    bench.run()
    assert bench.engine.snapshot().callers == [] == look(bench).slots
    bench = Bench(max_slots=2, budget=2, has_prompts=True)
    bench.submit(1, [8] * 9)
    bench.step()
    (slot,) = look(bench).slots
    assert (slot.is_prefill, slot.num_tokens) == (True, 0)
    bench.step(6)
    (slot,) = look(bench).slots
    assert not slot.is_prefill and slot.num_tokens > 0


def test_steps_are_counted_while_somebody_looks() -> None:
    bench = Bench(max_slots=2)
    for i in (1, 2):
        bench.submit(i, [30, i])
    bench.step()
    assert look(bench).totals == StepTotals(), "nothing was counted before"
    for i in range(6):
        bench.engine.step()
        if i % 2:
            bench.collect()
    bench.engine.step()
    totals = look(bench).totals
    assert (totals.num_steps, totals.num_rows) == (7, 14)
    bench.wait(LEASE_SECONDS + 0.5)
    bench.step()
    bench.step()
    assert look(bench).totals.num_steps <= 7, "no more are counted when nobody has looked for a while"
    assert bench.engine.take_reports()[ORIGIN].finished == []


def test_callers_are_summed_up_and_bounded() -> None:
    uses = [CallerUse(f"caller-{i}", num_waiting=i + 1) for i in range(1000)]
    told = summed_up([*uses, CallerUse("caller-999", num_running=2), CallerUse("", 5)])
    assert len(told) == MAX_CALLERS + 1 and len({use.name for use in told}) == len(told)
    by_name = {use.name: use for use in told}
    assert by_name["caller-999"] == CallerUse("caller-999", 1000, 2)
    assert sum(use.num_waiting for use in told) == sum(range(1, 1001)) + 5
    assert told[0].name == "", "the rest has more than anybody"
    assert len(summed_up(uses[:MAX_CALLERS])) == MAX_CALLERS


def test_an_engine_that_keeps_failing_gives_up_after_answering_everything() -> None:
    bench = Bench(max_slots=1)
    for i in range(10):
        bench.submit(i, [5, i])
    with pytest.raises(EngineIsBroken):
        for _ in range(MAX_CONSECUTIVE_FAILURES):
            bench.runner.fail_next = "step"
            bench.step()
    bench.collect()
    reasons = [bench.finished[i].reason for i in range(10)]
    assert reasons == ["step_failed"] * MAX_CONSECUTIVE_FAILURES + ["draining"] * 7, "what never ran may be tried again"
    assert all(bench.finished[i].incident for i in range(MAX_CONSECUTIVE_FAILURES))
