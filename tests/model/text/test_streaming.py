"""Text that grows: its pieces add up, and none holds half a character, whatever the kind of tokeniser."""

import itertools
import random

import pytest

from benchmarks.families.tokeniser_cases import FAMILIES
from benchmarks.families.tokeniser_texts import id_rows

NAMES = ["", *FAMILIES]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name or "SentencePiece")
def test_pieces_add_up_and_are_all_that_is_certain(name: str, cases_of, odd_texts: list[str]) -> None:
    choice = random.Random(3)
    tokenizers = {id(case.ours): case.ours for case in cases_of(name)}
    for tokenizer in tokenizers.values():
        for ids in id_rows(tokenizer, odd_texts[:300]):
            ids.insert(choice.randrange(len(ids) + 1), tokenizer.vocab_size + choice.randrange(9))  # pads a model's vocabulary
            stream, shown = tokenizer.detokenizer(), ""
            cuts = sorted(choice.randrange(len(ids) + 1) for _ in range(4))
            for start, end in itertools.pairwise([0, *cuts, len(ids)]):
                shown += stream.push(ids[start:end])
                whole = tokenizer.decode(ids[:end])
                # What is not shown is a character that lacks bytes, which decoding ends with U+FFFD.
                assert whole.startswith(shown) and whole.removeprefix(shown) in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")
            assert shown + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name or "SentencePiece")
def test_bytes_of_tokens_add_up_to_the_text_but_for_spaces_at_its_start(name: str, cases_of, odd_texts: list[str]) -> None:
    for tokenizer in {id(case.ours): case.ours for case in cases_of(name)}.values():
        for ids in id_rows(tokenizer, odd_texts[:100]):
            together = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
            assert together.lstrip(" ") == tokenizer.decode(ids).lstrip(" ")
            assert len(together) - len(tokenizer.decode(ids)) in range(len(ids) + 1)


def test_half_a_character_waits_for_its_other_half(cases_of) -> None:
    tokenizer = cases_of("ByT5")[0].ours
    stream = tokenizer.detokenizer()
    shown = [stream.push([token]) for token in tokenizer.encode("é🐕")]
    assert shown == ["", "é", "", "", "", "🐕"]
    assert stream.push(tokenizer.encode("🐕")[:2]) == "" and stream.finish() == "\ufffd"
