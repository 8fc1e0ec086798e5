"""A bundle with a shortlist, served: every search gives what PyTorch gives when the tokens that are not listed are ruled out."""

import copy
import json

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
from dragoman.server.offline import OfflineTranslator

SOURCES = [[5, 80, 7, 279], [14, 14, 250], [99], [200, 31, 77, 8, 100]]


@pytest.fixture(scope="module")
def translator(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> OfflineTranslator:
    folder = tmp_path_factory.mktemp("short")
    tiny_checkpoint.save(folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", folder / "bundle", shortlist=Shortlist(["a dog"]))
    return OfflineTranslator(folder / "bundle", max_slots=4, num_threads=1)


@pytest.fixture(scope="module")
def listed(translator: OfflineTranslator) -> list[int]:
    ids: list[int] = json.loads((translator.bundle.directory / SHORTLIST_FILE).read_text())["ids"]
    assert len(ids) == translator.manifest.num_choices < 280
    return ids


@pytest.fixture(scope="module")
def ruled_out(tiny_checkpoint: Checkpoint, listed: list[int]) -> Transformer:
    """Return the model with a logit of -inf for every token that is not listed."""
    model = copy.deepcopy(tiny_checkpoint.model)
    assert isinstance(model, Transformer) and model.decoder.output_bias is not None
    model.decoder.output_bias.data[sorted(set(range(280)) - set(listed))] = -torch.inf
    return model


def complete(translator: OfflineTranslator) -> list[list[int]]:
    return [[*source, translator.manifest.eos_id] for source in SOURCES]


def test_greedy_answers_and_beams_are_pytorchs(translator: OfflineTranslator, ruled_out: Transformer, listed: list[int]) -> None:
    ends = translator.run(complete(translator), 12, SearchOptions(num_top_log_probs=20))
    for end, expected in zip(ends, greedy_search(ruled_out, SOURCES, 12), strict=True):
        (answer,) = end.answers
        assert answer.token_ids == expected.ids and set(answer.token_ids) <= set(listed)
        np.testing.assert_allclose(answer.log_probs, expected.log_probs, atol=2e-5)
        assert all(len(ids) == 20 and set(ids) <= set(listed) for ids in answer.top_ids)
    ends = translator.run(complete(translator), 8, SearchOptions(num_beams=4, num_answers=4))
    for end, beams in zip(ends, beam_search(ruled_out, SOURCES, 4, 8), strict=True):
        assert [answer.token_ids for answer in end.answers] == [hypothesis.ids for hypothesis in beams]
        np.testing.assert_allclose([answer.score for answer in end.answers], [h.score for h in beams], atol=2e-5)


def test_draws_are_of_listed_tokens_even_where_all_are_as_likely(translator: OfflineTranslator, listed: list[int]) -> None:
    for temperature in (1.0, 100.0):
        ends = translator.run(complete(translator), 12, SearchOptions(num_answers=4, sampling=Sampling(3, temperature)))
        drawn = {token for end in ends for answer in end.answers for token in answer.token_ids}
        assert len(drawn) > 20 and drawn <= set(listed)


def test_prefix_of_tokens_that_are_not_listed_is_read_as_it_is(
    translator: OfflineTranslator, ruled_out: Transformer, listed: list[int]
) -> None:
    """Forced tokens are fed, and only generated ones are chosen from the list, also with a penalty."""
    prefix = sorted(set(range(3, 280)) - set(listed))[:3]
    plain, penalised = (
        translator.run(complete(translator), 6, SearchOptions(forced_prefix=prefix, repetition_penalty=penalty))
        for penalty in (1.0, 0.5)
    )
    for source, end in zip(SOURCES, plain, strict=True):
        token_ids = end.answers[0].token_ids
        assert token_ids[:3] == prefix and set(token_ids[3:]) <= set(listed)
        inputs = torch.tensor([[ruled_out.config.decoder_start_id, *prefix]])
        complete_source = torch.tensor([[*source, ruled_out.config.eos_id]])
        with torch.no_grad():
            logits = ruled_out(complete_source, torch.tensor([complete_source.shape[1]]), inputs)[0, -1]
        logits[ruled_out.config.pad_id] = -torch.inf
        assert token_ids[3] == int(logits.argmax())
    assert all(set(end.answers[0].token_ids[3:]) <= set(listed) for end in penalised)


def test_suppressed_tokens_of_the_list_end_the_answer_and_others_change_nothing(
    translator: OfflineTranslator, listed: list[int]
) -> None:
    left = next(token for token in listed if token > 2)
    for search in (SearchOptions(), SearchOptions(num_beams=2), SearchOptions(sampling=Sampling(1))):
        some = translator.run(complete(translator)[:1], 4, replace(search, suppressed_tokens=[i for i in listed if i != left]))
        assert set(some[0].answers[0].token_ids) == {left}
        (nothing,) = translator.run(complete(translator)[:1], 4, replace(search, suppressed_tokens=listed))
        assert all(not answer.token_ids for answer in nothing.answers)
    others = sorted(set(range(280)) - set(listed))
    plain, suppressed = (
        translator.run(complete(translator), 8, SearchOptions(num_beams=3, suppressed_tokens=tokens)) for tokens in ([], others)
    )
    assert [end.answers for end in plain] == [end.answers for end in suppressed]
