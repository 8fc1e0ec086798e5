"""What an engine says of its slots when it is asked, and that it does nothing while it is not."""

from typing import Any

from dragoman.server.engine.messages import SearchOptions, Share
from dragoman.server.engine.snapshot import MAX_CALLERS, CallerUse, EngineSnapshot, StepTotals, summed_up
from dragoman.server.engine.watched import LEASE_SECONDS


def look(bench: Any) -> EngineSnapshot:
    [engine] = bench.engine.snapshot().engines
    return engine  # type: ignore[no-any-return]


def test_slots_tell_whose_they_are_and_how_far_they_have_come(make_bench: Any) -> None:
    bench = make_bench(max_slots=4)
    bench.submit(1, [30, 1], share=Share("alice"))
    bench.submit(2, [30, 2, 3], share=Share("bob"), search=SearchOptions(num_beams=3))
    for _ in range(5):
        bench.step()
    bench.submit(3, [30, 3], share=Share("alice"))
    snapshot = bench.engine.snapshot()
    slots = snapshot.engines[0].slots
    assert [slot.slot for slot in slots] == [0, 1, 2, 3]
    assert sorted(slot.request for slot in slots) == [1, 2, 2, 2]
    assert {(slot.request, slot.num_source_tokens, slot.num_tokens) for slot in slots} == {(1, 2, 5), (2, 3, 5)}
    assert {slot.max_new_tokens for slot in slots} == {40} and not any(slot.is_prefill for slot in slots)
    assert snapshot.callers == [CallerUse("alice", 1, 1), CallerUse("bob", 0, 1)]
    bench.run()
    assert bench.engine.snapshot().callers == [] == look(bench).slots


def test_a_forced_prefix_is_not_counted_as_generated(make_bench: Any) -> None:
    bench = make_bench(max_slots=1)
    bench.submit(1, [30, 1], search=SearchOptions(forced_prefix=[9, 9, 9]))
    bench.step()
    assert look(bench).slots[0].num_tokens == 0
    for _ in range(4):
        bench.step()
    assert look(bench).slots[0].num_tokens == 2


def test_steps_are_counted_from_when_somebody_looks_whenever_reports_are_made(make_bench: Any) -> None:
    bench = make_bench(max_slots=2)
    bench.submit(1, [30, 1])
    bench.submit(2, [30, 2])
    bench.step()
    bench.engine.take_reports()
    first = look(bench).totals
    for i in range(6):
        bench.step()
        if i % 2:
            bench.engine.take_reports()
    assert look(bench).totals.num_steps - first.num_steps == 6
    bench.step()
    last = look(bench).totals
    assert (last.num_steps - first.num_steps, last.num_rows - first.num_rows) == (7, 14)


def test_nothing_is_counted_while_nobody_looks_and_no_more_when_nobody_has_for_a_while(make_bench: Any) -> None:
    bench = make_bench(max_slots=1)
    watched = bench.engine._watched
    bench.submit(1, [30, 1])
    bench.step()
    bench.engine.take_reports()
    assert not watched.is_watched and watched._totals == StepTotals()
    look(bench)
    bench.step()
    bench.engine.take_reports()
    assert watched.is_watched
    bench.clock.now += LEASE_SECONDS + 0.5
    bench.engine.take_reports()
    assert not watched.is_watched
    counted = watched._totals
    bench.step()
    bench.engine.take_reports()
    assert watched._totals == counted


def test_looking_changes_no_answer(make_bench: Any) -> None:
    def answers(is_watched: bool) -> Any:
        bench = make_bench(max_slots=3)
        for i in range(6):
            bench.submit(i, [5 + 3 * i, i], search=SearchOptions(num_beams=1 + i % 3))
        while bench.engine.has_work:
            bench.step()
            if is_watched:
                bench.engine.snapshot()
        bench.collect()
        return {number: finished.answers for number, finished in bench.finished.items()}

    assert answers(True) == answers(False)


def test_prompts_that_are_still_read_are_told_apart(make_bench: Any) -> None:
    bench = make_bench(max_slots=2, budget=2, has_prompts=True)
    bench.submit(1, [8] * 9)
    bench.step()
    [slot] = look(bench).slots
    assert (slot.is_prefill, slot.num_tokens) == (True, 0)
    for _ in range(6):
        bench.step()
    [slot] = look(bench).slots
    assert not slot.is_prefill and slot.num_tokens > 0


def test_callers_are_summed_up_and_bounded() -> None:
    uses = [CallerUse(f"caller-{i}", num_waiting=i + 1) for i in range(1000)]
    told = summed_up([*uses, CallerUse("caller-999", num_running=2), CallerUse("", 5)])
    assert len(told) == MAX_CALLERS + 1 and len({use.name for use in told}) == len(told)
    by_name = {use.name: use for use in told}
    assert by_name["caller-999"] == CallerUse("caller-999", 1000, 2)
    assert sum(use.num_waiting for use in told) == sum(range(1, 1001)) + 5
    assert told[0].name == "", "the rest has more than anybody"
