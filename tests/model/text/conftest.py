"""Tokenisers of every kind, made once: SentencePiece models that are trained here, files of `tokenizers`, bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.families.texts import training_lines
from benchmarks.families.tokeniser_cases import FAMILIES, Case, family_cases, plain_cases, trained
from benchmarks.families.tokeniser_texts import strings

MakeCases = Callable[[str], list[Case]]


@pytest.fixture(scope="session")
def unigram() -> bytes:
    """A `.model` file: unigram, with the pieces `<unk>`, `<s>` and `</s>` first."""
    return trained(model_type="unigram")


@pytest.fixture(scope="session")
def odd_texts() -> list[str]:
    """A thousand texts that nobody writes."""
    return strings(1000, [word for line in training_lines() for word in line.split()])


@pytest.fixture(scope="session")
def cases_of(tmp_path_factory: pytest.TempPathFactory) -> MakeCases:
    """Give the cases of a family, or those of plain SentencePiece models for an empty name; each is made once."""
    made: dict[str, list[Case]] = {}
    root: Path = tmp_path_factory.mktemp("families")

    def cases(name: str) -> list[Case]:
        if name not in made:
            made[name] = list(family_cases(name, root) if name else plain_cases())
        return made[name]

    return cases


NAMES = ["", *FAMILIES]
