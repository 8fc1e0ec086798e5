"""The step loop with a runner that notices every mix-up of rows."""

import pytest

from dragoman.server.engine.engine import MAX_CONSECUTIVE_FAILURES, EngineIsBroken
from dragoman.server.engine.messages import SearchOptions, Share

# A source is [answer length, ...]: see the conftest's fake model.


def test_answers_are_the_models_whatever_else_runs(make_bench, answer_of) -> None:
    bench = make_bench(max_slots=4)
    requests = [bench.submit(i, [1 + i * 7 % 13, i, i + 1][: 2 + i % 2]) for i in range(30)]
    bench.run()
    for request in requests:
        end = bench.finished[request.id]
        (answer,) = end.answers
        assert (answer.token_ids, end.reason) == answer_of(request.source_ids, request.max_new_tokens)
        assert end.num_generated == len(answer.token_ids) + 1


def test_length_limit_ends_an_answer(bench, answer_of) -> None:
    bench.submit(1, [20, 5], limit=6)
    bench.run()
    end = bench.finished[1]
    assert (end.answers[0].token_ids, end.reason, end.num_generated) == (*answer_of([20, 5], 6), 6)


def test_streamed_tokens_add_up_to_the_answer(bench) -> None:
    bench.submit(1, [9, 1], is_streamed=True)
    bench.submit(2, [4, 1])
    bench.run()
    assert bench.streamed == {1: bench.finished[1].answers[0].token_ids}


def test_a_short_request_overtakes_long_ones_that_are_decoding(make_bench) -> None:
    """Iteration-level batching: nobody waits for the longest answer of a batch."""
    bench = make_bench(max_slots=33)
    for i in range(32):
        bench.submit(i, [35, i])
    bench.step()
    bench.submit(99, [2, 0])
    bench.run()
    assert bench.order[0] == 99


def test_cancelled_slot_is_reused_within_two_steps(make_bench) -> None:
    bench = make_bench(max_slots=2)
    bench.submit(1, [30, 1], is_streamed=True)
    bench.submit(2, [30, 2])
    bench.submit(3, [5, 3])
    bench.step()
    assert bench.engine.scheduler.num_waiting == 1
    bench.engine.cancel(b"front", 1)
    bench.step()
    assert bench.finished[1].reason == "cancelled"
    assert bench.engine.scheduler.num_waiting == 0 and bench.runner.step_rows[-1] == 2
    bench.run()
    assert bench.finished[3].reason == "eos"


def test_cancel_of_an_ended_request_is_ignored(bench) -> None:
    bench.submit(1, [1, 1])
    bench.run()
    bench.engine.cancel(b"front", 1)
    bench.engine.cancel(b"front", 77)
    bench.collect()
    assert bench.finished.keys() == {1}


def test_deadline_frees_the_slot_at_the_next_step(make_bench) -> None:
    bench = make_bench(max_slots=1)
    bench.submit(1, [30, 1], deadline=bench.clock.now + 5)
    bench.submit(2, [3, 2], deadline=bench.clock.now + 50)
    bench.submit(3, [3, 2], deadline=bench.clock.now + 4)
    bench.step()
    bench.clock.now += 6
    bench.step()
    assert bench.finished[1].reason == bench.finished[3].reason == "deadline"
    assert bench.finished[1].num_generated == 1, "what was generated is still said"
    bench.run()
    assert bench.finished[2].reason == "eos"


def test_full_queue_is_refused_before_any_work(make_bench) -> None:
    bench = make_bench(max_slots=1, max_waiting_requests=2)
    for i in range(4):
        bench.submit(i, [5, i])
    bench.collect()
    assert bench.finished[3].reason == "queue_full" and bench.finished[3].retry_after_seconds > 0
    assert bench.runner.prefill_batches == []
    bench.run()
    assert [bench.finished[i].reason for i in range(3)] == ["eos"] * 3


