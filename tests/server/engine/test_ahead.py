"""Sources that are encoded while their requests wait: which, what becomes of them, and that nobody is the worse for it."""

from collections.abc import Callable
from typing import Any

import pytest

from dragoman.server.engine.ahead import Ahead
from dragoman.server.engine.costs import PACKED
from dragoman.server.engine.messages import Request
from dragoman.server.engine.sequence import Sequence

BYTES = 8
"""A token of the fake runner's."""


def source(answer_length: int, length: int = 6) -> list[int]:
    return [answer_length, *range(10, 8 + length), 1]


@pytest.fixture
def busy(make_bench: Any) -> Any:
    """One slot, which is taken; eight of another length wait."""
    bench = make_bench(max_slots=1, max_ahead=5)
    for i in range(9):
        bench.submit(i, source(3, 6 + i))
    return bench


def waiting(bench: Any) -> list[int]:
    return sorted(sequence.request.id for sequence in bench.engine._filling.ahead._held)


def test_those_next_in_line_are_encoded_beside_one_that_gets_its_slot(busy: Any) -> None:
    busy.step()
    assert (busy.runner.encode_batches, busy.runner.prefill_batches) == ([6], [])
    assert waiting(busy) == [1, 2, 3, 4, 5]
    statistics = busy.engine.statistics()
    assert (statistics.num_ahead, statistics.ahead_bytes) == (5, BYTES * (7 + 8 + 9 + 10 + 11))


def test_a_slot_that_gets_free_is_filled_without_the_encoder(busy: Any, answer_of: Callable[..., Any]) -> None:
    busy.run()
    assert (busy.runner.encode_batches, busy.runner.prefill_batches) == ([6, 3], [])
    for i in range(9):
        answer = busy.finished[i].answers[0]
        assert (answer.token_ids, answer.reason) == answer_of(source(3, 6 + i), 40)
    assert busy.order == list(range(9)), "and in the order in which they came"
    assert len(busy.engine._filling.ahead) == busy.engine._filling.ahead.num_bytes == 0


def test_reports_say_what_was_encoded_and_who_was_admitted(busy: Any) -> None:
    found = []
    while busy.engine.has_work:
        busy.engine.step()
        found += busy.engine.statistics().prefills
        busy.collect()
    assert [prefill.num_rows for prefill in found] == [6, 0, 0, 0, 0, 0, 3, 0, 0]
    assert [prefill.num_admitted for prefill in found] == [1] * 9
    assert sum(prefill.num_tokens for prefill in found) == sum(range(6, 15))


def test_nothing_is_encoded_ahead_while_slots_are_free(make_bench: Any) -> None:
    bench = make_bench(max_slots=8, max_ahead=5)
    for i in range(6):
        bench.submit(i, source(3))
    bench.step()
    assert (bench.runner.encode_batches, bench.runner.prefill_batches) == ([], [6])


def test_nothing_is_encoded_ahead_where_it_is_switched_off_or_the_runner_cannot(make_bench: Any, monkeypatch: Any) -> None:
    off, unable = make_bench(max_slots=1), make_bench(max_slots=1, max_ahead=5)
    monkeypatch.setattr(type(unable.runner), "holder", None)
    for bench in (off, unable):
        for i in range(4):
            bench.submit(i, source(2))
        bench.run()
        assert (bench.runner.encode_batches, bench.runner.prefill_batches) == ([], [1] * 4)


