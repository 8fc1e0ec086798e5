"""The runner on a real bundle: it computes what PyTorch does, in place, and rows do not notice each other."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.export.bundle import Bundle
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import StepDecoder
from dragoman.server.engine.warmup import warm_up
from dragoman.server.runtime.onnx import MAX_KEPT_CANDIDATES, OnnxRunner

MAX_ROWS, NUM_CANDIDATES, CAPACITY, START = 5, 7, 20, 2
SOURCES = [[5, 9, 200, 31], [77], [14, 14, 14, 250, 3, 8, 100, 101, 102], list(range(30, 53)), [42, 6]]
Answers = list[tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


@pytest.fixture
def make_runner(bundle: Bundle) -> Callable[..., OnnxRunner]:
    return lambda max_rows=MAX_ROWS: OnnxRunner(bundle, max_rows, 1)


@pytest.fixture
def runner(make_runner: Callable[..., OnnxRunner]) -> OnnxRunner:
    return make_runner()


def sources_of(bundle: Bundle, which: list[int]) -> list[list[int]]:
    return [[*SOURCES[i], bundle.manifest.eos_id] for i in which]


def forced(source: int, length: int) -> list[int]:
    """Tokens that a row is fed, whatever the model would choose."""
    return [3 + (source * 50 + position * 17) % 270 for position in range(length)]


def step(runner: OnnxRunner, tokens: list[int], positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    candidates = runner.step(np.array(tokens), np.array(positions), NUM_CANDIDATES)
    return candidates.ids.copy(), candidates.log_probs.copy()


def run(runner: OnnxRunner, which: list[int], length: int) -> list[list[tuple[list[int], bytes]]]:
    """Feed rows their tokens; return, for each row and step, candidate ids and the bits of their log-probabilities."""
    fed = [[START, *forced(source, length - 1)] for source in which]
    answers: list[list[tuple[list[int], bytes]]] = [[] for _ in which]
    for position in range(length):
        ids, log_probs = step(runner, [row[position] for row in fed], [position] * len(which))
        for row in range(len(which)):
            answers[row].append((ids[row].tolist(), log_probs[row].tobytes()))
    return answers


def test_log_probabilities_are_pytorchs_to_the_last_position(
    runner: OnnxRunner, bundle: Bundle, tiny_checkpoint: Checkpoint
) -> None:
    everything = list(range(len(SOURCES)))
    assert bundle.manifest.decoder_start_id == START
    runner.prefill(sources_of(bundle, everything), everything)
    oracle = StepDecoder(tiny_checkpoint.model, SOURCES)
    tokens = [START] * len(SOURCES)
    for position in range(CAPACITY):
        ids, log_probs = step(runner, tokens, [position] * len(SOURCES))
        with torch.no_grad():
            expected = oracle.step(torch.tensor(tokens)).double()
        best = expected.clone()
        best[:, bundle.manifest.pad_id] = -torch.inf
        assert torch.equal(torch.from_numpy(ids), best.topk(NUM_CANDIDATES).indices)
        np.testing.assert_allclose(log_probs, np.take_along_axis(expected.numpy(), ids, 1), atol=1e-5)
        tokens = [forced(source, position + 1)[-1] for source in everything]


def test_a_row_is_the_same_alone_and_in_any_company(make_runner: Callable[..., OnnxRunner], bundle: Bundle) -> None:
    together = make_runner()
    everything = [3, 0, 4, 2, 1]
    together.prefill(sources_of(bundle, everything), [0, 1, 2, 3, 4])
    answers = run(together, everything, CAPACITY)
    for row, source in enumerate(everything):
        alone = make_runner(1)
        alone.prefill(sources_of(bundle, [source]), [0])
        assert run(alone, [source], CAPACITY)[0] == answers[row]


def test_a_source_that_was_encoded_ahead_gives_the_same_bits(make_runner: Callable[..., OnnxRunner], bundle: Bundle) -> None:
    """In any company, kept while others are encoded, and placed in any rows."""
    everything = [3, 0, 4, 2, 1]
    at_once, ahead = make_runner(), make_runner()
    at_once.prefill(sources_of(bundle, everything), [0, 1, 2, 3, 4])
    holder = ahead.holder
    assert holder is not None
    first, second = (holder.encode(sources_of(bundle, part)) for part in ([2, 4, 0], [1, 3]))
    holder.place([second[1], first[2]], [0, 1])
    holder.place([first[1], first[0], second[0]], [2, 3, 4])
    assert [len(held.tokens) for held in first] == [len(SOURCES[i]) + 1 for i in (2, 4, 0)]
    assert run(ahead, everything, CAPACITY) == run(at_once, everything, CAPACITY)


def test_a_row_goes_on_after_a_move_as_if_nothing_had_happened(make_runner: Callable[..., OnnxRunner], bundle: Bundle) -> None:
    undisturbed = make_runner(1)
    undisturbed.prefill(sources_of(bundle, [2]), [0])
    expected = run(undisturbed, [2], CAPACITY)[0]
    moved = make_runner()
    moved.prefill(sources_of(bundle, [3, 0, 4, 1]), [0, 1, 2, 3])
    moved.prefill(sources_of(bundle, [2]), [4])
    before = run(moved, [3, 0, 4, 1, 2], 9)
    assert before[4] == expected[:9]
    moved.copy_row(4, 0, 9)
    moved.prefill(sources_of(bundle, [3]), [4])  # what was its row has a new owner
    fed = [START, *forced(2, CAPACITY)]
    for position in range(9, CAPACITY):
        ids, log_probs = step(moved, [fed[position], 5, 5, 5, 5], [position, 9, 9, 9, 0])
        assert (ids[0].tolist(), log_probs[0].tobytes()) == expected[position]


def test_a_copied_row_goes_on_as_its_twin(make_runner: Callable[..., OnnxRunner], bundle: Bundle) -> None:
    """A search branches: after the copy both rows are what one row alone would have been, whichever tokens they go on with."""
    alone = make_runner(1)
    alone.prefill(sources_of(bundle, [2]), [0])
    expected = run(alone, [2], CAPACITY)[0]
    runner, fed = make_runner(), [START, *forced(2, CAPACITY)]
    runner.prefill(sources_of(bundle, [0, 2, 3]), [0, 1, 2])
    run(runner, [0, 2, 3], 6)
    runner.copy_row(1, 3, 6)
    for position in range(6, CAPACITY):  # the old row goes astray
        ids, log_probs = step(runner, [5, 6, 7, fed[position]], [position] * 4)
        assert (ids[3].tolist(), log_probs[3].tobytes()) == expected[position]


def test_a_row_that_takes_over_positions_goes_on_as_its_twin(make_runner: Callable[..., OnnxRunner], bundle: Bundle) -> None:
    """Beams with a common beginning: only the positions that differ are copied."""
    alone = make_runner(1)
    alone.prefill(sources_of(bundle, [2]), [0])
    expected = run(alone, [2], CAPACITY)[0]
    runner, fed = make_runner(), [START, *forced(2, CAPACITY)]
    runner.prefill(sources_of(bundle, [2, 0, 2]), [0, 1, 2])
    for position in range(9):
        other = fed[position] if position < 5 else 77
        step(runner, [fed[position], 8, other], [position] * 3)
    runner.copy_positions(0, 2, 5, 9)
    for position in range(9, CAPACITY):
        ids, log_probs = step(runner, [9, 9, fed[position]], [position] * 3)
        assert (ids[2].tolist(), log_probs[2].tobytes()) == expected[position]


def test_the_same_step_may_be_done_again_with_any_number_of_candidates(runner: OnnxRunner, bundle: Bundle) -> None:
    """Fewer are the first of more, bit for bit, and the caches do not mind."""
    runner.prefill(sources_of(bundle, [3, 0, 4]), [0, 1, 2])
    vocab_size = bundle.manifest.target_vocab_size
    for position in range(3):
        tokens, positions = np.array([[START, 50, 60][position]] * 3), np.array([position] * 3)
        everything = runner.step(tokens, positions, vocab_size)
        ids, log_probs = everything.ids.copy(), everything.log_probs.copy()
        assert (np.sort(ids) == np.arange(vocab_size)).all(), "each token once"
        assert (np.diff(log_probs) <= 0).all(), "likeliest first"
        np.testing.assert_allclose(np.exp(log_probs.astype(np.float64)).sum(1), 1, atol=1e-5)
        for count in (1, 2, 64, 256, vocab_size):
            again = runner.step(tokens, positions, count)
            np.testing.assert_array_equal(again.ids, ids[:, :count])
            assert again.log_probs.tobytes() == log_probs[:, :count].tobytes()


def test_a_look_at_some_rows_sees_what_the_step_did_and_leaves_the_others_alone(
    make_runner: Callable[..., OnnxRunner], bundle: Bundle
) -> None:
    """The rows go on as if nothing had been looked at, whatever the caches hold beyond them."""
    which, vocab_size = [3, 0, 4, 1], bundle.manifest.target_vocab_size
    fed = [[START, *forced(source, 5)] for source in which]
    plain, looked = make_runner(), make_runner()
    for runner in (plain, looked):
        runner.prefill(sources_of(bundle, which), [0, 1, 2, 3])
    for position in range(6):
        tokens, positions = np.array([row[position] for row in fed]), np.full(4, position)
        expected = plain.step(tokens, positions, vocab_size)
        found = looked.step(tokens, positions, NUM_CANDIDATES)
        ids, used = found.ids.copy(), looked.cache_bytes()
        for first, last in ((1, 3), (3, 4), (0, 4)):
            seen = looked.look(tokens[first:last], positions[first:last], vocab_size, first)
            np.testing.assert_array_equal(seen.ids, expected.ids[first:last])
            assert seen.log_probs.tobytes() == expected.log_probs[first:last].tobytes()
        assert looked.cache_bytes() == used
        np.testing.assert_array_equal(found.ids, ids)  # a look has memory of its own


def test_wide_bindings_are_not_kept(runner: OnnxRunner, bundle: Bundle) -> None:
    runner.prefill(sources_of(bundle, [3]), [0])
    for count in (1, 1, 4, bundle.manifest.target_vocab_size):
        runner.step(np.array([START]), np.array([0]), count)
    assert set(runner._bindings) == {(1, 1), (1, 4)} and bundle.manifest.target_vocab_size > MAX_KEPT_CANDIDATES


def test_kept_bindings_are_bounded_and_dropped_when_the_caches_move(
    make_runner: Callable[..., OnnxRunner], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.server.runtime.cache.MIN_CAPACITY", 2)
    monkeypatch.setattr("dragoman.server.runtime.onnx.MAX_KEPT_BINDINGS", 2)
    runner = make_runner()
    runner.prefill(sources_of(bundle, [1, 1, 1]), [0, 1, 2])
    for num_rows in (1, 2, 3):
        step(runner, [START] * num_rows, [0] * num_rows)
    assert set(runner._bindings) == {(2, NUM_CANDIDATES), (3, NUM_CANDIDATES)}
    step(runner, [START], [2])
    assert set(runner._bindings) == {(1, NUM_CANDIDATES)}


def test_bits_do_not_depend_on_the_room_there_is(
    make_runner: Callable[..., OnnxRunner], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches grow and shrink under running rows, and nobody notices."""
    everything = list(range(len(SOURCES)))
    roomy = make_runner()
    roomy.prefill(sources_of(bundle, everything), everything)
    expected = run(roomy, everything, CAPACITY)
    monkeypatch.setattr("dragoman.server.runtime.cache.MIN_CAPACITY", 1)
    monkeypatch.setattr("dragoman.server.runtime.cache.STEPS_PER_REVIEW", 4)
    runner = make_runner()
    for row in everything:
        runner.prefill(sources_of(bundle, [row]), [row])
    assert run(runner, everything, CAPACITY) == expected
    assert runner.cache.num_moves > 5
    num_moves = runner.cache.num_moves
    runner.prefill(sources_of(bundle, [1]), [0])
    assert run(runner, [1], CAPACITY)[0] == expected[1]
    assert runner.cache.num_moves > num_moves + 4, "room was given back and made again"


