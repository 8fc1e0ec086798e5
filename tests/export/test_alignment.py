"""Heads that align, and their queries in the decode step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.tensors import QUERIES_OUTPUT
from dragoman.server.engine.messages import Request
from dragoman.server.service.alignment import links
from tests.loop import Loop

WORDS = {
    "man": "Mann",
    "girls": "Mädchen",
    "dog": "Hund",
    "dogs": "Hunde",
    "woman": "Frau",
    "book": "Buch",
    "beach": "Strand",
    "water": "Wasser",
    "red": "rote",
    "street": "Straße",
    "guitar": "Gitarre",
    "children": "Kinder",
}
TEXTS = (
    "A man in a red shirt is playing the guitar.",
    "Two girls are walking along the beach.",
    "A brown dog runs through the water.",
    "On the street a woman is reading a book.",
    "Three dogs play with children in the park.",
    "In front of the house a man is talking to a woman.",
)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_words_are_aligned_as_a_dictionary_has_them(shipped_bundle: Callable[..., Path], precision: str) -> None:
    translator = Loop(shipped_bundle("en-de", precision), max_slots=8, num_threads=1)
    right, wrong = [], []
    for i, text in enumerate(TEXTS):
        ids = translator.tokenizers.source.encode(text)
        end = translator.run([Request(i, [*ids, translator.manifest.eos_id], 40, 0.0, text_range=(0, len(ids)))])[i]
        answer = end.answers[0]
        target = translator.tokenizers.target.decode(answer.token_ids)
        found = links(translator.tokenizers, ids, text, answer.token_ids, target, answer.alignment)
        for source_word, target_word in WORDS.items():
            place, wanted = target.find(target_word), text.find(f" {source_word}") + 1
            if place < 0 or not wanted:
                continue
            (link,) = [link for link in found if link.target_start <= place < link.target_end]
            (right if link.source_start <= wanted < link.source_end else wrong).append((source_word, target_word))
    assert len(right) >= 9 and len(wrong) <= 1, (right, wrong)


def test_bundles_for_devices_and_without_attention_have_no_heads(shipped_bundle: Callable[..., Path]) -> None:
    found = {each: Bundle.open(shipped_bundle(*each)).manifest for each in (("en-de", "fp32"), ("en-de-rnn", "fp32"))}
    assert found["en-de", "fp32"].alignment and found["en-de", "fp32"].tensors.decoder_outputs[-1] == QUERIES_OUTPUT
    assert not found["en-de-rnn", "fp32"].alignment and QUERIES_OUTPUT not in found["en-de-rnn", "fp32"].tensors.decoder_outputs
