"""A bundle driven without a server: the model's answers, in order, and never an empty one in place of an error."""

from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import Checkpoint
from model.decode import greedy_search
from model.errors import InputError
from server.offline import OfflineTranslator

TEXTS = ["a dog", "over the grass a dog runs", "grass", "the dog runs over"] * 3


@pytest.fixture(scope="module")
def translator(tiny_bundle: Path) -> OfflineTranslator:
    return OfflineTranslator(tiny_bundle, max_slots=3, num_threads=1)


def test_answers_are_pytorchs_in_the_order_of_the_texts(translator: OfflineTranslator, tiny_checkpoint: Checkpoint) -> None:
    sources = tiny_checkpoint.tokenizer.encode_batch(TEXTS)
    expected = greedy_search(tiny_checkpoint.model, sources, 20)
    assert translator.translate(TEXTS, 20) == [tiny_checkpoint.tokenizer.decode(h.ids) for h in expected]


def test_a_text_that_is_too_long_is_named(translator: OfflineTranslator) -> None:
    with pytest.raises(InputError, match=r"text 2: .* tiny takes 24"):
        translator.translate(["a dog", "a dog runs " * 20])


@pytest.mark.parametrize("limit", [0, 21])
def test_more_tokens_than_the_model_has_room_for_are_refused(translator: OfflineTranslator, limit: int) -> None:
    with pytest.raises(InputError, match="max_new_tokens"):
        translator.translate(["a dog"], limit)


def test_a_step_that_raises_is_not_an_empty_answer(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = OfflineTranslator(tiny_bundle, num_threads=1)

    def fail(*_: Any) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(translator.engine.runner, "step", fail)
    with pytest.raises(RuntimeError):
        translator.translate(["a dog"])
