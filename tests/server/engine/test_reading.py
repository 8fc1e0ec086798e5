"""Prompts that are read in pieces between steps: answers are the same under any load, and no request waits long for another's."""

from tests.server.engine.bench import Bench

# A prompt is [answer length, ...]: see the bench's fake model.


def test_an_iteration_reads_no_more_than_the_budget_in_order_of_admission() -> None:
    bench = Bench(budget=10, has_prompts=True)
    for i, length in enumerate((25, 4, 4)):
        bench.submit(i, [5, i, *[7] * (length - 2)])
    pieces = []
    for _ in range(4):
        bench.step()
        pieces.append([(row, stop - first) for row, first, stop in bench.runner.pieces])
        bench.runner.pieces.clear()
    assert pieces == [[(0, 10)], [(0, 10)], [(0, 5), (1, 4), (2, 1)], [(2, 3)]]


def test_running_requests_get_a_token_in_every_iteration_while_a_prompt_is_read() -> None:
    bench = Bench(budget=4, has_prompts=True)
    requests = [bench.submit(1, [30, 1], is_streamed=True)]
    bench.step()
    requests.append(bench.submit(2, [3, *[7] * 39]))
    for _ in range(9):
        before = len(bench.streamed[1])
        bench.engine.step()
        statistics = bench.engine.statistics()
        bench.collect()
        assert len(bench.streamed[1]) == before + 1 and bench.runner.step_rows[-1] == 2
        assert [step.num_rows for step in statistics.steps] == [1], "a row that is being read is no part of the step"
        assert [(one.num_rows, one.num_tokens) for one in statistics.prefills] == [(1, 4)]
    assert (statistics.num_running, statistics.num_waiting) == (2, 0)
    bench.run()
    bench.check(*requests)


def test_no_step_is_taken_while_all_prompts_are_being_read_and_an_empty_one_does_not_wait() -> None:
    bench = Bench(budget=4, has_prompts=True)
    bench.runner.on_read = lambda num_tokens: bench.wait(0.25 * num_tokens)
    bench.submit(1, [1, *[7] * 11])
    for _ in range(2):
        bench.step()
        assert bench.engine.has_work and bench.runner.step_rows == []
    bench.step()
    assert bench.runner.step_rows == [1]
    assert (bench.finished[1].reason, bench.finished[1].prefill_seconds) == ("eos", 12 * 0.25)
    bench.submit(2, [3, *[7] * 30])
    empty = bench.submit(3, [])
    bench.step()
    assert len(bench.engine.running) == 2 and bench.runner.step_rows == [1, 2]
    bench.run()
    assert bench.order == [1, 3, 2]
    bench.check(empty)
