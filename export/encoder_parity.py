"""The gate of the encoder: a source is encoded to the same bits alone, beside any others, and in any order."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dragoman.export.eager_pass import Given
from dragoman.export.parity import LONG_ROW, ParityError
from dragoman.export.row import Row

BATCHES = (2, 3, 7, 64)
"""How many sources are encoded together; the last is all there are."""


class Encoder(Protocol):
    """A graph that encodes."""

    def encode(self, sources: Sequence[list[int]]) -> list[Given]:
        """Encode sources in one batch → per source what fills a slot, see `Runner`."""
        ...


def check_sources_apart(encoders: Sequence[Encoder], rows: Sequence[Row]) -> None:
    """Encode the sources of rows alone and in mixtures of lengths, with every encoder.

    A long source is encoded beside the shortest alone: its attention is most of what all this takes.

    Raises:
        ParityError: If a source's bits are not always the same.
    """
    sources = [list(source) for source in dict.fromkeys(tuple(row.source) for row in rows)]
    short = sorted((source for source in sources if len(source) <= LONG_ROW), key=len)
    order = [short[i] for i in np.random.default_rng(3).permutation(len(short))]
    mixtures = [order[start : start + size] for size in BATCHES for start in range(0, len(order), size)]
    mixtures += [[*short[::-1]], *([short[0], source, short[0]] for source in sources if len(source) > LONG_ROW)]
    expected: dict[tuple[int, ...], list[bytes]] = {}
    for encoder in encoders:
        for batch in [*([source] for source in sources), *mixtures]:
            for source, given in zip(batch, encoder.encode(batch), strict=True):
                bits = [part.tobytes() for part in given]
                if bits != expected.setdefault(tuple(source), bits):
                    raise ParityError(f"a source of {len(source)} tokens is not encoded to the same bits in every batch")
