"""Ids and texts of every kind beside the libraries they come from; see benchmarks/families/tokenisers.py."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.families.tokeniser_cases import BAD_BYTES, FAMILIES
from benchmarks.families.tokenisers import compare

NAMES = ["", *FAMILIES]
EXACT = ("sentencepiece", "sentencepiece and the family's table", "UTF-8")
"""References that have no way of their own with special tokens."""


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name or "SentencePiece")
def test_ids_and_texts_are_the_librarys_or_the_cause_is_known(name: str, cases_of, odd_texts: list[str]) -> None:
    for case in cases_of(name):
        found = compare(case, odd_texts)
        assert not found.unexplained, (case.name, case.reference, found.unexplained[:3])
        assert found.same_ids + found.same_texts + found.causes.total() == 2 * len(odd_texts)
        if case.reference in EXACT and name != "MADLAD-400":
            assert found.same_ids == len(odd_texts), case.name


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name or "SentencePiece")
def test_the_corpus_has_the_librarys_ids(name: str, cases_of, multi30k: Path) -> None:
    for side in ("en", "de"):
        with gzip.open(multi30k / f"train.{side}.gz", "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()[:5000:10]
        for case in cases_of(name):
            found = compare(case, lines)
            assert not found.unexplained, (case.name, case.reference, found.unexplained[:3])


def test_a_difference_without_a_cause_would_be_found(cases_of, odd_texts: list[str]) -> None:
    """The comparison itself: another table, another text, and a cause that does not explain what it is given for."""
    case = next(case for case in cases_of("T5") if case.reference == "T5Tokenizer")
    shifted = replace(case, encode=lambda text: [i + 1 for i in case.encode(text)])
    assert len(compare(shifted, odd_texts[:50]).unexplained) >= 45
    wrong = replace(case, decode=lambda ids: case.decode(ids) + ".", decode_causes=(BAD_BYTES,))
    assert len(compare(wrong, odd_texts[:50]).unexplained) == 50
