"""Search with networks of every family against Transformers' `generate`, on the same weights."""

import pytest
import torch
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


def until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(1)] if 1 in ids else ids


@torch.inference_mode()
def check_answers(theirs: PreTrainedModel, ours: Transformer, penalty: float, start: Start, num_forced: int, **said: int) -> None:
    """Compare greedy search and all of three beams, in double precision, so that no rounding decides a close call."""
    sources = pad(ragged(LENGTHS), 0)
    mask = padding_mask(torch.tensor(LENGTHS), sources.shape[1]).long()
    for num_beams in (1, 3):
        expected = theirs.double().generate(
            input_ids=sources,
            attention_mask=mask,
            max_new_tokens=MAX_NEW_TOKENS + num_forced,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            early_stopping=False,
            length_penalty=penalty,
            bad_words_ids=[[0]] if ours.config.padding == "masked" else None,
            return_dict_in_generate=True,
            output_scores=True,
            **said,
        )
        if num_beams == 1:
            found = greedy_search(ours.double(), ragged(LENGTHS), MAX_NEW_TOKENS, start)
        else:
            beams = beam_search(ours.double(), ragged(LENGTHS), 3, MAX_NEW_TOKENS, penalty, start)
            found = [hypothesis for beam in beams for hypothesis in beam]
            assert [h.score for h in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-5)
        assert [h.ids for h in found] == [until_end(row) for row in expected.sequences[:, 1 + num_forced :].tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate(family: str) -> None:
    check_answers(*random_pair(family), 0.8, Start(is_complete=True), 0)


@pytest.mark.parametrize("family", ["m2m100", "t5"])
def test_forced_token_and_start_are_those_of_generate(family: str) -> None:
    start = Start([[17]] * len(LENGTHS), decoder_start_id=5, is_complete=True)
    check_answers(*random_pair(family, seed=3), 1.3, start, 1, forced_bos_token_id=17, decoder_start_token_id=5)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 12), (4, 3), (6, 20)])
def test_buckets_are_those_of_transformers(buckets: int, farthest: int) -> None:
    """Every distance, also beyond the farthest: a boundary off by one would be lost in a random model's noise."""
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = {"relative_buckets": buckets, "relative_max_distance": farthest}
    config = ModelConfig(source_vocab_size=5, target_vocab_size=5, positions="relative", **relative)
    for is_causal in (False, True):
        distances = torch.arange(0 if is_causal else -farthest - 40, farthest + 41)
        expected = T5Attention._relative_position_bucket(
            -distances if is_causal else distances, bidirectional=not is_causal, num_buckets=buckets, max_distance=farthest
        ).tolist()
        assert bucket_of(distances, config, is_causal).tolist() == expected
        clamped = bucket_of(distances.clamp(-farthest, farthest), config, is_causal)
        assert clamped.tolist() == expected, "the table may end at the farthest distance"
