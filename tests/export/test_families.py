"""Graphs of every family's network, with weights that Transformers has made, through the gate."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.export.answering import make_samples
from dragoman.export.building import Recipe
from dragoman.export.parity import ParityReport
from dragoman.export.running import OnnxRunner
from dragoman.export.verify import verify
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import greedy_search
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.tokenizers import Tokenizers
from tests.export.conftest import WriteGraphs
from tests.model.families import FAMILIES, random_pair

Proved = tuple[Transformer, Path, ParityReport]


@pytest.fixture(scope="module", params=FAMILIES)
def proved(
    request: pytest.FixtureRequest, tokenizers: Tokenizers, write_graphs: WriteGraphs, tmp_path_factory: pytest.TempPathFactory
) -> Proved:
    """Give a model, its graphs and what the gate said of them."""
    model = random_pair(request.param)[1]
    directory = write_graphs(model, tmp_path_factory.mktemp("families") / "graphs")
    return model, directory, verify(Checkpoint(request.param, model, tokenizers), directory)


def test_graphs_pass_the_gate(proved: Proved) -> None:
    model, _, report = proved
    assert report.max_log_prob_difference < 1e-5 and report.max_score_difference < 1e-5
    assert report.num_token_mismatches == 0
    assert report.max_position == model.config.max_target_positions - 1


def test_sample_answers_are_the_models_own(proved: Proved, tokenizers: Tokenizers) -> None:
    model, directory, report = proved
    samples = make_samples(Checkpoint("x", model, tokenizers), directory, Recipe("fp32"), report.tolerance)
    answers = greedy_search(model, [sample.source[:-1] for sample in samples.samples], samples.max_new_tokens)
    for sample, expected in zip(samples.samples, answers, strict=True):
        assert [token for token in sample.ids if token != model.config.eos_id] == expected.ids
        np.testing.assert_allclose(sample.log_probs, expected.log_probs, atol=1e-5)
    for pair in samples.pairs:
        assert pair.target[-1] == model.config.eos_id
        logits = model(torch.tensor([pair.source]), torch.tensor([len(pair.source)]), _shifted(model, pair.target))[0]
        if model.config.padding == "excluded":
            logits[:, model.config.pad_id] = -torch.inf
        expected_scores = logits.log_softmax(-1)[range(len(pair.target)), pair.target].detach()
        np.testing.assert_allclose(pair.log_probs, expected_scores, atol=1e-5)


def _shifted(model: Transformer, target: list[int]) -> torch.Tensor:
    return torch.tensor([[model.config.decoder_start_id, *target[:-1]]])


def test_rows_have_the_same_bits_at_every_batch_size(proved: Proved) -> None:
    """Rows stand at different positions of caches of different sizes, beside rows with longer and with shorter sources."""
    model, directory, _ = proved
    runner = OnnxRunner(directory, model.config, num_threads=1)
    random = np.random.default_rng(3)
    sources = [[*random.integers(3, 300, n).tolist(), 1] for n in random.integers(1, 30, 17)]
    encoded = [runner.encode([source])[0] for source in sources]
    tokens, steps = random.integers(3, 300, (8, 17)), 8

    def decode(rows: range, is_staggered: bool) -> dict[tuple[int, int], bytes]:
        slots = runner.slots(len(rows), 12 if is_staggered else 9, 33 if is_staggered else 30)
        for slot, row in enumerate(rows):
            slots.fill(slot, encoded[row])
        lengths, bits = np.array([len(sources[row]) for row in rows]), {}
        for step in range(steps + 2 * is_staggered):
            at = np.clip(step - (np.arange(len(rows)) % 3) * is_staggered, 0, steps - 1)
            ids, log_probs = slots.step(tokens[at, rows], at, lengths, 300)
            bits |= {(row, at[i]): ids[i].tobytes() + log_probs[i].tobytes() for i, row in enumerate(rows)}
        return bits

    alone = {key: value for row in range(17) for key, value in decode(range(row, row + 1), False).items()}
    for size in (2, 3, 5, 8, 17):
        together = decode(range(size), True)
        assert {key for key, value in together.items() if alone[key] != value} == set()
