"""Words of tokens, and links of words."""

import numpy as np
import pytest

from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.sentencepiece import SentencePieceTokenizer, same_ids
from dragoman.server.service.score import token_words, word_alignment
from tests.oracles.vocabularies import trained


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b" A", b" d", b"og", b".", b""], [0, 1, 1, 1, None]),
        ([b" ", b" ", b" a", b"\t", b"b", b"\n", b"  "], [None, None, 0, None, 1, None, None]),
        ([bytes([byte]) for byte in " 犬 x".encode()], [None, 0, 0, 0, None, 1]),
        ([b" a", "\u00a0".encode(), b"b", b"\xe3\x80", b"\x80c"], [0, None, 1, None, 2]),
        ([b"a b", b"c"], [0, 1]),
        ([b" \xff", b"\xfe", b" a"], [0, 0, 1]),
    ],
    ids=["words", "white space", "bytes of a character", "no-break and wide spaces", "two words in a token", "not text"],
)
def test_each_token_has_the_number_of_its_first_word(pieces: list[bytes], words: list[int | None]) -> None:
    assert token_words(pieces) == words


@pytest.mark.parametrize("text", ["", " ", "a", "  two  spaces ", "Ein 🐕 läuft.", "a\tb\nc\u3000d", "x\x1cy\u2028z", "</s> <pad>"])
def test_words_are_those_of_split(tokenizer: ByteLevelTokenizer, text: str) -> None:
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    words: dict[int, bytes] = {}
    for piece, word in zip(pieces, token_words(pieces), strict=True):
        if word is not None:
            words[word] = words.get(word, b"") + piece
    assert [words[i].decode().strip() for i in range(len(words))] == text.split()


def test_an_unknown_token_is_a_part_of_its_word() -> None:
    """Decoded, it has spaces around it or is nothing; either would number the words behind it wrongly."""
    model = trained(model_type="unigram")
    tokenizer = SentencePieceTokenizer(model, same_ids(model), 2)
    words = token_words([tokenizer.word_bytes(token) for token in tokenizer.encode("a 猫 the犬the 猫犬 a")])
    assert max(word for word in words if word is not None) == 4


SOURCE = [b" a", b" b", b"c", b" d", b""]
TARGET = [b" X", b"Y", b" Z", b""]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0.1, 0, 0, 0.9, 0], [0.3, 0, 0, 0.7, 0], [0.8, 0.1, 0, 0.1, 0], [0, 1, 0, 0, 0]], "0-1 2-0"),
        # No token of word 1 has the largest weight; together they have the most. The rows of XY disagree; their sum decides.
        ([[0, 0.3, 0.3, 0.4, 0], [0, 0.3, 0.3, 0.4, 0], [0.4, 0, 0, 0.6, 0], [0] * 5], "1-0 2-1"),
        ([[0.6, 0, 0, 0.4, 0], [0.1, 0, 0, 0.9, 0], [1, 0, 0, 0, 0], [0] * 5], "0-1 2-0"),
        # End-of-sequence links nothing.
        ([[0.1, 0, 0, 0, 0.9], [0.1, 0, 0, 0, 0.9], [0, 0, 0.2, 0, 0.8], [0, 0, 0, 1, 0]], "0-0 1-1"),
        # Of equal weights the first is linked.
        ([[0.25, 0.125, 0.125, 0.25, 0.25]] * 4, "0-0 0-1"),
    ],
)
def test_each_target_word_is_linked_to_where_most_of_its_attention_lies(rows: list[list[float]], expected: str) -> None:
    assert word_alignment(np.array(rows, np.float32), SOURCE, TARGET) == expected


def test_links_are_sorted_by_source_then_target_and_may_be_none() -> None:
    last, first = [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]
    assert word_alignment(np.array([last, first, last], np.float32), SOURCE, [b" X", b" Y", b" Z"]) == "0-1 2-0 2-2"
    assert word_alignment(np.ones((1, 5), np.float32), SOURCE, [b""]) == ""
    assert word_alignment(np.ones((2, 1), np.float32), [b""], [b" X", b""]) == ""
