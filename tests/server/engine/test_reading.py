"""Prompts that are read in pieces between steps: answers are the same whoever is there, and nobody waits long for another's."""

from random import Random
from typing import Any

import pytest

from dragoman.server.engine.messages import Request, SearchOptions
from dragoman.server.engine.scheduler import Limits, Scheduler
from dragoman.server.engine.sequence import Sequence

# A prompt is [answer length, ...]: see the conftest's fake model.


@pytest.fixture
def make_reading(make_bench: Any) -> Any:
    return lambda **limits: make_bench(has_prompts=True, **limits)


def test_answers_do_not_depend_on_pieces_load_or_who_leaves(make_reading: Any, reference: Any) -> None:
    """Prompts of 0 to 60 tokens, every search, requests that come, are cancelled and miss deadlines while others are read."""
    for seed in range(12):
        random = Random(seed)
        bench = make_reading(max_slots=random.choice([3, 5, 9]), budget=random.choice([1, 2, 3, 5, 16, 100]))
        bench.runner.on_step = lambda bench=bench: setattr(bench.clock, "now", bench.clock.now + 0.1)
        requests: list[Request] = []
        for number in range(25):
            source = [random.randint(1, 12), number, *random.choices(range(3, 9), k=random.randint(0, 58))]
            source = source[: random.choice([0, 1, 2, 99, 99, 99])]
            search = random.choice(
                [SearchOptions(), SearchOptions(num_beams=3, num_answers=2), SearchOptions(forced_prefix=[7, 9])]
            )
            deadline = bench.clock.now + 0.5 if number % 9 == 8 else None
            requests.append(bench.submit(number, source, 12, search=search, deadline=deadline, is_streamed=number % 2 == 0))
            for _ in range(random.randint(0, 4)):
                bench.step()
            if number % 6 == 5:
                bench.engine.cancel(b"front", random.randint(0, number))
        bench.run()
        for request in requests:
            if bench.finished[request.id].reason in ("eos", "length"):
                assert bench.finished[request.id].answers == reference(request)
        assert sum(end.reason in ("eos", "length") for end in bench.finished.values()) >= 15


def test_an_iteration_reads_no_more_than_the_budget_in_order_of_admission(make_reading: Any) -> None:
    bench = make_reading(budget=10)
    for i, length in enumerate((25, 4, 4)):
        bench.submit(i, [5, i, *[7] * (length - 2)])
    pieces = []
    for _ in range(4):
        bench.step()
        pieces.append([(row, stop - first) for row, first, stop in bench.runner.pieces])
        bench.runner.pieces.clear()
    assert pieces == [[(0, 10)], [(0, 10)], [(0, 5), (1, 4), (2, 1)], [(2, 3)]]


def test_who_runs_gets_a_token_in_every_iteration_while_a_prompt_is_read(make_reading: Any, answer_of: Any) -> None:
    bench = make_reading(budget=4)
    bench.submit(1, [30, 1], is_streamed=True)
    bench.step()
    bench.submit(2, [3, *[7] * 39])
    for _ in range(9):
        before = len(bench.streamed[1])
        bench.step()
        assert len(bench.streamed[1]) == before + 1 and bench.runner.step_rows[-1] == 2
    statistics = bench.engine.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (2, 0)
    bench.run()
    for i, source in ((1, [30, 1]), (2, [3, *[7] * 39])):
        assert (bench.finished[i].answers[0].token_ids, bench.finished[i].reason) == answer_of(source, 40)


def test_no_step_is_taken_while_all_are_being_read(make_reading: Any) -> None:
    bench = make_reading(budget=4)
    bench.submit(1, [1, *[7] * 11])
    for _ in range(2):
        bench.step()
        assert bench.engine.has_work and bench.runner.step_rows == []
    bench.step()
    assert bench.runner.step_rows == [1] and bench.finished[1].reason == "eos"


def test_rows_that_are_being_read_are_no_part_of_a_step_that_is_told(make_reading: Any) -> None:
    bench = make_reading(budget=4)
    bench.submit(1, [9, 1])
    bench.step()
    bench.submit(2, [3, *[7] * 11])
    bench.engine.step()
    (report,) = bench.engine.take_reports().values() if bench.engine.has_news else [None]
    statistics = report.statistics if report is not None else bench.engine.statistics()
    assert bench.runner.step_rows[-1] == 2 and [step.num_rows for step in statistics.steps] == [1]
    assert [(prefill.num_rows, prefill.num_tokens, prefill.num_admitted) for prefill in statistics.prefills] == [(1, 4, 1)]


