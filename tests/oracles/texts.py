"""A text that never changes, the licence: tokenisers of made checkpoints are trained on it, and models are asked with it."""

import random
import re
from functools import cache
from pathlib import Path

LICENSE = Path(__file__).parents[2] / "LICENSE"
MIN_CHARACTERS, MAX_CHARACTERS = 20, 90


@cache
def lines() -> tuple[str, ...]:
    """Return the licence's clauses, one a line, cut between words where they are long."""
    found: dict[str, None] = {}
    text = " ".join(LICENSE.read_text(encoding="utf-8").split())
    for clause in re.split(r"(?<=[.;:,]) ", text):
        line = ""
        for word in [*clause.split(), None]:
            if word is not None and len(line) + 1 + len(word) <= MAX_CHARACTERS:
                line = f"{line} {word}".strip()
                continue
            if len(line) >= MIN_CHARACTERS:
                found[line] = None
            line = word or ""
    return tuple(found)


def training_lines(part: int | None = 0) -> list[str]:
    """Return lines to train a tokeniser on: `part` 0 and 1 are different lines, for two sides that differ; None is all of them."""
    return list(lines() if part is None else lines()[part::2])


def sources(count: int, seed: int = 0) -> list[str]:
    """Return texts to ask a model, of one word up to a line, no two alike."""
    choice = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        words = choice.choice(lines()).split()
        found[" ".join(words[: choice.randint(1, len(words))])] = None
    return list(found)