def test_a_reused_row_has_no_memory(make_runner: Callable[..., OnnxRunner], bundle: Bundle) -> None:
    fresh, used = make_runner(), make_runner()
    warm_up(used, bundle.manifest)
    used.prefill(sources_of(bundle, [3, 2]), [0, 1])
    run(used, [3, 2], CAPACITY)
    answers = []
    for runner in (fresh, used):
        runner.prefill(sources_of(bundle, [1, 4]), [0, 1])
        answers.append(run(runner, [1, 4], CAPACITY))
    assert answers[0] == answers[1]


def test_caches_are_updated_where_they_are(runner: OnnxRunner, bundle: Bundle) -> None:
    runner.prefill(sources_of(bundle, [0, 1]), [0, 1])
    addresses = {name: buffer.ctypes.data for name, buffer in runner.cache.self_kv.items()}
    step(runner, [2, 2], [0, 0])
    step(runner, [7, 8], [1, 1])
    for name, buffer in runner.cache.self_kv.items():
        assert buffer.ctypes.data == addresses[name]
        assert buffer[:2, :, :2].all(), "both positions of both rows are written"
        assert not buffer[:2, :, 2:].any() and not buffer[2:].any(), "and nothing else is"


def test_a_position_beyond_the_cache_is_refused(runner: OnnxRunner, bundle: Bundle) -> None:
    runner.prefill(sources_of(bundle, [0]), [0])
    with pytest.raises(AssertionError):
        step(runner, [2], [CAPACITY])


def test_a_source_may_fill_its_cache_to_the_last_position(runner: OnnxRunner, bundle: Bundle) -> None:
    longest = [7] * (bundle.manifest.max_source_tokens - 1) + [bundle.manifest.eos_id]
    runner.prefill([longest], [1])
    assert runner.cache.source_lengths.tolist() == [1, 24, 1, 1, 1]
    assert all(buffer[1].all() and not buffer[[0, 2, 3, 4]].any() for buffer in runner.cache.cross_kv.values())


@pytest.mark.parametrize("max_rows", [1, 2, 3, 6, 8])
def test_warm_up_ends_at_the_largest_batch_whatever_it_is(bundle: Bundle, max_rows: int) -> None:
    runner = OnnxRunner(bundle, max_rows, 1)
    warm_up(runner, bundle.manifest)
    assert max(rows for rows, _ in runner._bindings) == max_rows
