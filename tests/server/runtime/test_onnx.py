"""The runner on a real bundle: it computes what PyTorch does, in place, and rows do not depend on each other."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.export.bundle import Bundle
from dragoman.export.session import open_session
from dragoman.export.tensors import LOG_PROBS_OUTPUT
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import StepDecoder
from dragoman.server.engine.loading import warm_up
from dragoman.server.runtime import onnx as encoder_module
from dragoman.server.runtime.cache import SlotCache
from dragoman.server.runtime.device.model import DeviceModel
from dragoman.server.runtime.elastic import Sessions
from dragoman.server.runtime.onnx import OnnxRunner, PackedEncoder, PaddedEncoder
from tests.export.conftest import Export

MAX_ROWS, NUM_CANDIDATES, CAPACITY, START = 5, 7, 20, 2
SOURCES = [[5, 9, 200, 31], [77], [14, 14, 14, 250, 3, 8, 100, 101, 102], list(range(30, 53)), [42, 6]]
EVERY = [3, 0, 4, 2, 1]
# Tokens that a row is fed, whatever the model would choose.
FED = [[START, *(3 + (source * 50 + position * 17) % 270 for position in range(CAPACITY))] for source in range(len(SOURCES))]
Steps = list[tuple[list[int], bytes]]


@pytest.fixture(scope="module", params=["fp32", "int8 caches"])
def any_bundle(request: pytest.FixtureRequest, tiny_bundle: Path, export: Export) -> Bundle:
    if request.param == "fp32":
        return Bundle.open(tiny_bundle)
    return export("tiny", "int8")


@pytest.fixture
def make_runner(any_bundle: Bundle) -> Callable[..., OnnxRunner]:
    return lambda max_rows=MAX_ROWS, num_threads=1: OnnxRunner(any_bundle, max_rows, num_threads)


@pytest.fixture
def runner(bundle: Bundle) -> OnnxRunner:
    return OnnxRunner(bundle, MAX_ROWS, 1)


def sources_of(which: list[int]) -> list[list[int]]:
    return [[*SOURCES[i], 1] for i in which]


def step(runner: OnnxRunner, tokens: list[int], positions: list[int]) -> Steps:
    """Return each row's candidates and the bits of their log-probabilities."""
    found = runner.step(np.array(tokens), np.array(positions), NUM_CANDIDATES)
    return [(ids.tolist(), log_probs.tobytes()) for ids, log_probs in zip(found.ids, found.log_probs, strict=True)]


def run(runner: OnnxRunner, which: list[int], length: int = CAPACITY) -> list[Steps]:
    """Feed rows their tokens; return what each was given, step by step."""
    steps = [step(runner, [FED[i][position] for i in which], [position] * len(which)) for position in range(length)]
    return [list(row) for row in zip(*steps, strict=True)]


@pytest.fixture(scope="module")
def alone(any_bundle: Bundle) -> Callable[[int], Steps]:
    """Return what a row is given in a runner of its own."""
    known: dict[int, Steps] = {}

    def answer(source: int) -> Steps:
        if source not in known:
            runner = OnnxRunner(any_bundle, 1, 1)
            runner.prefill(sources_of([source]), [0])
            (known[source],) = run(runner, [source])
        return known[source]

    return answer


