"""The scorer's part of the gate, and the scorer's own properties on a real graph."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.export.eager_pass import EagerPass
from dragoman.export.parity import EagerReference, Floats, ParityError
from dragoman.export.running import OnnxRunner
from dragoman.export.scorer_parity import Pair, ScorerComparison, check_scorer, padded
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import Transformer

PAIRS = [
    Pair([7, 8, 9, 10, 11, 12, 1], [20, 21, 1]),
    Pair([1], [30, 31, 32, 33, 34, 35, 1]),
    Pair([5] * 23 + [1], [6] * 19 + [1]),
    Pair([40, 41, 1], [1]),
]


def eager_scores(model: Transformer, pair: Pair) -> tuple[Floats, Floats]:
    whole = EagerPass(model, pair.source, pair.target)
    return whole.target_log_probs(), whole.attention


@pytest.fixture(scope="module")
def runner(exported: Path, checkpoint: Checkpoint) -> OnnxRunner:
    return OnnxRunner(exported, checkpoint.model.config)


@pytest.mark.parametrize("pair", PAIRS)
def test_eager_scores_are_those_of_a_plain_forward_pass(checkpoint: Checkpoint, pair: Pair) -> None:
    log_probs, attention = eager_scores(checkpoint.model, pair)
    inputs = torch.tensor([[checkpoint.model.config.decoder_start_id, *pair.target[:-1]]])
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([pair.source]), torch.tensor([len(pair.source)]), inputs)[0]
    logits[:, checkpoint.model.config.pad_id] = -torch.inf
    expected = logits.log_softmax(-1)[range(len(pair.target)), pair.target]
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)
    assert attention.shape == (2, len(pair.target), len(pair.source))
    np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("pair", PAIRS)
def test_graph_scores_as_pytorch_does(runner: OnnxRunner, checkpoint: Checkpoint, pair: Pair) -> None:
    log_probs, attention = runner.score([pair])
    expected_log_probs, expected_attention = eager_scores(checkpoint.model, pair)
    np.testing.assert_allclose(log_probs[0], expected_log_probs, atol=1e-5)
    np.testing.assert_allclose(attention[0], expected_attention, atol=1e-6)


def test_padding_and_company_change_nothing_but_rounding(runner: OnnxRunner) -> None:
    log_probs, attention = runner.score(PAIRS)
    for row, pair in enumerate(PAIRS):
        num_source, num_target = len(pair.source), len(pair.target)
        alone_log_probs, alone_attention = runner.score([pair])
        np.testing.assert_allclose(log_probs[row, :num_target], alone_log_probs[0], atol=1e-5)
        np.testing.assert_allclose(attention[row, :, :num_target, :num_source], alone_attention[0], atol=1e-6)
        assert not attention[row, :, :num_target, num_source:].any(), "padding gets exactly no attention"


def test_a_pair_alone_has_the_same_bits_whatever_came_before(runner: OnnxRunner) -> None:
    first = [[array.tobytes() for array in runner.score([pair])] for pair in PAIRS]
    runner.score(PAIRS)
    assert [[array.tobytes() for array in runner.score([pair])] for pair in reversed(PAIRS)] == first[::-1]


class Scripted:
    """Gives eager results, changed as the test says."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = checkpoint.model
        self.sizes: list[int] = []
        self.is_fickle = False
        self.attention_to_padding = 0.0

    def score(self, pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
        self.sizes.append(len(pairs))
        longest = max(len(pair.target) for pair in pairs), max(len(pair.source) for pair in pairs)
        log_probs = np.zeros((len(pairs), longest[0]), np.float32)
        attention = np.full((len(pairs), 2, *longest), self.attention_to_padding, np.float32)
        for row, pair in enumerate(pairs):
            num_target, num_source = len(pair.target), len(pair.source)
            log_probs[row, :num_target], attention[row, :, :num_target, :num_source] = eager_scores(self.model, pair)
        return log_probs - np.float32(1e-6 * len(self.sizes) * self.is_fickle), attention


def test_every_pair_is_compared_in_a_batch_and_some_alone_and_twice(checkpoint: Checkpoint) -> None:
    scorer, comparison = Scripted(checkpoint), ScorerComparison(EagerReference(checkpoint.model), 1e-4)
    check_scorer(scorer, PAIRS, comparison, 3, 2)
    assert scorer.sizes == [3, 1, 1, 1, 1, 1]
    assert (comparison.max_log_prob_difference, comparison.max_attention_difference) == (0, 0)


def test_bits_that_change_are_found_however_few(checkpoint: Checkpoint) -> None:
    scorer = Scripted(checkpoint)
    scorer.is_fickle = True
    with pytest.raises(ParityError, match="the same bits twice"):
        check_scorer(scorer, PAIRS, ScorerComparison(EagerReference(checkpoint.model), 1e-4), 4, 1)


def test_attention_to_padding_is_found(checkpoint: Checkpoint) -> None:
    scorer = Scripted(checkpoint)
    scorer.attention_to_padding = 1e-9
    with pytest.raises(ParityError, match="attends to padding"):
        check_scorer(scorer, PAIRS, ScorerComparison(EagerReference(checkpoint.model), 1e-4), 4, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2e-4])
@pytest.mark.parametrize(("place", "name"), [(0, "log-probabilities"), (1, "attention weights")])
def test_one_wrong_number_is_found(checkpoint: Checkpoint, value: float, place: int, name: str) -> None:
    results = [array.copy() for array in eager_scores(checkpoint.model, PAIRS[0])]
    results[place].reshape(-1)[-1] += value
    with pytest.raises(ParityError, match=rf"the scorer's {name} are off by .* 7 source and 3 target tokens"):
        ScorerComparison(EagerReference(checkpoint.model), 1e-4).compare(PAIRS[0], *results)


def test_rows_are_padded_on_the_right() -> None:
    table, lengths = padded([[5], [6, 7, 8], [9, 10]], 0)
    assert table.tolist() == [[5, 0, 0], [6, 7, 8], [9, 10, 0]]
    assert lengths.tolist() == [1, 3, 2]