def test_what_is_pushed_out_of_a_full_queue_ends_once_before_any_work(make_bench) -> None:
    bench = make_bench(max_slots=1, max_waiting_requests=2)
    for i in range(3):
        bench.submit(i, [5, i], share=Share("many"))
    bench.submit(3, [5, 3], share=Share("few"))
    bench.collect()
    end = bench.finished[2]
    assert (end.reason, end.limit, end.admitted, end.num_generated) == ("queue_full", "", None, 0)
    assert end.retry_after_seconds > 0 and bench.runner.prefill_batches == []
    bench.run()
    assert {i: end.reason for i, end in bench.finished.items()} == {0: "eos", 1: "eos", 2: "queue_full", 3: "eos"}
    assert bench.order.index(3) < bench.order.index(1), "both callers had their turn"


def test_a_callers_own_limit_is_named(make_bench) -> None:
    bench = make_bench(max_slots=2)
    for i in range(4):
        bench.submit(i, [5, i], share=Share("few", max_waiting=1, max_slots=1))
    bench.submit(4, [5, 4], share=Share("narrow", max_slots=1), search=SearchOptions(num_beams=2))
    bench.collect()
    limits = {i: (end.reason, end.limit) for i, end in bench.finished.items()}
    assert limits == {2: ("queue_full", "max_waiting"), 3: ("queue_full", "max_waiting"), 4: ("queue_full", "max_slots")}
    told = bench.engine.statistics()
    assert list(told.at_their_limit) == ["few"] and told.at_their_limit["few"] > 0
    bench.step()
    assert bench.engine.statistics().at_their_limit.keys() == {"few"}, "one waits, and its slot is taken"
    bench.run()
    assert bench.engine.statistics().at_their_limit == {}


def test_a_retry_hint_is_about_the_callers_own_part(make_bench) -> None:
    bench = make_bench(max_slots=1, max_waiting_requests=40)
    bench.runner.on_step = lambda: setattr(bench.clock, "now", bench.clock.now + 0.1)
    bench.submit(0, [1, 0])
    bench.run()
    for i in range(1, 22):
        bench.submit(i, [1, i], share=Share("a"))
    for i in range(22, 42):
        bench.submit(i, [1, i], share=Share("b", 3.0))
    told = bench.engine.statistics()
    assert told.without_claim == pytest.approx({"a": 2.1 * 0.1 * 4})
    bench.submit(42, [1, 42], share=Share("a"))
    bench.collect()
    assert bench.finished[42].retry_after_seconds == pytest.approx(2.1 * 0.1 * 4)
    bench.submit(43, [1, 43], share=Share("b", 3.0))
    bench.collect()
    assert bench.finished[21].reason == "queue_full", "by weight it was the other one's turn to leave"


def test_retry_hint_follows_the_rate_of_completions(make_bench) -> None:
    bench = make_bench(max_slots=1, max_waiting_requests=1)
    bench.runner.on_step = lambda: setattr(bench.clock, "now", bench.clock.now + 0.5)
    for i in range(20):  # one token each: two requests a second
        bench.submit(i, [0, i])
        bench.run()
    for i in (100, 101, 102):
        bench.submit(i, [0])
    bench.collect()
    assert bench.finished[102].retry_after_seconds == pytest.approx(0.5, rel=0.05)


def test_retry_hint_forgets_idle_time(make_bench) -> None:
    bench = make_bench(max_slots=1, max_waiting_requests=1)
    bench.runner.on_step = lambda: setattr(bench.clock, "now", bench.clock.now + 0.5)
    for i in range(20):
        bench.clock.now += 3600
        bench.submit(i, [0, i])
        bench.run()
    for i in (100, 101, 102):
        bench.submit(i, [0])
    bench.collect()
    assert bench.finished[102].retry_after_seconds == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("what", ["step", "prefill"])