def test_log_probabilities_are_pytorchs_to_the_last_position(
    runner: OnnxRunner, bundle: Bundle, tiny_checkpoint: Checkpoint
) -> None:
    every = list(range(len(SOURCES)))
    assert (bundle.manifest.decoder_start_id, bundle.manifest.eos_id) == (START, 1)
    runner.prefill(sources_of(every), every)
    oracle = StepDecoder(tiny_checkpoint.model, SOURCES)
    for position in range(CAPACITY):
        tokens = [FED[source][position] for source in every]
        found = runner.step(np.array(tokens), np.full(len(every), position), NUM_CANDIDATES)
        with torch.no_grad():
            expected = oracle.step(torch.tensor(tokens)).double()
        best = expected.clone()
        best[:, bundle.manifest.pad_id] = -torch.inf
        assert torch.equal(torch.from_numpy(found.ids), best.topk(NUM_CANDIDATES).indices)
        np.testing.assert_allclose(found.log_probs, np.take_along_axis(expected.numpy(), found.ids, 1), atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_row_is_the_same_alone_and_in_any_batch(
    make_runner: Callable[..., OnnxRunner], alone: Callable[[int], Steps], num_threads: int
) -> None:
    runner = make_runner(num_threads=num_threads)
    runner.prefill(sources_of(EVERY), [0, 1, 2, 3, 4])
    assert run(runner, EVERY) == [alone(source) for source in EVERY]
    runner.prefill(sources_of([1, 4]), [0, 1])
    assert run(runner, [1, 4]) == [alone(1), alone(4)], "a reused row has no memory"


def test_source_that_was_encoded_ahead_gives_the_same_bits(
    make_runner: Callable[..., OnnxRunner], alone: Callable[[int], Steps]
) -> None:
    """In any batch, kept while others are encoded, and placed in any rows."""
    holder = (runner := make_runner()).holder
    assert holder is not None
    first, second = (holder.encode(sources_of(part)) for part in ([2, 4, 0], [1, 3]))
    holder.place([second[1], first[2]], [0, 1])
    holder.place([first[1], first[0], second[0]], [2, 3, 4])
    assert [len(held.tokens) for held in first] == [len(SOURCES[i]) + 1 for i in (2, 4, 0)]
    assert {held.tokens.dtype for held in first} == {np.dtype(runner.cache.token_type)}
    assert run(runner, EVERY) == [alone(source) for source in EVERY]


def test_steps_and_looks_give_any_number_of_candidates_and_leave_the_caches_alone(
    make_runner: Callable[..., OnnxRunner], any_bundle: Bundle
) -> None:
    """Fewer candidates are the first of more, bit for bit; a look at some rows has memory of its own."""
    which, vocab_size = [3, 0, 4, 1], any_bundle.manifest.target_vocab_size
    runner = make_runner()
    runner.prefill(sources_of(which), [0, 1, 2, 3])
    for position in range(4):
        tokens, positions = np.array([FED[i][position] for i in which]), np.full(4, position)
        whole = runner.step(tokens, positions, vocab_size)
        ids, log_probs, used = whole.ids.copy(), whole.log_probs.copy(), runner.cache_bytes()
        assert (np.sort(ids) == np.arange(vocab_size)).all(), "each token once"
        assert (np.diff(log_probs) <= 0).all(), "likeliest first"
        np.testing.assert_allclose(np.exp(log_probs.astype(np.float64)).sum(1), 1, atol=1e-5)
        for count in (1, 2, 64, 256, 257, vocab_size):
            again = runner.step(tokens, positions, count)
            np.testing.assert_array_equal(again.ids, ids[:, :count])
            assert again.log_probs.tobytes() == log_probs[:, :count].tobytes()
            if LOG_PROBS_OUTPUT in any_bundle.manifest.tensors.decoder_outputs:
                assert again.all_log_probs is not None
                assert np.take_along_axis(np.stack(again.all_log_probs), ids, 1).tobytes() == log_probs.tobytes()
        found = runner.step(tokens, positions, NUM_CANDIDATES)
        for first, last in ((1, 3), (3, 4), (0, 4)):
            seen = runner.refetch(tokens[first:last], positions[first:last], vocab_size, first)
            np.testing.assert_array_equal(seen.ids, ids[first:last])
            assert seen.log_probs.tobytes() == log_probs[first:last].tobytes()
        assert runner.cache_bytes() == used
        np.testing.assert_array_equal(found.ids, ids[:, :NUM_CANDIDATES])


def test_bits_do_not_depend_on_the_room_there_is(
    make_runner: Callable[..., OnnxRunner], alone: Callable[[int], Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches grow and shrink under running rows, and few bindings are kept."""
    expected = [alone(source) for source in range(5)]
    monkeypatch.setattr("dragoman.server.runtime.cache.MIN_CAPACITY", 1)
    monkeypatch.setattr("dragoman.server.runtime.cache.STEPS_PER_REVIEW", 4)
    monkeypatch.setattr("dragoman.server.runtime.onnx.MAX_KEPT_BINDINGS", 2)
    runner = make_runner()
    for row in range(5):
        runner.prefill(sources_of([row]), [row])
    assert run(runner, list(range(5))) == expected
    assert (num_moves := runner.cache.num_moves) > 5
    runner.prefill(sources_of([1]), [0])
    assert run(runner, [1])[0] == expected[1]
    assert runner.cache.num_moves > num_moves + 4, "room was given back and made again"
    with pytest.raises(AssertionError):
        step(runner, [2], [CAPACITY])


@pytest.mark.parametrize("max_rows", [1, 2, 3, 6, 8])
def test_warm_up_ends_at_the_largest_batch_whatever_it_is(bundle: Bundle, max_rows: int) -> None:
    runner = OnnxRunner(bundle, max_rows, 1)
    warm_up(runner, bundle.manifest)
    assert max(num_rows for _, num_rows, _ in runner._bindings) == max_rows


def test_caches_in_8_bits_take_a_quarter_and_change_answers_little(export: Export) -> None:
    bundles = export("tiny", "int8", cache_precision="fp32"), export("tiny", "int8")
    runners, by_id = [OnnxRunner(bundle, MAX_ROWS, 1) for bundle in bundles], []
    for runner in runners:
        runner.prefill(sources_of(EVERY), [0, 1, 2, 3, 4])
        for position in range(9):
            found = runner.step(np.array([FED[i][position] for i in EVERY]), np.full(5, position), 300)
            by_id.append(np.take_along_axis(found.log_probs, np.argsort(found.ids), 1).copy())
    single, integer = np.stack(by_id[:9]), np.stack(by_id[9:])
    is_possible = np.isfinite(single)
    assert 0 < np.abs(single[is_possible] - integer[is_possible]).mean() < 0.1
    reserved, used = ([runner.cache_bytes()[i] for runner in runners] for i in (0, 1))
    assert reserved[0] == 4 * reserved[1] and used[0] == 4 * used[1] > 0


ROWS = [2, 0, 3, 1]


@pytest.mark.parametrize("max_bytes", [2**26, 0])
def test_packed_and_padded_sources_are_encoded_to_the_same_bits_and_kept(
    bundle: Bundle, model: DeviceModel, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """Whether or not results are written where the last ones were."""
    monkeypatch.setattr(encoder_module, "MAX_KEPT_BYTES", max_bytes)
    cache, other = (SlotCache(bundle.manifest, 4) for _ in range(2))
    packed, sources = PackedEncoder(Sessions(open_session(str(bundle.encoder_path), 1)), cache), sources_of([0, 1, 3, 4])
    first = packed.encode(sources)
    before = [held.tokens.copy() for held in first]
    packed.encode([[77, 78, 1], [50, 1]])
    packed.fill(sources, ROWS)
    PaddedEncoder(Sessions(open_session(str(model.encoder_path), 1)), other, 0).fill(sources, ROWS)
    assert cache.source_lengths.tolist() == other.source_lengths.tolist() == [2, 3, 5, 24]
    for ours, theirs in zip(cache.cross_kv.values(), other.cross_kv.values(), strict=True):
        for row, source in zip(ROWS, sources, strict=True):
            assert ours[row, :, : len(source)].tobytes() == theirs[row, :, : len(source)].tobytes()
    for held, kept, source in zip(first, before, sources, strict=True):
        np.testing.assert_array_equal(held.tokens, kept)
        assert held.tokens.shape == (len(source), cache.token_columns) and held.tokens.base is None
        assert held.states.shape == (0,) and held.nbytes == held.tokens.nbytes
    limit = 64 * cache.token_columns * 4
    for room, expected in ((limit, 64), (limit - 1, 0)):
        monkeypatch.setattr(encoder_module, "MAX_KEPT_BYTES", room)
        again = PackedEncoder(Sessions(open_session(str(bundle.encoder_path), 1)), cache)
        again.fill(sources, ROWS)
        assert len(again._kept) == expected, "34 tokens, rounded up"
