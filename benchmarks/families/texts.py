"""Texts that lie in the repository: what tokenisers of made checkpoints are trained on, and what the models are asked."""

import random
import re
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TRAINING_LINES = 500
"""Enough for a few hundred pieces, which then take a tenth of a second to train."""

_MARKUP = re.compile(r"[^A-Za-z0-9 ,.;:!?'()-]+")


@cache
def lines() -> tuple[str, ...]:
    """Return sentences of the documentation without markup, 20 to 90 characters each, in one order wherever it is read."""
    found: dict[str, None] = {}
    for path in sorted(DOCS.glob("*.md")):
        if path.name == "your-model.md":  # which changes with what is measured here
            continue
        for sentence in re.split(r"(?<=[.!?])\s+|\n\n|\|", path.read_text(encoding="utf-8")):
            plain = " ".join(_MARKUP.sub(" ", sentence).split())
            if 20 <= len(plain) <= 90:
                found[plain] = None
    return tuple(found)


def training_lines(part: int = 0) -> list[str]:
    """Return lines to train a tokeniser on; `part` 0 and 1 are different lines, for two sides that differ."""
    return list(lines()[part::2])[:TRAINING_LINES]


def sources(count: int, seed: int = 0) -> list[str]:
    """Return texts to ask a model, of one word up to a sentence, no two alike."""
    choice = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        words = choice.choice(lines()).split()
        found[" ".join(words[: choice.randint(1, len(words))])] = None
    return list(found)
