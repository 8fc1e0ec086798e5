"""Prefetch: sources that are encoded while their requests wait, and that no request is the worse for it."""

import pytest

from dragoman.server.engine.costs import PACKED
from tests.server.engine.bench import Bench

BYTES = 8
"""Of a token, in the fake runner."""


def source(answer_length: int, length: int = 6) -> list[int]:
    return [answer_length, *range(10, 8 + length), 1]


def one_slot(num_requests: int, length: int = 6, answer_length: int = 3, **limits: int) -> Bench:
    bench = Bench(max_slots=1, **limits)
    for i in range(num_requests):
        bench.submit(i, source(answer_length, length))
    return bench


@pytest.fixture
def busy() -> Bench:
    """One slot; nine requests of different lengths wait."""
    bench = Bench(max_slots=1, max_prefetch=5)
    for i in range(9):
        bench.submit(i, source(3, 6 + i))
    return bench


def batches(bench: Bench) -> tuple[list[int], list[int]]:
    return bench.runner.encode_batches, bench.runner.prefill_batches


def encoded(bench: Bench) -> list[int]:
    """Return the requests that wait and are encoded; the memory that this takes is counted."""
    held = bench.engine._prefill._held  # type: ignore[attr-defined]
    assert bench.engine._prefill._num_bytes == sum(one.nbytes for one in held.values())  # type: ignore[attr-defined]
    return sorted(sequence.request.id for sequence in held)


def test_those_next_in_line_are_encoded_beside_one_that_gets_its_slot(busy: Bench) -> None:
    busy.step()
    assert batches(busy) == ([6], []) and encoded(busy) == [1, 2, 3, 4, 5]
    assert busy.engine._prefill._num_bytes == BYTES * (7 + 8 + 9 + 10 + 11)  # type: ignore[attr-defined]
    busy.cancel(1)
    assert encoded(busy) == [2, 3, 4, 5]
    busy.run()
    assert busy.order == [1, 0, *range(2, 9)] and encoded(busy) == []


def test_a_slot_that_gets_free_is_filled_without_the_encoder() -> None:
    bench = Bench(max_slots=1, max_prefetch=5)
    requests = [bench.submit(i, source(3, 6 + i)) for i in range(9)]
    prefills = []
    while bench.engine.has_work:
        bench.engine.step()
        prefills += bench.engine.statistics().prefills
        bench.collect()
    assert batches(bench) == ([6, 3], []) and encoded(bench) == []
    bench.check(*requests)
    assert bench.order == list(range(9))
    assert [prefill.num_rows for prefill in prefills] == [6, 0, 0, 0, 0, 0, 3, 0, 0]
    assert [prefill.num_admitted for prefill in prefills] == [1] * 9
    assert sum(prefill.num_tokens for prefill in prefills) == sum(range(6, 15))


@pytest.mark.parametrize(("max_prefetch", "can_hold", "max_slots"), [(5, True, 8), (0, True, 1), (5, False, 1)])
def test_nothing_is_encoded_ahead_of_free_slots_or_where_that_is_off_or_impossible(
    max_prefetch: int, can_hold: bool, max_slots: int
) -> None:
    bench = Bench(max_slots=max_slots, max_prefetch=max_prefetch)
    bench.runner.can_hold = can_hold
    for i in range(4):
        bench.submit(i, source(2))
    bench.run()
    assert batches(bench) == ([], [4] if max_slots > 1 else [1] * 4)


def test_a_batch_grows_no_larger_than_what_makes_it_cheap() -> None:
    bench = Bench(max_slots=1, max_prefetch=5)
    for i, length in enumerate((PACKED.good_tokens, *[PACKED.good_tokens // 2] * 3)):
        bench.submit(i, source(2, length))
    bench.run()
    assert batches(bench) == ([2], [1, 1])


def test_memory_is_bounded() -> None:
    bench = one_slot(30, max_prefetch=50)
    bench.engine._prefill._good_tokens = 10_000  # type: ignore[attr-defined]
    bench.engine._prefill._max_bytes = 30 * BYTES  # type: ignore[attr-defined]
    while bench.engine.has_work:
        bench.step()
        assert len(encoded(bench)) <= 5
    # The memory of a token is known after the first batch, of which not all can be kept.
    assert bench.runner.encode_batches[0] == 30
    assert sum(bench.runner.encode_batches[1:]) + sum(bench.runner.prefill_batches) == 30 - 1 - 5
    assert len(bench.finished) == 30
    bench = one_slot(4, max_prefetch=2**62)
    bench.run()
    assert bench.runner.encode_batches == [4], "any number may be asked for"


def test_a_failure_ahead_fails_no_request_and_is_not_tried_again(busy: Bench) -> None:
    busy.runner.fail_next = "encode"
    busy.step()
    assert batches(busy) == ([], [1])
    busy.run()
    assert busy.runner.encode_batches == [2, 2, 2], "those that were not in the batch that failed, as they come next"
    assert busy.reasons == dict.fromkeys(range(9), "eos")
    assert not busy.engine._prefill._refused  # type: ignore[attr-defined]
