"""Sources of mixed lengths: single captions, and several joined to one text."""

import random
from collections.abc import Sequence

SHARES = {1: 0.6, 2: 0.25, 3: 0.15}
"""How many captions a text is made of, and how often that is so."""


def mix(captions: Sequence[str], num_texts: int, seed: int) -> list[str]:
    """Return texts of so many captions as `SHARES` says, drawn at random; the same seed gives the same texts."""
    generator = random.Random(seed)
    sizes = generator.choices(list(SHARES), list(SHARES.values()), k=num_texts)
    return [" ".join(generator.choices(captions, k=size)) for size in sizes]
