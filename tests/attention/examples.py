"""Attention that is made up, of tokens that are hard to draw."""

import random

from dragoman.attention.maps import Kind, Look, Map, Part

SOURCE = ("␣a", "<script>alert(1)</script>", "雪\"&'", "⟨eos⟩")
READ = ("⟨start⟩", "$x$", "<0xE2>")
SAID = ("$x$", "<0xE2>", "⟨eos⟩")


def weights(rows: int, columns: int, is_causal: bool, rng: random.Random) -> list[list[float]]:
    """Draw rows that sum to 1."""
    table = []
    for row in range(rows):
        drawn = [rng.random() ** 4 if not is_causal or column <= row else 0.0 for column in range(columns)]
        table.append([value / sum(drawn) for value in drawn])
    return table


def part(kind: Kind, rows: tuple[str, ...], columns: tuple[str, ...], num_layers: int, num_heads: int, seed: int = 0) -> Part:
    rng = random.Random(seed)
    maps = (
        Map(weights(len(rows), len(columns), kind is Kind.DECODER, rng), layer, head)
        for layer in range(num_layers)
        for head in range(num_heads)
    )
    return Part(kind, rows, columns, tuple(maps))


def look() -> Look:
    """Two layers with three heads of each kind, but one encoder layer more."""
    parts = (
        part(Kind.ENCODER, SOURCE, SOURCE, 3, 3),
        part(Kind.DECODER, READ, READ, 2, 3, 1),
        part(Kind.CROSS, SAID, SOURCE, 2, 3, 2),
    )
    return Look("en-<de>", "a <script>alert(1)</script>", "x\u202e", parts, ("A <note>.",))
