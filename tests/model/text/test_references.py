"""Ids and texts of every kind of tokeniser are those of the library that it stands for; streams show all that is certain."""

import gzip
import itertools
import random
import re
from pathlib import Path

import pytest

from dragoman.model.text.byte_ids import ByteTokenizer
from tests.model.text.conftest import FAMILIES, PLAIN, id_rows


@pytest.mark.parametrize("name", [*PLAIN, *FAMILIES])
def test_ids_and_texts_are_the_librarys(name: str, cases_of, odd_texts: list[str]) -> None:
    for case in cases_of(name):
        named = re.compile("|".join(map(re.escape, case.names)) or r"(?!)")
        encoded = case.ours.encode_batch(odd_texts)
        for text, ids in zip(odd_texts, encoded, strict=True):
            if named.search(text):
                text = named.sub(" x ", text)
                ids = case.ours.encode(text)
            assert named.search(text) or ids == list(case.encode(text)), (case.name, text)
        for row in id_rows(case.ours, odd_texts):
            row = [i for i in row if i not in case.silent]
            assert case.text(case.ours.decode(row)) == case.text(case.decode(row)), (case.name, row)


@pytest.mark.parametrize("name", ["unigram", "marian", "nllb", "bart"])
def test_ids_of_captions_are_the_librarys(name: str, cases_of, multi30k: Path) -> None:
    with gzip.open(multi30k / "train.de.gz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()[:5000:10]
    for case in cases_of(name):
        assert case.ours.encode_batch(lines) == [list(case.encode(line)) for line in lines]


@pytest.mark.parametrize("name", [*PLAIN, *FAMILIES])
def test_pieces_add_up_and_are_all_that_is_certain(name: str, cases_of, odd_texts: list[str]) -> None:
    choice = random.Random(3)
    for tokenizer in (case.ours for case in cases_of(name)):
        for ids in id_rows(tokenizer, odd_texts[:160]):
            together = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
            assert together.lstrip(" ") == tokenizer.decode(ids).lstrip(" ")
            assert len(together) - len(tokenizer.decode(ids)) in range(len(ids) + 1)
            ids.insert(choice.randrange(len(ids) + 1), tokenizer.vocab_size + choice.randrange(9))  # pads a model's vocabulary
            stream, shown = tokenizer.detokenizer(), ""
            cuts = sorted(choice.randrange(len(ids) + 1) for _ in range(4))
            for start, end in itertools.pairwise([0, *cuts, len(ids)]):
                shown += stream.push(ids[start:end])
                whole = tokenizer.decode(ids[:end])
                # The rest is a character that lacks bytes, which decoding ends with U+FFFD.
                assert whole.startswith(shown) and re.fullmatch("\ufffd{0,3}", whole.removeprefix(shown))
            assert shown + stream.finish() == tokenizer.decode(ids)


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = ByteTokenizer()
    stream = tokenizer.detokenizer()
    assert [stream.push([token]) for token in tokenizer.encode("é🐕")] == ["", "é", "", "", "", "🐕"]
    assert stream.push(tokenizer.encode("🐕")[:2]) == "" and stream.finish() == "\ufffd"


def test_bytes_come_after_the_special_tokens() -> None:
    from dragoman.model.text.tokenizer import TokenizerError

    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [100, 198, 172] and tokenizer.vocab_size == 384
    assert tokenizer.decode([0, 1, 2, *tokenizer.encode("aé</s>"), 259, 383, 384, 10**9]) == "aé</s>"
    assert [tokenizer.token_bytes(i) for i in (2, 3, 258, 259, 383, 384)] == [b"", b"\0", b"\xff", b"", b"", b""]
    assert tokenizer.encode_batch(["a", ""]) == [[100], []]
    for numbers in ((3, 3, 125), (258, 3, 125), (384, 3, 125), (-1, 3, 125), (1, -1, 0), (1, 3, 1 << 20)):
        with pytest.raises(TokenizerError):
            ByteTokenizer(*numbers)