def test_a_failing_step_ends_only_the_requests_in_it(make_bench, answer_of, what: str) -> None:
    bench = make_bench(max_slots=2)
    for i in range(4):
        bench.submit(i, [5, i])
    bench.runner.fail_next = what
    bench.run()
    assert [bench.finished[i].reason for i in range(4)] == ["step_failed", "step_failed", "eos", "eos"]
    assert bench.finished[0].incident == bench.finished[1].incident != ""
    assert bench.finished[3].answers[0].token_ids == answer_of([5, 3], 40)[0]


def test_an_engine_that_keeps_failing_gives_up_after_answering_everybody(make_bench) -> None:
    bench = make_bench(max_slots=1)
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


def test_one_bad_step_is_one_failure_however_many_batches_it_encodes(make_bench, answer_of) -> None:
    bench = make_bench(max_slots=4)
    for i, size in enumerate((2, 8, 32, 128)):
        bench.submit(i, [5] * size)

    def fail(sources: object, rows: object) -> None:
        raise RuntimeError("made to fail")

    prefill, bench.runner.prefill = bench.runner.prefill, fail
    bench.step()
    assert [bench.finished[i].reason for i in range(4)] == ["step_failed"] * 4
    bench.runner.prefill = prefill
    bench.submit(9, [5, 5])
    bench.run()
    assert bench.finished[9].answers[0].token_ids == answer_of([5, 5], 40)[0]


def test_sources_are_encoded_together_unless_padding_costs_more_than_another_run(make_bench) -> None:
    bench = make_bench(max_slots=4, budget=10_000)
    for i, size in enumerate((20, 4, 19, 4)):
        bench.submit(i, [3] * size)
    bench.step()
    assert bench.runner.prefill_batches == [4]
    bench.run()
    for i, size in enumerate((600, 4, 598, 4)):
        bench.submit(i + 4, [3] * size)
    bench.step()
    assert bench.runner.prefill_batches == [4, 2, 2]


def test_statistics_describe_the_step(make_bench) -> None:
    bench = make_bench(max_slots=2)
    for i, size in enumerate((8, 6, 5)):
        bench.submit(i, [9] * size)
    bench.engine.step()
    (report,) = bench.engine.take_reports().values()
    statistics = report.statistics
    assert (statistics.num_waiting, statistics.num_waiting_tokens, statistics.num_running, statistics.num_slots) == (1, 5, 2, 2)
    (step,), (prefill,) = statistics.steps, statistics.prefills
    assert (step.num_rows, prefill.num_rows, prefill.num_tokens, prefill.num_padded_tokens) == (2, 2, 14, 16)
    bench.engine.remove_all("draining")
    bench.collect()


def test_times_of_a_request_are_in_order(bench) -> None:
    bench.runner.on_step = lambda: setattr(bench.clock, "now", bench.clock.now + 1)
    for i in range(6):
        bench.submit(i, [3, i])
    bench.run()
    for end in bench.finished.values():
        assert 100 <= end.admitted < end.first_token < end.ended
    assert bench.finished[5].admitted > bench.finished[0].admitted


def test_statistics_tell_the_queue_in_seconds_and_the_caches_in_bytes(make_bench) -> None:
    bench = make_bench(max_slots=2)
    reserved, _ = bench.runner.cache_bytes()
    idle = bench.engine.statistics()
    assert (idle.cache_bytes_reserved, idle.cache_bytes_used, idle.queue_seconds) == (reserved, 0, 0)

    def on_step() -> None:
        bench.clock.now += 1

    bench.runner.on_step = on_step
    bench.submit(1, [3, 5])
    bench.run()  # three steps: its slot was held for 3 s
    for i in range(2, 8):
        bench.submit(i, [30, i])
    bench.step()
    busy = bench.engine.statistics()
    assert busy.queue_seconds == pytest.approx((2 + 4 + 1 - 2 - 0.5) * 3 / 2)
    for _ in range(16):
        bench.step()
    assert 0 < bench.engine.statistics().cache_bytes_used <= reserved
    bench.run()
    assert bench.engine.statistics().cache_bytes_used == 0
