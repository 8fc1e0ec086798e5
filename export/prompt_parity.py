"""The gate of what reads prompts: the caches hold the same bits of a prompt that is read whole and of one that is read in pieces.

A server reads long prompts a piece at a time, of sizes that depend on who else is there. Attention takes its queries in blocks, of
which the last may be of one token: sizes one above those of blocks are among those that are tried.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dragoman.export.eager_pass import Given
from dragoman.export.parity import LONG_ROW, ParityError
from dragoman.export.row import Row

SIZES, LONG_SIZES = (1, 2, 7), (33, 65, 129, 257)
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
        length = len(prompt)
        is_long = length > LONG_ROW
        uneven = random.integers(1, (MAX_UNEVEN * MAX_UNEVEN if is_long else MAX_UNEVEN) + 1, length).tolist()
        sizes = [[size] * length for size in (LONG_SIZES if is_long else SIZES)]
        ways = [[length] * bool(length), *(_pieces(length, of_way) for of_way in (*sizes, uneven))]
        expected: list[bytes] | None = None
        for reader in readers:
            for pieces in ways:
                for spare in SPARES:
                    bits = [part.tobytes() for part in reader.read(prompt, pieces, spare)]
                    if bits != (expected := expected or bits):
                        raise ParityError(
                            f"a prompt of {length} tokens is not read to the same bits whole and in {len(pieces)} pieces"
                        )


def _pieces(length: int, sizes: Sequence[int]) -> list[int]:
    """Cut so many tokens into pieces of these sizes; the last is what is left."""
    ends = np.minimum(np.cumsum(sizes), length)
    return [int(size) for size in np.diff(ends, prepend=0) if size]
