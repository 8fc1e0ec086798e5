"""Parts of the gate on constructed results: rows in slots, eager passes, the scorer, packed sources, and pieces of prompts."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from dragoman.export.proof.batching import check_pieces, check_sources_apart, drive
from dragoman.export.proof.cases import EagerReference, Pair, Row, padded, stretches
from dragoman.export.proof.comparison import Comparison, ScorerComparison, check_scorer
from dragoman.export.proof.eager import EagerPass, Floats, Given, Ints
from dragoman.export.proof.report import ParityError
from dragoman.export.tensors import is_packed, pack
from dragoman.model.checkpoint import Checkpoint
from tests.export.conftest import MakeCheckpoint

SOURCE, TARGET = [7, 8, 9, 1], [20, 21, 22, 23, 24, 1]
PAIRS = [
    Pair([7, 8, 9, 10, 11, 12, 1], [20, 21, 1]),
    Pair([1], [30, 31, 32, 33, 34, 35, 1]),
    Pair([5] * 23 + [1], [6] * 19 + [1]),
    Pair([40, 41, 1], [1]),
]


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
    drive(tight := CountingRunner(), [Row([9, 9], [2, 3, 4], 3)], 1, 1, is_tight=True)
    assert tight.made == [(1, 3, 2)]


def test_greedy_row_feeds_its_own_tokens_and_ends_at_end_of_sequence() -> None:
    rows = [Row([9], [5], 50, eos_id=8), Row([9], [5], 2, eos_id=8), Row([9], [8], 50, eos_id=11), Row([9], [8], 3, eos_id=8)]
    drive(CountingRunner(), rows, 4, 1, is_tight=False)
    assert [row.inputs for row in rows] == [[5, 6, 7, 8], [5, 6, 7], [8, 9, 10, 11], [8, 9, 10, 11]], "a start is not an end"


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


def best(checkpoint: Checkpoint, rows: list[Row], num_candidates: int = 300) -> tuple[Ints, Floats]:
    """Return the eager model's next candidates."""
    log_probs = EagerReference(checkpoint.model).log_probs(rows)
    ids = np.argsort(-log_probs, axis=1, kind="stable")
    return ids[:, :num_candidates], np.take_along_axis(log_probs, ids, 1)[:, :num_candidates]


def rows_of_two() -> list[Row]:
    return [Row([7, 8, 1], [2, 9], 2), Row([1], [2, 11], 2)]


def test_eager_steps_compare_equal(checkpoint: Checkpoint) -> None:
    comparison, rows = Comparison(EagerReference(checkpoint.model), 1e-4), rows_of_two()
    for _ in range(2):
        ids, log_probs = best(checkpoint, rows)
        comparison.observe(rows, ids, log_probs)
        for row, row_ids, row_log_probs in zip(rows, ids, log_probs, strict=True):
            row.take(row_ids, row_log_probs)
    assert (comparison.max_position, comparison.num_positions, comparison.max_batch_rows) == (1, 4, 2)
    assert comparison.max_difference < 1e-5, "products of one and of two positions may round differently"
    assert comparison.reference.blocks == {}, "finished rows are let go"
    comparison, rows = Comparison(EagerReference(checkpoint.model), 1e-4), rows_of_two()
    comparison.observe(rows, *best(checkpoint, rows, 20))
    assert comparison.num_positions == 2 and comparison.max_difference < 1e-5


def put(array: np.ndarray, place: tuple[int, int], value: float) -> np.ndarray:
    array[place] = value
    return array


