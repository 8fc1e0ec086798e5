"""The step loop on a fake model: answers, slots, deadlines, refusals, failures, and what it reports."""

import pytest

from dragoman.server.engine.engine import MAX_CONSECUTIVE_FAILURES, WATCH_SECONDS, EngineIsBroken
from dragoman.server.engine.messages import MAX_CALLERS, CallerUse, EngineSnapshot, SearchOptions, StepTotals, summed_up
from tests.server.engine.bench import Bench, reference_answers

# A source is [answer length, ...]: see the bench's fake model.


def test_only_sources_for_which_there_is_no_memory_even_alone_are_refused() -> None:
    bench = Bench(max_slots=4)
    bench.runner.memory_tokens = 5
    for number, length in enumerate([5, 6, 4, 6, 6, 6, 6, 6, 5]):
        bench.submit(number, [3] * length)
    bench.run()
    assert [bench.reasons[i] for i in range(9)] == ["eos", "queue_full", "eos", *["queue_full"] * 5, "eos"]


def test_statistics_describe_the_last_steps_and_the_caches() -> None:
    bench = Bench(max_slots=2, step_seconds=1)
    reserved, _ = bench.runner.cache_bytes()
    idle = bench.engine.statistics()
    assert (idle.cache_bytes_reserved, idle.cache_bytes_used) == (reserved, 0)
    bench.submit(0, [3, 5])
    bench.run()  # three steps: its slot was held for 3 s
    for i, size in enumerate((8, 6, 5), 1):
        bench.submit(i, [30] * size)
    bench.engine.step()
    told = bench.engine.take_report().statistics
    assert (told.num_waiting, told.num_waiting_tokens, told.num_running, told.num_slots) == (1, 5, 2, 2)
    (step,), (prefill,) = told.steps, told.prefills
    assert (step.num_rows, step.seconds, prefill.num_rows, prefill.num_tokens) == (2, 1, 2, 14)
    bench.step(16)
    assert 0 < bench.engine.statistics().cache_bytes_used <= reserved
    bench.run()
    assert bench.engine.statistics().cache_bytes_used == 0
    ends = [bench.finished[i] for i in range(4)]
    assert all(end.admitted is not None and end.first_token is not None for end in ends)
    assert [(end.admitted, end.first_token, end.ended) for end in ends[:2]] == [(100, 101, 103), (103, 104, 133)]


@pytest.mark.parametrize(("sizes", "batches"), [([30, 6, 4, 4], [1, 2, 1]), ([4, 5, 6, 7], [2, 1, 1])])
def test_the_prefill_budget_bounds_each_step(sizes: list[int], batches: list[int]) -> None:
    """A source larger than the budget is encoded alone."""
    bench = Bench(max_slots=8, budget=10)
    for i, size in enumerate(sizes):
        bench.submit(i, [9] * size)
    admitted = []
    while bench.engine.waiting:
        bench.engine.step()
        (prefill,) = bench.engine.take_report().statistics.prefills
        admitted.append(prefill.num_admitted)
    assert admitted == batches


def test_log_probabilities_are_asked_for_while_a_request_wants_them() -> None:
    bench = Bench(max_slots=2)
    without = SearchOptions(has_log_probs=False)
    request = bench.submit(0, [6, 4], search=without)
    bench.step(2)
    other = bench.submit(1, [3, 5])
    bench.run()
    assert bench.runner.step_candidates == [0, 0, 1, 1, 1, 0]
    (answer,), (expected,) = bench.finished[0].answers, reference_answers(request)
    assert answer.token_ids == expected.token_ids and answer.log_probs == [0.0] * 6 and answer.score == 0
    bench.check(other)
    forced = SearchOptions(has_log_probs=False, is_end_forced=True)
    for number, (length, limit) in enumerate([(9, 4), (9, 1), (4, 4), (3, 4)], 10):
        request = bench.submit(number, [length, 5], limit, search=forced)
        bench.run()
        assert bench.finished[number].answers[0].token_ids == reference_answers(request)[0].token_ids
        assert bench.finished[number].reason == "eos"
    bench.runner.step_candidates.clear()
    bench.runner.can_skip_log_probs = False
    bench.submit(2, [3, 5], search=without)
    bench.run()
    assert bench.runner.step_candidates == [1, 1, 1] and bench.finished[2].answers[0].score == 0


def test_requests_start_in_the_order_in_which_they_were_given_and_a_wide_one_is_not_passed_over() -> None:
    bench = Bench(max_slots=3, step_seconds=1)
    for i, width in enumerate((2, 3, 1)):
        bench.submit(i, [9, i], search=SearchOptions(num_beams=width))
    bench.run()
    first, second, third = (bench.finished[i].admitted or 0 for i in range(3))
    assert first < second < third


def test_deadlines_end_running_and_waiting_requests_and_no_others() -> None:
    bench = Bench(max_slots=2, step_seconds=1)
    for i, seconds in enumerate((2.5, None, 4.5, 90.0)):
        bench.submit(i, [9, i], deadline=None if seconds is None else bench.clock.now + seconds)
    bench.run()
    assert bench.reasons == {0: "deadline", 1: "eos", 2: "deadline", 3: "eos"}
    assert bench.finished[0].num_generated == 3 and bench.finished[2].num_generated == 2


def snapshot_of(bench: Bench) -> EngineSnapshot:
    (engine,) = bench.engine.snapshot().engines
    return engine


def test_a_snapshot_describes_every_slot() -> None:
    bench = Bench()
    bench.submit(1, [30, 1])
    bench.submit(2, [30, 2, 3], search=SearchOptions(num_beams=3, forced_prefix=[9, 9]))
    bench.step(2)
    assert [slot.num_tokens for slot in snapshot_of(bench).slots] == [2, 0], "a forced prefix is not generated"
    bench.step(3)
    bench.submit(3, [30, 3])
    snapshot = bench.engine.snapshot()
    slots = snapshot.engines[0].slots
    assert [slot.slot for slot in slots] == [0, 1, 2, 3]
    assert {(slot.request, slot.num_source_tokens, slot.num_tokens) for slot in slots} == {(1, 2, 5), (2, 3, 3)}
    assert {slot.max_new_tokens for slot in slots} == {40} and not any(slot.is_prefill for slot in slots)
    bench.run()
    assert snapshot_of(bench).slots == []
    bench = Bench(max_slots=2, budget=2, has_prompts=True)
    bench.submit(1, [8] * 9)
    bench.step()
    (slot,) = snapshot_of(bench).slots
    assert (slot.is_prefill, slot.num_tokens) == (True, 0)
    bench.step(6)
    (slot,) = snapshot_of(bench).slots
    assert not slot.is_prefill and slot.num_tokens > 0


def test_steps_are_counted_while_somebody_looks() -> None:
    bench = Bench(max_slots=2)
    for i in (1, 2):
        bench.submit(i, [30, i])
    bench.step()
    assert snapshot_of(bench).totals == StepTotals(), "nothing was counted before"
    for i in range(6):
        bench.engine.step()
        if i % 2:
            bench.collect()
    bench.engine.step()
    totals = snapshot_of(bench).totals
    assert (totals.num_steps, totals.num_rows) == (7, 14)
    bench.wait(WATCH_SECONDS + 0.5)
    bench.step()
    bench.step()
    assert snapshot_of(bench).totals.num_steps <= 7, "no more are counted when nobody has looked for a while"


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
