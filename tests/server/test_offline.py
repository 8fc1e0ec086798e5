"""Translation without a server: the answers of PyTorch, in order, and errors instead of empty answers."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import greedy_search
from dragoman.model.errors import InputError
from dragoman.server.engine.messages import Sampling, SearchOptions
from dragoman.server.offline import OfflineTranslator

TEXTS = ["a dog", "over the grass a dog runs", "grass", "the dog runs over"] * 3


@pytest.fixture(scope="module")
def translator(tiny_bundle: Path) -> OfflineTranslator:
    return OfflineTranslator(tiny_bundle, max_slots=3, num_threads=1)


def test_answers_are_pytorchs_in_the_order_of_the_texts(translator: OfflineTranslator, tiny_checkpoint: Checkpoint) -> None:
    sources = tiny_checkpoint.tokenizers.source.encode_batch(TEXTS)
    expected = greedy_search(tiny_checkpoint.model, sources, 20)
    assert translator.translate(TEXTS, 20) == [tiny_checkpoint.tokenizers.target.decode(h.ids) for h in expected]


def encoded(translator: OfflineTranslator, texts: list[str]) -> list[list[int]]:
    return [[*ids, translator.bundle.manifest.eos_id] for ids in translator.tokenizers.source.encode_batch(texts)]


def test_searches_give_their_answers_in_the_order_of_the_sources(translator: OfflineTranslator) -> None:
    """Three slots: the beams and the samples of one text at a time."""
    for search in (SearchOptions(num_beams=3, num_answers=3), SearchOptions(num_answers=2, sampling=Sampling(5))):
        ends = translator.run(encoded(translator, TEXTS), 8, search)
        assert [end.id for end in ends] == list(range(len(TEXTS)))
        assert all(len(end.answers) == search.num_answers for end in ends)
        for text, end in zip(TEXTS, ends, strict=True):
            assert end.answers == ends[TEXTS.index(text)].answers, "the same text has the same answers"
    best = [translator.tokenizers.target.decode(end.answers[0].token_ids) for end in ends]
    assert translator.translate(TEXTS, 8, search) == best
    (end,) = translator.run(encoded(translator, TEXTS[:1]), 6, SearchOptions(num_beams=3, num_answers=3, length_penalty=0.5))
    scores = [answer.score for answer in end.answers]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([sum(answer.log_probs) / len(answer.log_probs) ** 0.5 for answer in end.answers])


def test_forced_prefix_begins_the_answer_and_takes_its_room(translator: OfflineTranslator) -> None:
    search = SearchOptions(forced_prefix=[50, 60, 70])
    (end,) = translator.run([[40, translator.bundle.manifest.eos_id]], 17, search)
    assert end.answers[0].token_ids[:3] == [50, 60, 70] and len(end.answers[0].log_probs) == 17
    with pytest.raises(InputError, match="18 is not in 1 to 17"):
        translator.run([[40, 1]], 18, search)


@pytest.mark.parametrize(
    ("texts", "options", "reason"),
    [
        (["a dog"], {"search": SearchOptions(num_beams=4)}, "4 hypotheses need more than the 3 slots"),
        (["a dog", "a dog runs " * 20], {}, r"text 2: .* tiny takes 24"),
        (["a dog"], {"max_new_tokens": 0}, "max_new_tokens"),
        (["a dog"], {"max_new_tokens": 21}, "max_new_tokens"),
    ],
)
def test_impossible_request_is_refused(
    translator: OfflineTranslator, texts: list[str], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        translator.translate(texts, **options)


def test_step_that_fails_is_not_an_empty_answer(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = OfflineTranslator(tiny_bundle, num_threads=1)

    def fail(*_: Any) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(translator.engine.runner, "step", fail)
    with pytest.raises(RuntimeError):
        translator.translate(["a dog"])