Fault = Callable[[Ints, Floats], tuple[Ints, Floats]]
FAULTS: dict[str, tuple[int, Fault, str]] = {
    **{
        str(value): (
            300,
            lambda ids, p, value=value: (ids, put(p, (1, 200), p[1, 200] + value)),
            "off by .* at position 0 of a row with 1 source",
        )
        for value in (float("nan"), float("inf"), -1e-3)
    },
    "a missing candidate": (300, lambda ids, p: (put(ids, (0, 5), ids[0, 4]), p), "off by nan"),
    "padding": (300, lambda ids, p: (ids, np.where(ids == 0, np.float32(-5), p)), "padding"),
    "order": (300, lambda ids, p: (np.roll(ids[:, :2], 1, 1), np.roll(p[:, :2], 1, 1)), "order"),
    "the likeliest left out": (21, lambda ids, p: (np.delete(ids, 0, 1), np.delete(p, 0, 1)), "log-probabilities are off"),
    "a likely one left out": (21, lambda ids, p: (np.delete(ids, 7, 1), np.delete(p, 7, 1)), "log-probabilities are off"),
    "a candidate twice": (20, lambda ids, p: (put(ids, (0, 19), ids[0, 18]), put(p, (0, 19), p[0, 18])), "off by nan"),
    "one of the best": (20, lambda ids, p: (ids, put(p, (1, 19), p[1, 19] - 1e-3)), "off by 0.001 at position 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_candidates_are_found(checkpoint: Checkpoint, name: str) -> None:
    rows, (num_candidates, change, message) = rows_of_two(), FAULTS[name]
    with pytest.raises(ParityError, match=message):
        Comparison(EagerReference(checkpoint.model), 1e-5).observe(rows, *change(*best(checkpoint, rows, num_candidates)))


@torch.no_grad()
def plain(checkpoint: Checkpoint, source: list[int], inputs: list[int]) -> torch.Tensor:
    """Return the log-probabilities of one plain forward pass, `[T, V]`."""
    logits = checkpoint.model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([inputs]))[0]
    logits[:, checkpoint.model.config.pad_id] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("seen", [[], [(0, 6)], [(0, 2), (4, 6)], [(2, 4)]], ids=["nothing", "all", "its ends", "its middle"])
def test_target_log_probs_are_the_same_in_whatever_order_positions_are_asked_for(checkpoint, seen: list[tuple[int, int]]) -> None:
    whole, expected = EagerPass(checkpoint.model, SOURCE, TARGET), plain(checkpoint, SOURCE, [2, *TARGET[:-1]])
    for start, stop in seen:
        np.testing.assert_allclose(whole.log_probs(start, stop), expected[start:stop], atol=1e-5)
    np.testing.assert_allclose(whole.target_log_probs(), expected[range(len(TARGET)), TARGET], atol=1e-5)


def test_pass_begins_with_its_rows_first_input_and_is_shared(checkpoint: Checkpoint) -> None:
    model, inputs = checkpoint.model, [5, 6]
    reference, row = EagerReference(model), Row(SOURCE, inputs, 2)
    expected = plain(checkpoint, SOURCE, inputs).numpy()
    np.testing.assert_allclose(reference.log_probs([row])[0], expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(reference.of_row(row).log_probs(1, 2)[0], expected[1], rtol=0, atol=1e-5)
    assert reference.whole(SOURCE, [6, 1], 5) is reference.of_row(row) is reference.of_row(Row(SOURCE, inputs, 2))
    other = reference.of_row(Row(SOURCE, [model.config.decoder_start_id, 6], 2))
    assert other is reference.whole(SOURCE, [6, 1])
    assert other is not reference.of_row(row) and np.abs(other.log_probs(0, 1)[0, 1:] - expected[0, 1:]).max() > 1e-2
    double = reference.double.of(reference.of_row(row))
    np.testing.assert_allclose(double.log_probs(0, 1)[0], expected[0], rtol=0, atol=1e-5)


def test_keys_before_a_position_are_those_of_the_row_cut_there(make_checkpoint: MakeCheckpoint) -> None:
    model = make_checkpoint(max_target_positions=150).model
    inputs = [model.config.decoder_start_id, *range(20, 119)]
    parts = stretches(EagerReference(model), Row(SOURCE, inputs, 100))
    assert [part.position for part in parts] == [0, 62, 84] and parts[-1].num_steps == 100
    for part in parts[1:]:
        assert part.stretch is not None
        cut = EagerPass(model, SOURCE, [*inputs[1 : part.position], 1], keeps_caches=True)
        for found, expected in zip(part.stretch.whole.kept(part.position), cut.kept(part.position), strict=True):
            assert found.shape[1] == part.position
            np.testing.assert_allclose(found, expected, atol=1e-5)


class Scripted:
    """A scorer that gives eager results, changed as the test says."""

    def __init__(self, checkpoint: Checkpoint, drift: float = 0, attention_to_padding: float = 0) -> None:
        self.model = checkpoint.model
        self.sizes: list[int] = []
        self.drift, self.attention_to_padding = drift, attention_to_padding

    def score(self, pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
        self.sizes.append(len(pairs))
        longest = max(len(pair.target) for pair in pairs), max(len(pair.source) for pair in pairs)
        log_probs = np.zeros((len(pairs), longest[0]), np.float32)
        attention = np.full((len(pairs), 2, *longest), self.attention_to_padding, np.float32)
        for row, pair in enumerate(pairs):
            whole, num_target = EagerPass(self.model, pair.source, pair.target), len(pair.target)
            log_probs[row, :num_target] = whole.target_log_probs()
            attention[row, :, :num_target, : len(pair.source)] = whole.attention
        return log_probs - np.float32(self.drift * len(self.sizes)), attention


def test_every_pair_is_compared_in_a_batch_and_some_alone_and_twice(checkpoint: Checkpoint) -> None:
    scorer, comparison = Scripted(checkpoint), ScorerComparison(EagerReference(checkpoint.model), 1e-4)
    check_scorer(scorer, PAIRS, comparison, 3, 2)
    assert scorer.sizes == [3, 1, 1, 1, 1, 1]
    assert (comparison.max_log_prob_difference, comparison.max_attention_difference) == (0, 0)
    for faulty, num_alone, message in (
        (Scripted(checkpoint, drift=1e-6), 1, "the same bits twice"),
        (Scripted(checkpoint, attention_to_padding=1e-9), 0, "attends to padding"),
    ):
        with pytest.raises(ParityError, match=message):
            check_scorer(faulty, PAIRS, ScorerComparison(EagerReference(checkpoint.model), 1e-4), 4, num_alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2e-4])
@pytest.mark.parametrize(("place", "name"), [(0, "log-probabilities"), (1, "attention weights")])
def test_one_wrong_number_of_a_scorer_is_found(checkpoint: Checkpoint, value: float, place: int, name: str) -> None:
    whole = EagerPass(checkpoint.model, PAIRS[0].source, PAIRS[0].target)
    results = [whole.target_log_probs().copy(), whole.attention.copy()]
    results[place].reshape(-1)[-1] += value
    with pytest.raises(ParityError, match=rf"the scorer's {name} are off by .* 7 source and 3 target tokens"):
        ScorerComparison(EagerReference(checkpoint.model), 1e-4).compare(PAIRS[0], *results)


SOURCES = [[5, 6, 1], [1], [9, 8, 7, 6, 1], [4, 1]]


def test_packed_tokens_know_their_places_and_nothing_is_lost() -> None:
    packed = pack(SOURCES)
    assert packed["src_ids"].tolist() == [5, 6, 1, 1, 9, 8, 7, 6, 1, 4, 1]
    assert packed["positions"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1]
    assert packed["src_lens"].tolist() == [3, 1, 5, 2] and packed["grid"].shape == (4, 5)
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in packed.values())
    apart = packed["src_ids"][packed["grid"]]
    assert [row[:length].tolist() for row, length in zip(apart, packed["src_lens"], strict=True)] == SOURCES
    np.testing.assert_array_equal(apart.ravel()[packed["cells"]], packed["src_ids"])
    assert packed["grid"].max() < len(packed["src_ids"]), "the filling behind a source's end is a token, too"
    assert [is_packed(precision) for precision in ("fp32", "int8", "fp16", "bf16")] == [True, True, False, False]
    table, lengths = padded([[5], [6, 7, 8], [9, 10]], 0)
    assert (table.tolist(), lengths.tolist()) == ([[5, 0, 0], [6, 7, 8], [9, 10, 0]], [1, 3, 2])


class Batching:
    """An encoder whose bits depend on how many sources there are, from a number on."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lengths: set[tuple[int, ...]] = set()

    def encode(self, sources: list[list[int]]) -> list[list[np.ndarray]]:
        self.lengths.add(tuple(map(len, sources)))
        return [[np.array(source) + (len(sources) >= self.limit) * 1e-9] for source in sources]


ROWS = [Row([*range(3, 3 + length), 1], [2], 1) for length in (3, 1, 9, 70, 12, 1, 5, 5)]


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_sources_are_encoded_alone_in_mixtures_and_all_together(limit: int) -> None:
    with pytest.raises(ParityError, match="not encoded to the same bits"):
        check_sources_apart([Batching(limit)], ROWS)
    encoder = Batching(100)
    check_sources_apart([encoder], ROWS)
    assert {(length,) for length in (2, 4, 6, 10, 13, 71)} <= encoder.lengths
    assert (2, 71, 2) in encoder.lengths and max(map(len, encoder.lengths)) == 5


PROMPTS = [Row(list(range(3, 3 + length)), [2], 1) for length in (0, 1, 2, 3, 4, 8, 29, 40)]


class FaultyReader:
    """Keeps a number of every token, which a fault may change where it is told the token's place, its piece and the room."""

    def __init__(self, fault: Callable[[int, int, int, int], float] = lambda place, start, size, spare: 0.0) -> None:
        self.fault = fault
        self.seen: list[tuple[int, list[int]]] = []

    def read(self, prompt: Sequence[int], pieces: Sequence[int], spare: int) -> Given:
        self.seen.append((len(prompt), list(pieces)))
        assert sum(pieces) == len(prompt) and spare > 0
        kept, start = np.array(prompt, np.float32), 0
        for size in pieces:
            for place in range(start, start + size):
                kept[place] += np.float32(self.fault(place, start, size, spare))
            start += size
        return [kept, kept + 1]


def test_prompts_are_cut_in_many_ways_down_to_one_token() -> None:
    reader = FaultyReader()
    check_pieces([reader, FaultyReader()], PROMPTS)
    assert (1, [1]) in reader.seen and (0, []) in reader.seen
    sizes = {size for length, pieces in reader.seen if length == 40 for size in pieces}
    assert {1, 2, 7, 40} <= sizes and len(sizes) > 6
    check_pieces([reader], [Row([3] * 300, [2], 1)])  # cut where a block of queries has one left
    assert {33, 65, 129, 257, 300} <= {size for length, pieces in reader.seen if length == 300 for size in pieces}


READER_FAULTS: dict[str, Callable[[int, int, int, int], float]] = {
    "a piece's size": lambda place, start, size, spare: 1e-3 * (place == 20 and size == 7),
    "a piece's first token": lambda place, start, size, spare: 1e-3 * (start > 0 and place == start),
    "room beyond": lambda place, start, size, spare: 1e-3 * (spare > 5),
    "all but the whole": lambda place, start, size, spare: 1e-3 * (size < 40),
    "another reader": lambda place, start, size, spare: 1e-3 * (place == 39),
}


@pytest.mark.parametrize("name", READER_FAULTS)
def test_bits_that_depend_on_the_cut_or_the_reader_are_found(name: str) -> None:
    others = [FaultyReader()] if name == "another reader" else []
    with pytest.raises(ParityError, match=r"a prompt of \d+ tokens is not read to the same bits"):
        check_pieces([*others, FaultyReader(READER_FAULTS[name])], PROMPTS)
