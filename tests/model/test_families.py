"""The network against Transformers' models of every family, on the same weights."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dragoman.model.config import ModelConfig
from dragoman.model.decode import Start, beam_search, greedy_search
from dragoman.model.networks.attention import padding_mask
from dragoman.model.networks.relative import bucket_of
from dragoman.model.networks.transformer import Transformer
from dragoman.model.padding import pad
from tests.model.families import FAMILIES, ragged, random_pair

LENGTHS = [1, 9, 4, 30]
MAX_NEW_TOKENS = 12

Pair = tuple[PreTrainedModel, Transformer]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Give the same model twice, ours second."""
    return random_pair(request.param)


def batch() -> tuple[Tensor, Tensor]:
    """Return sources `[B, S]` of different lengths, right-padded, and their lengths."""
    return pad(ragged(LENGTHS), 0), torch.tensor(LENGTHS)


@torch.inference_mode()
def test_logits_are_those_of_transformers(pair: Pair) -> None:
    theirs, ours = pair
    sources, lengths = batch()
    targets = torch.randint(3, 300, (len(LENGTHS), 35), generator=torch.Generator().manual_seed(2))
    mask = padding_mask(lengths, sources.shape[1]).long()
    # Without a mask of its own Transformers takes the start token for padding where that is what it is.
    everything = torch.ones_like(targets)
    call = {"input_ids": sources, "attention_mask": mask, "decoder_input_ids": targets, "decoder_attention_mask": everything}
    expected = theirs(**call).logits
    torch.testing.assert_close(ours(sources, lengths, targets), expected, atol=3e-5, rtol=0)
    double = theirs.double()(**call).logits
    torch.testing.assert_close(ours.double()(sources, lengths, targets), double, atol=1e-6, rtol=0)
    theirs.float(), ours.float()


@torch.inference_mode()
def test_answers_are_those_of_generate(pair: Pair) -> None:
    theirs, ours = pair
    sources, lengths = batch()
    mask = padding_mask(lengths, sources.shape[1]).long()
    for num_beams in (1, 3):
        expected = theirs.double().generate(
            input_ids=sources,
            attention_mask=mask,
            max_new_tokens=MAX_NEW_TOKENS,
            num_beams=num_beams,
            do_sample=False,
            early_stopping=False,
            length_penalty=0.8,
            bad_words_ids=[[0]] if ours.config.padding == "masked" else None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ids = [_until_end(row) for row in expected.sequences[:, 1:].tolist()]
        start = Start(is_complete=True)
        if num_beams == 1:
            assert [h.ids for h in greedy_search(ours.double(), ragged(LENGTHS), MAX_NEW_TOKENS, start)] == ids
        else:
            best = [beam[0] for beam in beam_search(ours.double(), ragged(LENGTHS), 3, MAX_NEW_TOKENS, 0.8, start)]
            assert [h.ids for h in best] == ids
            assert [h.score for h in best] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-5)
    theirs.float(), ours.float()


def _until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(1)] if 1 in ids else ids


@pytest.mark.parametrize("family", ["m2m100", "t5"])
@torch.inference_mode()
def test_forced_token_and_start_are_those_of_generate(family: str) -> None:
    theirs, ours = (model.double() for model in random_pair(family, seed=3))
    sources, lengths = batch()
    for num_beams, penalty in ((1, 1.0), (3, 1.3)):
        expected = theirs.generate(
            input_ids=sources,
            attention_mask=padding_mask(lengths, sources.shape[1]).long(),
            max_new_tokens=MAX_NEW_TOKENS + 1,
            num_beams=num_beams,
            do_sample=False,
            length_penalty=penalty,
            forced_bos_token_id=17,
            decoder_start_token_id=5,
            return_dict_in_generate=True,
            output_scores=True,
        )
        start = Start([[17]] * len(LENGTHS), decoder_start_id=5, is_complete=True)
        if num_beams == 1:
            found = greedy_search(ours, ragged(LENGTHS), MAX_NEW_TOKENS, start)
        else:
            found = [beam[0] for beam in beam_search(ours, ragged(LENGTHS), num_beams, MAX_NEW_TOKENS, penalty, start)]
            assert [h.score for h in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-5)
        assert {row[1] for row in expected.sequences.tolist()} == {17}
        assert [h.ids for h in found] == [_until_end(row) for row in expected.sequences[:, 2:].tolist()]


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 12), (4, 3), (6, 20)])
def test_buckets_are_those_of_transformers(buckets: int, farthest: int) -> None:
    """Every distance, also beyond the farthest: a boundary off by one would be lost in a random model's noise."""
    from transformers.models.t5.modeling_t5 import T5Attention

    config = ModelConfig(
        source_vocab_size=5, target_vocab_size=5, positions="relative", relative_buckets=buckets, relative_max_distance=farthest
    )
    for is_causal in (False, True):
        distances = torch.arange(0 if is_causal else -farthest - 40, farthest + 41)
        expected = T5Attention._relative_position_bucket(
            -distances if is_causal else distances, bidirectional=not is_causal, num_buckets=buckets, max_distance=farthest
        )
        assert bucket_of(distances, config, is_causal).tolist() == expected.tolist()
        clamped = bucket_of(distances.clamp(-farthest, farthest), config, is_causal)
        assert clamped.tolist() == expected.tolist(), "the table may end at the farthest distance"
