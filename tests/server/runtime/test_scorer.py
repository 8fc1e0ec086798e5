"""The scorer on a real bundle: PyTorch's numbers, the same bits every time, and never of other files than the engine's."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.proof.eager import EagerPass
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.runtime.onnx import OnnxScorer

PAIRS = [([7, 8, 9, 1], [10, 11, 1]), ([1], [20] * 19 + [1]), ([5] * 23 + [1], [1])]


@pytest.fixture
def scorer(tiny_bundle: Path) -> OnnxScorer:
    return opened(tiny_bundle)


def opened(bundle: Path) -> OnnxScorer:
    scorer = OnnxScorer(Bundle.open(bundle), 1)
    scorer.check()
    assert not scorer.is_loaded
    scorer.open()
    assert scorer.is_loaded
    return scorer


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_scores_and_attention_are_pytorchs(
    scorer: OnnxScorer, tiny_checkpoint: Checkpoint, source: list[int], target: list[int]
) -> None:
    whole = EagerPass(tiny_checkpoint.model, source, target)
    log_probs, mean = scorer.score(source, target)
    assert log_probs.dtype == mean.dtype == np.float32
    np.testing.assert_allclose(log_probs, whole.target_log_probs(), atol=1e-5)
    np.testing.assert_allclose(mean, whole.attention.mean(0), atol=1e-6)
    for layer, expected in enumerate(whole.attention):
        attention = scorer.score(source, target, layer)[1]
        assert attention.shape == (len(target), len(source))
        np.testing.assert_allclose(attention, expected, atol=1e-6)


@torch.inference_mode()
def test_target_may_start_with_another_token(scorer: OnnxScorer, tiny_checkpoint: Checkpoint) -> None:
    model, (source, target), found = tiny_checkpoint.model, PAIRS[0], {}
    for start in (0, 5, model.config.decoder_start_id):
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[start, *target[:-1]]]))[0]
        logits[:, model.config.pad_id] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(target)[:, None])[:, 0]
        found[start] = scorer.score(source, target, decoder_start_id=start)[0]
        np.testing.assert_allclose(found[start], expected, atol=1e-5)
    assert found[model.config.decoder_start_id].tobytes() == scorer.score(source, target)[0].tobytes()
    assert np.abs(found[5] - found[0]).max() > 1e-3, "it matters"


def test_bits_of_a_pair_never_change_not_even_after_an_interruption(scorer: OnnxScorer, tiny_bundle: Path) -> None:
    """Interrupted until it fails: a small pair may be done, or not yet begun."""

    def bits(scorer: OnnxScorer, pairs: list[Any]) -> list[list[bytes]]:
        return [[array.tobytes() for array in scorer.score(*pair)] for pair in pairs]

    first, has_failed = bits(scorer, PAIRS), threading.Event()
    assert bits(scorer, PAIRS[::-1]) == first[::-1] and bits(opened(tiny_bundle), PAIRS) == first

    def interrupt() -> None:
        while not has_failed.is_set():
            scorer.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(Exception, match="terminate"):
            while True:
                scorer.score(*PAIRS[2])
    finally:
        has_failed.set()
        thread.join()
    assert bits(scorer, PAIRS) == first


def flipped(bundle: Path) -> None:
    content = bytearray((bundle / "decoder.weights").read_bytes())
    content[100] ^= 1
    (bundle / "decoder.weights").write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bundle: bundle.rename(bundle.with_name("away")), "No such file"),
        (flipped, r"decoder\.weights: SHA-256"),
    ],
    ids=["away", "damaged"],
)
def test_changed_bundle_is_found_before_it_is_loaded(bundle_copy: Path, change: Callable[[Path], object], message: str) -> None:
    scorer = OnnxScorer(Bundle.open(bundle_copy), 1)
    change(bundle_copy)
    with pytest.raises(BundleError, match=message):
        scorer.check()
    assert not scorer.is_loaded
