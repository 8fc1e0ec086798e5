"""Search against Transformers' `generate`, on the same weights in its Marian model."""

from collections.abc import Callable

import pytest
import torch
from transformers import MarianMTModel

from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.networks.transformer import Transformer
from tests.oracles.transformers_model import generate

MAX_NEW_TOKENS = 10
MODELS = [(11, 0.5), (12, 0.5), (13, 2.5), (13, 3.5)]  # seed, and the bias towards ending


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"model{model[0]}-{model[1]}")
def pair(
    request: pytest.FixtureRequest, make_model: Callable[..., Transformer], as_transformers: Callable[[Transformer], MarianMTModel]
) -> tuple[Transformer, MarianMTModel]:
    """Give the same random model twice, in double precision, so that no rounding decides a close call."""
    seed, end_bias = request.param
    ours = make_model(seed=seed, has_output_bias=True)
    ours.decoder.output_bias.data[ours.config.eos_id] = end_bias
    return ours.double(), as_transformers(ours).double()


@pytest.fixture(scope="module")
def sources() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 23, (1 + i % 6,), generator=generator).tolist() for i in range(24)]


@torch.inference_mode()
def test_greedy_search_equals_transformers(pair, sources) -> None:
    ours, theirs = pair
    expected = generate(theirs, sources, 1, 1.0, MAX_NEW_TOKENS)
    for hypothesis, ((ids, score),) in zip(greedy_search(ours, sources, MAX_NEW_TOKENS), expected, strict=True):
        assert (hypothesis.ids, hypothesis.score) == (ids, pytest.approx(score, abs=1e-5))


@pytest.mark.parametrize(("num_beams", "length_penalty"), [(2, 0.6), (4, 1.0), (5, 1.4)])
@torch.inference_mode()
def test_beam_search_equals_transformers(pair, sources, num_beams, length_penalty) -> None:
    ours, theirs = pair
    found = beam_search(ours, sources, num_beams, MAX_NEW_TOKENS, length_penalty)
    for hypotheses, expected in zip(found, generate(theirs, sources, num_beams, length_penalty, MAX_NEW_TOKENS), strict=True):
        assert [hypothesis.ids for hypothesis in hypotheses] == [ids for ids, _ in expected]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-5)
