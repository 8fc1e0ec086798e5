"""Searches in the step loop: what their rows do to each other, to the caches and to the stream of tokens."""

from random import Random
from typing import Any

import pytest

from dragoman.server.engine.messages import Request, Sampling, SearchOptions
from dragoman.server.engine.topk_refetch import ROWS_AT_ONCE, SHARE
from tests.server.engine.bench import VOCAB, Bench

HOT = Sampling(7, temperature=8.0)  # draws far down, where only the whole vocabulary decides

SEARCHES = {
    "beams": SearchOptions(num_beams=4, num_answers=4),
    "beams by the rules": SearchOptions(num_beams=4, no_repeat_ngram_size=2, repetition_penalty=1.3, min_new_tokens=3),
    "beams after a prefix": SearchOptions(num_beams=4, num_answers=2, forced_prefix=[5, 6, 7]),
    "samples": SearchOptions(num_answers=3, sampling=Sampling(3, temperature=0.8, top_k=20, top_p=0.9)),
    "hot samples": SearchOptions(num_answers=3, sampling=HOT),
    "alternatives": SearchOptions(num_answers=4, has_alternatives=True, forced_prefix=[9], num_top_log_probs=5),
    "a penalty that needs the whole vocabulary": SearchOptions(repetition_penalty=0.6, forced_prefix=[33, 44]),
    "beams after a language": SearchOptions(num_beams=4, num_answers=3, forced_prefix=[5, 6], num_forced=1, length_penalty=0.7),
    "beams with a forced end": SearchOptions(num_beams=4, num_answers=4, is_end_forced=True, min_new_tokens=9),
    "plain after a language": SearchOptions(forced_prefix=[5, 1, 6], num_forced=2, length_penalty=0.7),
    "plain with a forced end": SearchOptions(is_end_forced=True),
    "samples with a forced end": SearchOptions(num_answers=3, sampling=HOT, is_end_forced=True),
    "nothing left to choose": SearchOptions(num_beams=2, num_answers=2, suppressed_tokens=list(range(VOCAB))),
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_answers_and_streams_are_the_references_whatever_else_runs(search: SearchOptions) -> None:
    for seed in range(3):
        bench, random = Bench(max_slots=9), Random(seed)
        requests = [
            bench.submit(
                i, [random.randint(1, 16), i], 12, search=chosen, is_streamed=i < 4, decoder_start_id=random.choice([None, 0, 44])
            )
            for i, chosen in enumerate(random.choices([search, search, *SEARCHES.values()], k=12))
        ]
        bench.run()
        bench.check(*requests)
        assert [bench.streamed.get(i, []) for i in range(4)] == [bench.finished[i].answers[0].token_ids for i in range(4)]
        assert bench.engine.slots._owners.count(None) == bench.engine.slots.num_rows, "all rows are free"


@pytest.mark.parametrize("has_log_probs", [False, True])
def test_answers_with_terms_and_streams_do_not_depend_on_what_else_runs(has_log_probs: bool) -> None:
    """Without log-probabilities of all tokens some terms pause their searches; rules that exclude most tokens always do."""
    for seed in range(4):
        random = Random(seed)
        rules: list[dict[str, Any]] = [{}, {}, {"suppressed_tokens": random.sample(range(4, VOCAB), 70), "repetition_penalty": 1.3}]

        def terms(random: Random = random) -> list[list[list[int]]]:
            return [[random.choices(range(4, VOCAB), k=random.randint(1, 3))] for _ in range(random.randint(1, 3))]

        searches = [
            SearchOptions(num_beams=random.choice([2, 4]), terms=terms(), forced_prefix=[5] * (i % 2), **rules[i % 3])
            for i in range(6)
        ]
        sources, together = [[random.randint(6, 16), i] for i in range(6)], Bench(max_slots=9)
        together.runner.has_log_probs = has_log_probs
        for i, search in enumerate([*searches, SearchOptions(num_answers=3, sampling=HOT), SearchOptions(), SEARCHES["beams"]]):
            together.submit(i, sources[i] if i < 6 else [8, i], 16, search=search, is_streamed=i % 3 == 0)
        together.run()
        for i, search in enumerate(searches):
            alone = Bench()
            alone.runner.has_log_probs = has_log_probs
            alone.submit(i, sources[i], 16, search=search)
            alone.run()
            assert alone.finished[i].answers == together.finished[i].answers
            assert bool(alone.runner.looks) == bool(rules[i % 3]) or not has_log_probs
            assert i % 3 or together.streamed[i] == alone.finished[i].answers[0].token_ids
        assert any(count == VOCAB for _, _, count in together.runner.looks) and not together.runner.complaints


def test_a_stream_of_beams_does_not_wait_for_the_end() -> None:
    num_early = 0
    for seed in range(8):
        bench = Bench()
        bench.submit(1, [14, seed], 14, search=SearchOptions(num_beams=3), is_streamed=True)
        while bench.engine.has_work:
            so_far = len(bench.streamed.get(1, []))
            bench.step()
        num_early += so_far
    assert num_early > 0


def test_a_forced_prefix_is_streamed_as_it_is_fed_and_is_not_generated() -> None:
    bench = Bench(step_seconds=1)
    for number in (1, 2):
        bench.submit(number, [9, 1], 5, search=SearchOptions(forced_prefix=[40, 41, 42]), is_streamed=number == 1)
    for count in (1, 2, 3):
        bench.step()
        assert bench.streamed == {1: [40, 41, 42][:count]}
    bench.cancel(1)
    assert (bench.finished[1].num_generated, bench.finished[1].first_token) == (0, None)
    bench.run()
    end = bench.finished[2]
    assert (end.admitted, end.first_token, end.num_generated) == (100, 104, 5)


def test_an_undecided_search_sees_more_of_its_own_rows_only() -> None:
    bench = Bench()
    requests = [bench.submit(1, [10, 1], 10, search=SearchOptions(num_beams=2)), bench.submit(2, [10, 2], 10)]
    bench.step()
    assert bench.runner.step_candidates == [4]
    requests.append(bench.submit(3, [10, 3], 10, search=SearchOptions(sampling=HOT)))
    bench.run()
    assert bench.runner.looks and all(look[1:] == (1, VOCAB) for look in bench.runner.looks)
    assert max(bench.runner.step_candidates) == 64
    bench.check(*requests)


@pytest.mark.parametrize("look_seconds", [0.001, 0.01, 0.1])
def test_looks_take_no_more_than_their_share_while_others_run(look_seconds: float) -> None:
    bench = Bench(max_slots=16, step_seconds=0.01, look_seconds=look_seconds)
    requests = [bench.submit(0, [40, 1], 40, is_streamed=True)]
    requests += [bench.submit(i, [9, i], 9, search=SearchOptions(num_answers=4, sampling=HOT)) for i in (1, 2, 3)]
    allowed = 0.01 * SHARE / (1 - SHARE)
    while 0 not in bench.finished:
        num_looks = len(bench.runner.looks)
        bench.step()
        took = (len(bench.runner.looks) - num_looks) * look_seconds
        assert took <= allowed + look_seconds + 1e-9, "a step waits for one look more than its share"
    assert len(bench.runner.step_rows) == 40, "a plain stream has a token a step"
    assert 0 < len(bench.runner.looks) * look_seconds <= 40 * allowed + look_seconds + 1e-9
    assert all(count <= ROWS_AT_ONCE for _, count, _ in bench.runner.looks)
    bench.run()
    bench.check(*requests)


def test_looks_are_taken_at_once_where_nothing_else_runs() -> None:
    bench = Bench(max_slots=16, step_seconds=0.01, look_seconds=5)
    for i in (1, 2):
        bench.submit(i, [10, i], 10, search=SearchOptions(num_answers=6, sampling=Sampling(7, temperature=100.0, top_p=0.99)))
    bench.run()
    assert len(bench.runner.step_rows) == 10, "a step a token: nothing was paused"
    assert max(count for _, count, _ in bench.runner.looks) > ROWS_AT_ONCE


def test_looks_are_taken_in_turn() -> None:
    bench = Bench(max_slots=16, step_seconds=0.01, look_seconds=0.05)
    bench.submit(0, [40, 1], 40)
    wide = bench.submit(1, [40, 2], 20, search=SearchOptions(num_answers=12, sampling=HOT))
    narrow = bench.submit(2, [40, 3], 6, search=SearchOptions(sampling=HOT))
    bench.run()
    assert bench.order.index(2) < bench.order.index(1)
    bench.check(wide, narrow)


def test_answers_that_have_ended_leave_their_slots_to_others() -> None:
    bench = Bench(max_slots=4)
    bench.submit(1, [12, 5], 14, search=SearchOptions(num_answers=4, sampling=Sampling(1, 1.5)))
    bench.submit(2, [1, 2])
    bench.run()
    lengths = {len(answer.log_probs) for answer in bench.finished[1].answers}
    assert len(lengths) > 1, "the model ends them at different steps"
    assert bench.order == [2, 1] and bench.shrunk[1][0] in (1, 2, 3)


def test_plain_requests_ask_for_one_candidate_after_a_search() -> None:
    bench = Bench()
    bench.submit(1, [3, 1], search=SearchOptions(num_beams=3))
    bench.run()
    bench.runner.step_candidates.clear()
    bench.submit(2, [4, 2])
    bench.run()
    assert bench.runner.step_candidates == [1] * 4


def test_a_search_keeps_its_slots_before_its_hypotheses_have_branched() -> None:
    bench = Bench(max_slots=4)
    bench.engine.submit(Request(1, [9, 1], 9, 0.0, search=SearchOptions(num_beams=3, forced_prefix=[8])))
    for i in (2, 3):
        bench.submit(i, [9, i], 9)
    num_rows = []
    for num_steps in (1, 2):
        for _ in range(num_steps):
            bench.engine.step()
        report = bench.engine.take_report()
        assert (report.statistics.num_slots, report.statistics.num_waiting) == (4, 1)
        num_rows += [step.num_rows for step in report.statistics.steps]
    assert num_rows == [2, 2, 4]


def test_what_was_generated_is_told_also_of_a_cancelled_search() -> None:
    bench = Bench(max_slots=6)
    bench.submit(1, [6, 1], 8, search=SearchOptions(num_answers=3, has_alternatives=True))
    bench.submit(2, [20, 2], 20, search=SearchOptions(num_beams=3, num_answers=2))
    bench.step(3)
    bench.cancel(2)
    bench.run()
    assert bench.finished[2].num_generated == 3 and bench.finished[2].answers == []
    assert bench.finished[1].num_generated == sum(len(answer.log_probs) for answer in bench.finished[1].answers)
