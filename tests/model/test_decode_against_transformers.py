"""Search against Transformers' `generate`, on the same weights in its Marian model."""

from collections.abc import Callable

import pytest
import torch
from transformers import GenerationConfig, MarianMTModel

from model.data import pad
from model.decode import beam_search, greedy_search
from model.transformer import Transformer

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


def generate(
    theirs: MarianMTModel, sources: list[list[int]], num_beams: int, length_penalty: float
) -> list[list[tuple[list[int], float]]]:
    """Return, for each source, the ids and score of every beam, best first."""
    config = theirs.config
    rows = [[*ids, config.eos_token_id] for ids in sources]
    ids = pad(rows, config.pad_token_id)
    mask = torch.tensor([[1] * len(row) + [0] * (ids.shape[1] - len(row)) for row in rows])
    settings = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        early_stopping=False if num_beams > 1 else None,
        length_penalty=length_penalty if num_beams > 1 else None,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = theirs.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    if num_beams == 1:
        steps = theirs.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
        is_real = found.sequences[:, 1:] != config.pad_token_id
        scores = (steps.masked_fill(~is_real, 0.0).sum(-1) / is_real.sum(-1)).tolist()
    else:
        scores = found.sequences_scores.tolist()
    special = (config.pad_token_id, config.eos_token_id)
    answers = [[i for i in row[1:] if i not in special] for row in found.sequences.tolist()]
    beams = list(zip(answers, scores, strict=True))
    return [beams[start : start + num_beams] for start in range(0, len(beams), num_beams)]


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
    expected = generate(theirs, sources, 1, 1.0)
    for hypothesis, ((ids, score),) in zip(greedy_search(ours, sources, MAX_NEW_TOKENS), expected, strict=True):
        assert hypothesis.ids == ids
        assert hypothesis.score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("num_beams", [2, 4, 5])
@pytest.mark.parametrize("length_penalty", [0.6, 1.0, 1.4])
@torch.inference_mode()
def test_beam_search_equals_transformers(pair, sources, num_beams, length_penalty) -> None:
    ours, theirs = pair
    found = beam_search(ours, sources, num_beams, MAX_NEW_TOKENS, length_penalty)
    for hypotheses, expected in zip(found, generate(theirs, sources, num_beams, length_penalty), strict=True):
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