def test_a_batch_grows_no_larger_than_what_makes_it_cheap(make_bench: Any) -> None:
    """A long source takes nobody along, and is not taken along: neither would gain by it."""
    bench = make_bench(max_slots=1, max_ahead=5)
    bench.submit(0, source(2, PACKED.good_tokens))
    for i in range(1, 4):
        bench.submit(i, source(2, PACKED.good_tokens // 2))
    bench.run()
    assert (bench.runner.encode_batches, bench.runner.prefill_batches) == ([2], [1, 1])


@pytest.mark.parametrize("way", ["cancelled", "deadline", "draining", "pushed out"])
def test_who_leaves_the_queue_gives_the_memory_back(make_bench: Any, way: str) -> None:
    from dragoman.server.engine.messages import Share

    bench = make_bench(max_slots=1, max_ahead=5, max_waiting_requests=2)
    deadline = {"deadline": bench.clock.now + 1} if way == "deadline" else {}
    bench.submit(0, source(9), share=Share("a"))
    bench.step()
    bench.submit(1, source(9), share=Share("a"), **deadline)
    bench.submit(2, source(9), share=Share("a"), **deadline)
    bench.engine.cancel(b"front", 0)
    bench.submit(3, source(9), share=Share("a"))
    bench.step()
    ahead = bench.engine._filling.ahead
    assert waiting(bench) == [2, 3] and ahead.num_bytes > 0
    if way == "cancelled":
        bench.engine.cancel(b"front", 2)
        bench.engine.cancel(b"front", 3)
    elif way == "deadline":
        bench.clock.now += 2
        bench.step()  # the one that ran had the same, and its slot goes to the third
    elif way == "draining":
        bench.engine.remove_all("draining")
    else:
        bench.submit(4, source(9), share=Share("b"))
        assert waiting(bench) == [2]
        bench.engine.cancel(b"front", 2)
    assert len(ahead) == ahead.num_bytes == 0
    bench.run()


def test_one_that_is_overtaken_gives_its_memory_back(busy: Any) -> None:
    busy.step()
    for i in range(10, 15):
        busy.submit(i, source(3), priority=20)
    while busy.engine.scheduler.num_waiting > 12:
        busy.step()
    assert waiting(busy) == [1, 11, 12, 13, 14], "the first of those before is still among the next five"
    busy.run()
    assert busy.order[1:6] == [10, 11, 12, 13, 14]


def test_memory_is_bounded(make_bench: Any) -> None:
    bench = make_bench(max_slots=1, max_ahead=50)
    ahead = bench.engine._filling.ahead = Ahead(50, 10_000, max_bytes=30 * BYTES)
    for i in range(30):
        bench.submit(i, source(3))
    while bench.engine.has_work:
        bench.step()
        assert ahead.num_bytes == sum(held.nbytes for held in ahead._held.values()) <= 30 * BYTES
    # How much a token takes is known after the first batch, of which not all can be kept.
    assert bench.runner.encode_batches[0] == 30
    assert sum(bench.runner.encode_batches[1:]) + sum(bench.runner.prefill_batches) == 30 - 1 - 5
    assert len(bench.finished) == 30


def test_any_number_may_be_asked_for(make_bench: Any) -> None:
    bench = make_bench(max_slots=1, max_ahead=2**62)
    for i in range(4):
        bench.submit(i, source(3))
    bench.run()
    assert (bench.runner.encode_batches, len(bench.finished)) == ([4], 4)


def test_a_failure_ahead_fails_nobody_and_is_not_tried_again(busy: Any, answer_of: Callable[..., Any]) -> None:
    busy.runner.fail_next = "encode"
    busy.step()
    assert (busy.runner.encode_batches, busy.runner.prefill_batches) == ([], [1])
    busy.run()
    assert busy.runner.encode_batches == [2, 2, 2], "those that were not in the batch that failed, as they come into sight"
    assert sorted(busy.finished) == list(range(9))
    assert all(end.reason == "eos" for end in busy.finished.values())
    assert not busy.engine._filling.ahead._refused


def test_a_row_that_cannot_be_filled_fails_its_own_request_alone(busy: Any) -> None:
    busy.step()
    busy.runner.fail_next = "place"
    busy.run()
    assert [end.reason for _, end in sorted(busy.finished.items())] == ["eos", "step_failed", *["eos"] * 7]


def test_what_is_kept_counts_until_it_is_taken() -> None:
    ahead = Ahead(3, 100)
    sequences = [Sequence(b"", Request(i, [5] * 4, 8, 0.0)) for i in range(3)]
    sequences[0].admitted = 1.0

    class Holder:
        def encode(self, sources: Any) -> Any:
            import numpy as np

            return [np.zeros((len(source), 3), np.float32) for source in sources]

        def place(self, held: Any, rows: Any) -> None:
            raise NotImplementedError

    encoded = ahead.encode(Holder(), sequences)
    assert encoded is not None and list(encoded) == sequences[:1]
    assert len(ahead) == 2 and ahead.num_bytes == 2 * 4 * 3 * 4
    assert ahead.take(sequences[1]) is not None and ahead.take(sequences[1]) is None
    assert len(ahead) == 1 and ahead.num_bytes == 4 * 3 * 4
