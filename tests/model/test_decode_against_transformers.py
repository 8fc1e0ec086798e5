"""Search against Transformers' `generate`, on the same weights in its Marian model."""

from collections.abc import Callable

import pytest
import torch
from transformers import MarianMTModel

from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.networks.transformer import Transformer
from tests.oracles.transformers_model import generate

MAX_NEW_TOKENS = 10
NUM_SOURCES = 24
MODELS = [(11, 0.5), (12, 0.5), (13, 2.5), (13, 3.5)]  # seed, and the bias towards ending


def random_model(make_model: Callable[..., Transformer], seed: int, end_bias: float) -> Transformer:
    """Build a random model in double precision, so that no rounding decides a close call."""
    model = make_model(seed=seed, has_output_bias=True)
    model.decoder.output_bias.data[model.config.eos_id] = end_bias
    return model.double()


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"model{model[0]}-{model[1]}")
def pair(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Transformer],
    as_transformers: Callable[[Transformer], MarianMTModel],
) -> tuple[Transformer, MarianMTModel]:
    """Give the same model twice."""
    ours = random_model(make_model, *request.param)
    return ours, as_transformers(ours).double()


@pytest.fixture(scope="module")
def sources() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 23, (1 + i % 6,), generator=generator).tolist() for i in range(NUM_SOURCES)]


@torch.inference_mode()
def test_logits_equal_marian(pair, sources) -> None:
    ours, theirs = pair
    source, target = torch.tensor([sources[5]]), torch.tensor([[2, 7, 9, 11]])
    expected = theirs(input_ids=source, decoder_input_ids=target).logits
    logits = ours(source, torch.tensor([source.shape[1]]), target)
    torch.testing.assert_close(logits[..., 1:], expected[..., 1:], atol=1e-9, rtol=0)


@torch.inference_mode()
def test_greedy_search_equals_transformers(pair, sources) -> None:
    ours, theirs = pair
    expected = generate(theirs, sources, 1, 1.0, MAX_NEW_TOKENS)
    for hypothesis, ((ids, score),) in zip(greedy_search(ours, sources, MAX_NEW_TOKENS), expected, strict=True):
        assert hypothesis.ids == ids
        assert hypothesis.score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("num_beams", [2, 4, 5])
@pytest.mark.parametrize("length_penalty", [0.6, 1.0, 1.4])
@torch.inference_mode()
def test_beam_search_equals_transformers(pair, sources, num_beams, length_penalty) -> None:
    ours, theirs = pair
    found = beam_search(ours, sources, num_beams, MAX_NEW_TOKENS, length_penalty)
    for hypotheses, expected in zip(found, generate(theirs, sources, num_beams, length_penalty, MAX_NEW_TOKENS), strict=True):
        assert [hypothesis.ids for hypothesis in hypotheses] == [ids for ids, _ in expected]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-5)


@torch.inference_mode()
def test_comparison_covers_every_way_to_end(make_model, sources) -> None:
    """The random models must end answers at once, midway and at the limit, or the comparison would show little."""
    lengths = set()
    for seed, end_bias in MODELS:
        found = beam_search(random_model(make_model, seed, end_bias), sources, 4, MAX_NEW_TOKENS)
        lengths |= {len(hypothesis.log_probs) for beam in found for hypothesis in beam}
    assert {1, 2, 4, MAX_NEW_TOKENS - 1, MAX_NEW_TOKENS} <= lengths