def test_a_prompt_of_nothing_waits_for_nobody(make_reading: Any, answer_of: Any) -> None:
    bench = make_reading(budget=4)
    bench.submit(1, [3, *[7] * 30])
    bench.submit(2, [])
    bench.step()
    assert bench.engine.scheduler.num_running == 2 and bench.runner.step_rows == [2]
    bench.run()
    assert bench.order == [2, 1]
    assert (bench.finished[2].answers[0].token_ids, bench.finished[2].reason) == answer_of([], 40)


@pytest.mark.parametrize("way", ["cancel", "deadline", "failure", "no memory"])
def test_one_that_ends_while_it_is_read_frees_its_row_at_once(make_reading: Any, way: str, monkeypatch: Any) -> None:
    bench = make_reading(max_slots=1, budget=4)
    bench.submit(1, [3, *[7] * 30], deadline=bench.clock.now + 5 if way == "deadline" else None)
    bench.submit(2, [2, 2])
    bench.step()
    if way == "cancel":
        bench.engine.cancel(b"front", 1)
    elif way == "deadline":
        bench.clock.now += 6
    elif way == "failure":
        bench.runner.fail_next = "prefill"
        bench.step()
    else:

        def read(*_: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(bench.runner, "read", read)
            bench.step()
    bench.step()
    expected = {"cancel": "cancelled", "deadline": "deadline", "failure": "step_failed", "no memory": "queue_full"}[way]
    assert (bench.finished[1].reason, bench.finished[1].num_generated) == (expected, 0)
    assert bench.finished[1].admitted is not None
    bench.run()
    assert bench.finished[2].reason == "eos"


def test_a_failed_step_ends_those_who_are_being_read_with_the_others(make_reading: Any) -> None:
    bench = make_reading(budget=4)
    bench.submit(1, [9, 1])
    bench.step()
    bench.submit(2, [3, *[7] * 30])
    bench.runner.fail_next = "step"
    bench.step()
    assert {i: (end.reason, end.num_generated) for i, end in bench.finished.items()} == {
        1: ("step_failed", 1),
        2: ("step_failed", 0),
    }


def test_reading_is_told_with_the_answer(make_reading: Any) -> None:
    bench = make_reading(budget=4)
    read = bench.runner.read

    def slowly(row: int, source: list[int], first: int, stop: int) -> None:
        bench.clock.now += 0.25 * (stop - first)
        read(row, source, first, stop)

    bench.runner.read = slowly
    bench.submit(1, [2, *[7] * 11])
    bench.run()
    assert bench.finished[1].prefill_seconds == 12 * 0.25


def scheduler_of(*sizes: int, budget: int = 10) -> Scheduler:
    scheduler = Scheduler(Limits(8, 100, 10_000, budget))
    for i, size in enumerate(sizes):
        scheduler.submit(Sequence(b"", Request(i, [7] * size, 5, float(i))))
    return scheduler


def admitted(scheduler: Scheduler, num_unread: int | None) -> list[int]:
    return [sequence.request.id for sequence in scheduler.admit(num_unread)]


def test_prompts_are_admitted_while_less_than_the_budget_is_unread() -> None:
    assert admitted(scheduler_of(4, 5, 6, 7), 0) == [0, 1, 2]
    assert admitted(scheduler_of(4, 5, 6, 7), 7) == [0]
    assert admitted(scheduler_of(4, 5), 10) == [] and admitted(scheduler_of(4, 5), 100) == []
    assert admitted(scheduler_of(4, 5, 6, 7), None) == [0, 1], "what is encoded at once has to fit"


def test_a_prompt_longer_than_the_budget_is_admitted() -> None:
    assert admitted(scheduler_of(2000, 3), 0) == [0]
    assert admitted(scheduler_of(2000, 3), 9) == [0]


def test_prompts_of_nothing_need_no_budget() -> None:
    assert admitted(scheduler_of(0, 0, 3), 50) == [0, 1]
    assert scheduler_of(0, 0).num_waiting_tokens == 0
