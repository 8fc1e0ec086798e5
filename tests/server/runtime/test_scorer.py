"""The scorer on a real bundle: PyTorch's numbers, the same bits every time, and never of other files than the engine's."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.eager_pass import EagerPass
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.engine.executors import Here
from dragoman.server.engine.messages import Scored, ScoreRequest
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.scoring import Scoring
from dragoman.server.runtime import weights as weights_module
from dragoman.server.runtime.scorer import OnnxScorer

PAIRS = [([7, 8, 9, 1], [10, 11, 1]), ([1], [20] * 19 + [1]), ([5] * 23 + [1], [1])]


@pytest.fixture
def scorer(tiny_bundle: Path) -> OnnxScorer:
    return opened(tiny_bundle)


def opened(bundle: Path) -> OnnxScorer:
    scorer = OnnxScorer(Bundle.open(bundle), 1)
    scorer.check()
    scorer.open()
    return scorer


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_scores_are_pytorchs(scorer: OnnxScorer, tiny_checkpoint: Checkpoint, source: list[int], target: list[int]) -> None:
    whole = EagerPass(tiny_checkpoint.model, source, target)
    log_probs, mean = scorer.score(source, target)
    assert log_probs.dtype == mean.dtype == np.float32
    np.testing.assert_allclose(log_probs, whole.target_log_probs(), atol=1e-5)
    np.testing.assert_allclose(mean, whole.attention.mean(0), atol=1e-6)
    for layer, expected in enumerate(whole.attention):
        np.testing.assert_allclose(scorer.score(source, target, layer)[1], expected, atol=1e-6)


@torch.inference_mode()
def test_a_pair_may_start_with_another_token(scorer: OnnxScorer, tiny_checkpoint: Checkpoint) -> None:
    model = tiny_checkpoint.model
    source, target = PAIRS[0]
    found = {}
    for start in (0, 5, model.config.decoder_start_id):
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[start, *target[:-1]]]))[0]
        logits[:, model.config.pad_id] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(target)[:, None])[:, 0]
        found[start] = scorer.score(source, target, decoder_start_id=start)[0]
        np.testing.assert_allclose(found[start], expected, atol=1e-5)
    assert found[model.config.decoder_start_id].tobytes() == scorer.score(source, target)[0].tobytes()
    assert np.abs(found[5] - found[0]).max() > 1e-3, "it matters"


def test_each_row_of_the_attention_sums_to_1(scorer: OnnxScorer) -> None:
    for source, target in PAIRS:
        for layer in (None, 0, 1):
            attention = scorer.score(source, target, layer)[1]
            assert attention.shape == (len(target), len(source))
            np.testing.assert_allclose(attention.sum(1), 1, atol=1e-6)


def test_the_bits_of_a_pair_never_change(scorer: OnnxScorer, tiny_bundle: Path) -> None:
    def bits(scorer: OnnxScorer, pair: tuple[list[int], list[int]]) -> list[bytes]:
        return [array.tobytes() for array in scorer.score(*pair)]

    first = [bits(scorer, pair) for pair in PAIRS]
    assert [bits(scorer, pair) for pair in reversed(PAIRS)] == first[::-1]
    other = opened(tiny_bundle)
    assert [bits(other, pair) for pair in PAIRS] == first


def test_nothing_is_loaded_before_it_is_opened(tiny_bundle: Path) -> None:
    scorer = OnnxScorer(Bundle.open(tiny_bundle), 1)
    scorer.check()
    assert not scorer.is_loaded
    scorer.open()
    assert scorer.is_loaded


def test_a_pair_that_is_interrupted_fails_and_the_next_does_not(scorer: OnnxScorer) -> None:
    """Interrupted until it fails: a small pair may be done, or not yet begun."""
    expected = scorer.score(*PAIRS[2])[0].tobytes()
    has_failed = threading.Event()

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
    assert scorer.score(*PAIRS[2])[0].tobytes() == expected


def test_a_bundle_that_is_away_is_not_there_until_it_is_back(bundle_copy: Path) -> None:
    scorer = OnnxScorer(Bundle.open(bundle_copy), 1)
    away = bundle_copy.with_name("away")
    bundle_copy.rename(away)
    with pytest.raises(BundleError, match="No such file"):
        scorer.check()
    away.rename(bundle_copy)
    scorer.check()


def test_a_bundle_that_was_replaced_is_not_mixed_with_the_one_being_served(bundle_copy: Path) -> None:
    scorer = OnnxScorer(Bundle.open(bundle_copy), 1)
    manifest = json.loads((bundle_copy / "bundle.json").read_text())
    shutil.copy(bundle_copy / "tokenizer/tokenizer.json", bundle_copy / "extra")
    manifest["files"]["extra"] = manifest["files"]["tokenizer/tokenizer.json"]
    manifest["version"] = "another"
    (bundle_copy / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"is now version another, but .* is being served"):
        scorer.check()
    assert not scorer.is_loaded


def test_a_weight_that_changed_on_disk_is_found_before_it_is_used(bundle_copy: Path) -> None:
    scorer = OnnxScorer(Bundle.open(bundle_copy), 1)
    path = bundle_copy / "decoder.weights"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"decoder\.weights: SHA-256"):
        scorer.check()


def test_pairs_are_scored_again_once_a_bundle_is_back(bundle_copy: Path) -> None:
    now = 100.0
    scoring = Scoring(OnnxScorer(Bundle.open(bundle_copy), 1), Limits(4, 10, 1000, 1000), lambda: now, Here())
    away = bundle_copy.with_name("away")
    bundle_copy.rename(away)

    def score() -> Scored:
        scoring.submit(b"front", ScoreRequest(1, *PAIRS[0], arrival=now))
        while scoring.num_waiting:
            scoring.step()
        ((scored,),) = scoring.take_scored().values()
        return scored

    with structlog.testing.capture_logs() as logs:
        first, second = score(), score()
    assert (first.reason, second.reason, len(logs)) == ("not_loaded", "not_loaded", 1)
    away.rename(bundle_copy)
    assert score().reason == "not_loaded", "not before it is tried again"
    now += second.retry_after_seconds
    scoring.step()
    assert score().log_probs == opened(bundle_copy).score(*PAIRS[0])[0].tolist()


def test_weights_that_are_large_are_not_copied_and_scores_stay(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    open_session = weights_module.open_session

    def watched(path: str, num_threads: int, **options: bool) -> Any:
        asked.append(options["is_packed"])
        return open_session(path, num_threads, **options)

    monkeypatch.setattr(weights_module, "open_session", watched)
    packed = opened(tiny_bundle)
    num_bytes = sum((tiny_bundle / name).stat().st_size for name in ("encoder.weights", "decoder.weights"))
    monkeypatch.setattr(weights_module, "MAX_COPY_BYTES", num_bytes)
    opened(tiny_bundle)
    monkeypatch.setattr(weights_module, "MAX_COPY_BYTES", num_bytes - 1)
    mapped = opened(tiny_bundle)
    assert asked == [True, True, False]
    for pair in PAIRS:
        for a, b in zip(packed.score(*pair), mapped.score(*pair), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
