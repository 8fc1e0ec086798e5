"""Answers of engines with real graphs are those of PyTorch, also from a list of tokens."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from dragoman.export.arguments import Shortlist
from dragoman.export.bundle import SHORTLIST_FILE
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.networks.transformer import Transformer
from dragoman.server.engine.messages import Sampling, SearchOptions
from tests.loop import Loop

TEXTS = ["a dog", "over the grass a dog runs", "grass", "the dog runs over"] * 3
SOURCES = [[5, 80, 7, 279], [14, 14, 250], [99], [200, 31, 77, 8, 100]]


@pytest.fixture(scope="module")
def loop(tiny_bundle: Path) -> Loop:
    return Loop(tiny_bundle, max_slots=3)


def test_searches_give_their_answers_in_the_order_of_the_texts(loop: Loop, tiny_checkpoint: Checkpoint) -> None:
    """Three slots: the beams and the samples of one text at a time."""
    encoded = [loop.source(text) for text in TEXTS]
    expected = greedy_search(tiny_checkpoint.model, [source[:-1] for source in encoded], 20)
    assert [end.answers[0].token_ids for end in loop.decode(encoded, 20)] == [each.ids for each in expected]
    for search in (SearchOptions(num_beams=3, num_answers=3), SearchOptions(num_answers=2, sampling=Sampling(5))):
        ends = loop.decode(encoded, 8, search)
        assert [end.id for end in ends] == list(range(len(TEXTS)))
        assert all(len(end.answers) == search.num_answers for end in ends)
        for text, end in zip(TEXTS, ends, strict=True):
            assert end.answers == ends[TEXTS.index(text)].answers, "the same text has the same answers"
    (end,) = loop.decode(encoded[:1], 6, SearchOptions(num_beams=3, num_answers=3, length_penalty=0.5))
    scores = [answer.score for answer in end.answers]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([sum(answer.log_probs) / len(answer.log_probs) ** 0.5 for answer in end.answers])


def test_forced_prefix_begins_the_answer(loop: Loop) -> None:
    search = SearchOptions(forced_prefix=[50, 60, 70])
    (end,) = loop.decode([[40, loop.manifest.eos_id]], 17, search)
    assert end.answers[0].token_ids[:3] == [50, 60, 70] and len(end.answers[0].log_probs) == 17


def test_answers_from_a_list_of_tokens_are_pytorchs_with_the_others_ruled_out(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    tiny_checkpoint.save(tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", shortlist=Shortlist(["a dog"]))
    short = Loop(tmp_path / "bundle", max_slots=4)
    listed: list[int] = json.loads((tmp_path / "bundle" / SHORTLIST_FILE).read_text())["ids"]
    others = sorted(set(range(280)) - set(listed))
    assert len(listed) == short.manifest.num_choices < 280
    ruled_out = copy.deepcopy(tiny_checkpoint.model)
    assert isinstance(ruled_out, Transformer) and ruled_out.decoder.output_bias is not None
    ruled_out.decoder.output_bias.data[others] = -torch.inf
    encoded = [[*source, short.manifest.eos_id] for source in SOURCES]

    ends = short.decode(encoded, 12, SearchOptions(num_top_log_probs=20))
    for end, expected in zip(ends, greedy_search(ruled_out, SOURCES, 12), strict=True):
        (answer,) = end.answers
        assert answer.token_ids == expected.ids and set(answer.token_ids) <= set(listed)
        np.testing.assert_allclose(answer.log_probs, expected.log_probs, atol=2e-5)
        assert all(len(ids) == 20 and set(ids) <= set(listed) for ids in answer.top_ids)
    ends = short.decode(encoded, 8, SearchOptions(num_beams=4, num_answers=4))
    for end, beams in zip(ends, beam_search(ruled_out, SOURCES, 4, 8), strict=True):
        assert [answer.token_ids for answer in end.answers] == [hypothesis.ids for hypothesis in beams]
        np.testing.assert_allclose([answer.score for answer in end.answers], [h.score for h in beams], atol=2e-5)
    for temperature in (1.0, 100.0):
        ends = short.decode(encoded, 12, SearchOptions(num_answers=4, sampling=Sampling(3, temperature)))
        drawn = {token for end in ends for answer in end.answers for token in answer.token_ids}
        assert len(drawn) > 20 and drawn <= set(listed)
    for penalty in (1.0, 0.5):  # forced tokens are fed, and only generated ones are chosen from the list
        ends = short.decode(encoded, 6, SearchOptions(forced_prefix=others[3:6], repetition_penalty=penalty))
        assert all(end.answers[0].token_ids[:3] == others[3:6] for end in ends)
        assert all(set(end.answers[0].token_ids[3:]) <= set(listed) for end in ends)

    left = next(token for token in listed if token > 2)
    for search in (SearchOptions(), SearchOptions(num_beams=2), SearchOptions(sampling=Sampling(1))):
        some = short.decode(encoded[:1], 4, replace(search, suppressed_tokens=[i for i in listed if i != left]))
        assert set(some[0].answers[0].token_ids) == {left}
        (nothing,) = short.decode(encoded[:1], 4, replace(search, suppressed_tokens=listed))
        assert all(not answer.token_ids for answer in nothing.answers)
    plain, suppressed = (short.decode(encoded, 8, SearchOptions(num_beams=3, suppressed_tokens=tokens)) for tokens in ([], others))
    assert [end.answers for end in plain] == [end.answers for end in suppressed]
