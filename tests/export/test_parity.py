"""The pieces of the gate, on results made by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from dragoman.export.parity import Comparison, EagerReference, Floats, Given, Ints, ParityError, drive
from dragoman.export.row import Row
from dragoman.model.checkpoint import Checkpoint


class CountingSlots:
    """Slots whose only memory is how much was fed to each row since it was filled, and with which source."""

    def __init__(self, num_slots: int) -> None:
        self.fed = [-1] * num_slots
        self.sources = [-1] * num_slots
        self.steps: list[list[int]] = []

    def fill(self, slot: int, given: Given) -> None:
        self.fed[slot], self.sources[slot] = 0, int(given[0][0])

    def move(self, source: int, destination: int) -> None:
        self.fed[destination], self.sources[destination] = self.fed[source], self.sources[source]

    def step(self, prev_ids: Ints, positions: Ints, src_lens: Ints, num_candidates: int) -> tuple[Ints, Floats]:
        rows = len(prev_ids)
        assert positions.tolist() == self.fed[:rows], "each row is at its own position"
        assert src_lens.tolist() == self.sources[:rows], "each row has its own source"
        self.steps.append(prev_ids.tolist())
        for slot in range(rows):
            self.fed[slot] += 1
        return prev_ids[:, None] + 1, np.zeros((rows, 1), np.float32)


class CountingRunner:
    has_prompts = False

    def __init__(self) -> None:
        self.made: list[tuple[int, int, int]] = []
        self.last = CountingSlots(0)

    def encode(self, sources: Sequence[list[int]]) -> list[Given]:
        return [[np.array([len(source)], np.float32)] for source in sources]

    def slots(self, num_slots: int, max_targets: int, max_sources: int) -> CountingSlots:
        self.made.append((num_slots, max_targets, max_sources))
        self.last = CountingSlots(num_slots)
        return self.last


def test_ended_rows_make_room_for_waiting_ones() -> None:
    runner = CountingRunner()
    rows = [Row([9] * length, [10 * length] * steps, steps) for length, steps in ((3, 2), (1, 4), (2, 1), (5, 3), (4, 1))]
    assert drive(runner, rows, 2, 1, is_tight=False) == len(runner.last.steps) == 6
    assert all(row.is_done and row.position == row.num_steps for row in rows)
    assert runner.made == [(2, 7, 8)]
    drive(CountingRunner(), [Row([1], [2], 1)], 1, 1, is_tight=True)


def test_tight_caches_have_no_room_to_spare() -> None:
    runner = CountingRunner()
    drive(runner, [Row([9, 9], [2, 3, 4], 3)], 1, 1, is_tight=True)
    assert runner.made == [(1, 3, 2)]


def test_greedy_row_feeds_what_it_drew_and_ends_at_end_of_sequence() -> None:
    rows = [Row([9], [5], 50, eos_id=8), Row([9], [5], 2, eos_id=8), Row([9], [8], 50, eos_id=11)]
    drive(CountingRunner(), rows, 3, 1, is_tight=False)
    assert [row.inputs for row in rows] == [[5, 6, 7, 8], [5, 6, 7], [8, 9, 10, 11]]


def test_start_token_that_is_also_the_end_does_not_end_a_row() -> None:
    row = Row([9], [8], 3, eos_id=8)
    drive(CountingRunner(), [row], 1, 1, is_tight=False)
    assert row.inputs == [8, 9, 10, 11]


def test_digest_tells_every_bit_and_their_order() -> None:
    def digest(*steps: tuple[list[int], list[float]]) -> str:
        row = Row([1], [2] * len(steps), len(steps))
        for ids, log_probs in steps:
            row.take(np.array(ids), np.array(log_probs, np.float32))
        return row.digest

    first, second = ([3, 4], [-1.0, -2.0]), ([4, 3], [-0.5, -0.6])
    assert digest(first, second) == digest(first, second)
    nudged = ([3, 4], [-1.0, float(np.nextafter(np.float32(-2), np.float32(0)))])
    assert len({digest(first, second), digest(second, first), digest(nudged, second), digest(first)}) == 4


def perfect_step(checkpoint: Checkpoint, rows: list[Row]) -> tuple[Ints, Floats]:
    log_probs = EagerReference(checkpoint.model).log_probs(rows)
    ids = np.argsort(-log_probs, axis=1, kind="stable")
    return ids, np.take_along_axis(log_probs, ids, 1)


def rows_of_two() -> list[Row]:
    return [Row([7, 8, 1], [2, 9], 2), Row([1], [2, 11], 2)]


def test_eager_step_compares_equal(checkpoint: Checkpoint) -> None:
    comparison, rows = Comparison(EagerReference(checkpoint.model), 1e-4), rows_of_two()
    for _ in range(2):
        ids, log_probs = perfect_step(checkpoint, rows)
        comparison.observe(rows, ids, log_probs)
        for row, row_ids, row_log_probs in zip(rows, ids, log_probs, strict=True):
            row.take(row_ids, row_log_probs)
    assert (comparison.max_position, comparison.num_positions, comparison.max_batch_rows) == (1, 4, 2)
    assert comparison.max_difference < 1e-5, "products of one and of two positions may round differently"
    assert comparison.reference.blocks == {}, "finished rows are let go"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3])
def test_one_wrong_log_prob_in_the_vocabulary_is_found(checkpoint: Checkpoint, value: float) -> None:
    rows = rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    log_probs[1, 200] += value
    with pytest.raises(ParityError, match=r"off by .* at position 0 of a row with 1 source token"):
        Comparison(EagerReference(checkpoint.model), 1e-4).observe(rows, ids, log_probs)


def test_missing_candidate_is_found(checkpoint: Checkpoint) -> None:
    rows = rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    ids[0, 5] = ids[0, 4]
    with pytest.raises(ParityError, match="off by nan"):
        Comparison(EagerReference(checkpoint.model), 1e-4).observe(rows, ids, log_probs)


def test_padding_as_a_candidate_is_found(checkpoint: Checkpoint) -> None:
    rows = rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    log_probs[0, ids[0] == 0] = -5.0
    with pytest.raises(ParityError, match="padding"):
        Comparison(EagerReference(checkpoint.model), 1e-4).observe(rows, ids, log_probs)


def test_wrong_order_is_found(checkpoint: Checkpoint) -> None:
    rows = rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    for array in (ids, log_probs):
        array[:, [0, 1]] = array[:, [1, 0]]
    with pytest.raises(ParityError, match="order"):
        Comparison(EagerReference(checkpoint.model), 1e-4).observe(rows, ids, log_probs)


def test_best_candidates_alone_compare_equal(checkpoint: Checkpoint) -> None:
    comparison, rows = Comparison(EagerReference(checkpoint.model), 1e-4), rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    comparison.observe(rows, ids[:, :20], log_probs[:, :20])
    assert comparison.num_positions == 2 and comparison.max_difference < 1e-5


def test_a_token_left_out_that_is_likelier_than_a_candidate_is_found(checkpoint: Checkpoint) -> None:
    rows = rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    for place in (0, 7):
        kept = [i for i in range(21) if i != place]
        with pytest.raises(ParityError, match="log-probabilities are off"):
            Comparison(EagerReference(checkpoint.model), 1e-6).observe(rows, ids[:, kept], log_probs[:, kept])


def test_candidate_that_is_there_twice_is_found(checkpoint: Checkpoint) -> None:
    rows = rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    ids[0, 19], log_probs[0, 19] = ids[0, 18], log_probs[0, 18]
    with pytest.raises(ParityError, match="off by nan"):
        Comparison(EagerReference(checkpoint.model), 10.0).observe(rows, ids[:, :20], log_probs[:, :20])


def test_one_wrong_best_candidate_is_found(checkpoint: Checkpoint) -> None:
    rows = rows_of_two()
    ids, log_probs = perfect_step(checkpoint, rows)
    log_probs[1, 19] -= 1e-3
    with pytest.raises(ParityError, match=r"off by 0.001 at position 0"):
        Comparison(EagerReference(checkpoint.model), 1e-4).observe(rows, ids[:, :20], log_probs[:, :20])
