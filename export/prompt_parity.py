"""The gate of what reads prompts: the caches hold the same bits of a prompt that is read whole and of one that is read in pieces.

A server reads long prompts a piece at a time, of sizes that depend on who else is there. It makes no pieces of one token.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dragoman.export.eager_pass import Given
from dragoman.export.parity import ParityError
from dragoman.export.row import Row

SIZES = (2, 3, 7)
MAX_UNEVEN = 12
SPARES = (1, 70)
"""Room beyond a prompt in which it is read."""


class Reader(Protocol):
    """A graph that reads prompts."""

    def read(self, prompt: Sequence[int], pieces: Sequence[int], spare: int) -> Given:
        """Read a prompt in pieces of so many tokens each, with room to spare → what the caches that steps write hold of it."""
        ...


def check_pieces(readers: Sequence[Reader], rows: Sequence[Row]) -> None:
    """Read the sources of rows whole and in pieces of several sizes, with every reader.

    Raises:
        ParityError: If a prompt's bits are not always the same.
    """
    random = np.random.default_rng(4)
    for prompt in dict.fromkeys(tuple(row.source) for row in rows):
        uneven = random.integers(2, MAX_UNEVEN + 1, len(prompt)).tolist()
        ways = [[len(prompt)] * bool(prompt), *(_pieces(len(prompt), [size] * len(prompt)) for size in SIZES)]
        ways.append(_pieces(len(prompt), uneven))
        expected: list[bytes] | None = None
        for reader in readers:
            for pieces in ways:
                for spare in SPARES:
                    bits = [part.tobytes() for part in reader.read(prompt, pieces, spare)]
                    if bits != (expected := expected or bits):
                        raise ParityError(
                            f"a prompt of {len(prompt)} tokens is not read to the same bits whole and in {len(pieces)} pieces"
                        )


def _pieces(length: int, sizes: Sequence[int]) -> list[int]:
    """Cut so many tokens into pieces of these sizes; a last one of one token joins the one before."""
    pieces: list[int] = []
    for size in sizes:
        left = length - sum(pieces)
        if not left:
            break
        pieces.append(left if left - size < 2 else size)
    return pieces
