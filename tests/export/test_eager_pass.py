"""One pass serves the step's comparison and the scorer's, and says what a plain forward pass says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.export.eager_pass import EagerPass
from dragoman.export.parity import EagerReference, stretches
from dragoman.export.row import Row
from dragoman.export.scorer_parity import Pair, ScorerComparison
from dragoman.model.checkpoint import Checkpoint

SOURCE, TARGET = [7, 8, 9, 1], [20, 21, 22, 23, 24, 1]


def plain(checkpoint: Checkpoint) -> torch.Tensor:
    inputs = torch.tensor([[checkpoint.model.config.decoder_start_id, *TARGET[:-1]]])
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([SOURCE]), torch.tensor([len(SOURCE)]), inputs)[0]
    logits[:, checkpoint.model.config.pad_id] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("seen", [[], [(0, 6)], [(0, 2), (4, 6)], [(2, 4)]], ids=["nothing", "all", "its ends", "its middle"])
def test_target_log_probs_are_the_same_whatever_was_asked_for_before(checkpoint: Checkpoint, seen: list[tuple[int, int]]) -> None:
    whole, expected = EagerPass(checkpoint.model, SOURCE, TARGET), plain(checkpoint)
    for start, stop in seen:
        np.testing.assert_allclose(whole.log_probs(start, stop), expected[start:stop], atol=1e-5)
    np.testing.assert_allclose(whole.target_log_probs(), expected[range(len(TARGET)), TARGET], atol=1e-5)


def test_steps_and_scores_of_a_row_share_one_pass(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*arguments: Any, **options: Any) -> EagerPass:
        made.append(arguments)
        return EagerPass(*arguments, **options)

    monkeypatch.setattr("dragoman.export.parity.EagerPass", make)
    reference = EagerReference(checkpoint.model)
    reference.log_probs([Row(SOURCE, [checkpoint.model.config.decoder_start_id, *TARGET[:-1]], len(TARGET))])
    own = EagerPass(checkpoint.model, SOURCE, TARGET)
    ScorerComparison(reference, 1e-4).compare(Pair(SOURCE, TARGET), own.target_log_probs(), own.attention)
    assert len(made) == 1
    reference.whole(SOURCE, [*TARGET[:-2], 30, 1])
    reference.whole(SOURCE[1:], TARGET)
    assert len(made) == 3, "another target or source has a pass of its own"


@torch.inference_mode()
def test_pass_begins_with_what_its_row_is_fed_first(checkpoint: Checkpoint) -> None:
    model, inputs = checkpoint.model, [5, 6]
    reference, row = EagerReference(model), Row(SOURCE, inputs, 2)
    logits = model(torch.tensor([SOURCE]), torch.tensor([len(SOURCE)]), torch.tensor([inputs]))[0]
    expected = (logits + model.decoder.padding_logits).log_softmax(-1).numpy()
    np.testing.assert_allclose(reference.log_probs([row])[0], expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(reference.of_row(row).log_probs(1, 2)[0], expected[1], rtol=0, atol=1e-5)
    other = reference.of_row(Row(SOURCE, [model.config.decoder_start_id, 6], 2))
    assert other is not reference.of_row(row) and np.abs(other.log_probs(0, 1)[0, 1:] - expected[0, 1:]).max() > 1e-2
    double = reference.double.of(reference.of_row(row))
    np.testing.assert_allclose(double.log_probs(0, 1)[0], expected[0], rtol=0, atol=1e-5)


def test_keys_before_a_position_are_those_of_the_row_cut_there(make_checkpoint: Callable[..., Checkpoint]) -> None:
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
