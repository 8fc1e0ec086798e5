"""The gate of prompt readers, on constructed readers: results that depend on the pieces of a prompt are found."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dragoman.export.eager_pass import Given
from dragoman.export.parity import ParityError
from dragoman.export.prompt_parity import check_pieces
from dragoman.export.row import Row

ROWS = [Row(list(range(3, 3 + length)), [2], 1) for length in (0, 1, 2, 3, 4, 8, 29, 40)]


class FaultyReader:
    """Keeps a number of every token, which a fault may change where it is told the token's place, its piece and the room."""

    def __init__(self, fault: Callable[[int, int, int, int], float] = lambda place, start, size, spare: 0.0) -> None:
        self.fault = fault
        self.seen: list[tuple[int, list[int]]] = []

    def read(self, prompt: Sequence[int], pieces: Sequence[int], spare: int) -> Given:
        self.seen.append((len(prompt), list(pieces)))
        assert sum(pieces) == len(prompt) and spare > 0
        kept, start = np.array(prompt, np.float32), 0
        for size in pieces:
            for place in range(start, start + size):
                kept[place] += np.float32(self.fault(place, start, size, spare))
            start += size
        return [kept, kept + 1]


def test_reader_that_does_not_depend_on_pieces_passes() -> None:
    check_pieces([FaultyReader(), FaultyReader()], ROWS)


def test_prompts_are_cut_in_many_ways_down_to_one_token() -> None:
    reader = FaultyReader()
    check_pieces([reader], ROWS)
    assert (1, [1]) in reader.seen and (0, []) in reader.seen
    sizes = {size for length, pieces in reader.seen if length == 40 for size in pieces}
    assert {1, 2, 7, 40} <= sizes and len(sizes) > 6


def test_long_prompts_are_cut_where_a_block_of_queries_has_one_left() -> None:
    reader = FaultyReader()
    check_pieces([reader], [Row([3] * 300, [2], 1)])
    assert {33, 65, 129, 257, 300} <= {size for _, pieces in reader.seen for size in pieces}


@pytest.mark.parametrize(
    "fault",
    [
        lambda place, start, size, spare: 1e-3 * (place == 20 and size == 7),
        lambda place, start, size, spare: 1e-3 * (start > 0 and place == start),
        lambda place, start, size, spare: 1e-3 * (spare > 5),
        lambda place, start, size, spare: 1e-3 * (size < 40),
    ],
    ids=["a piece's size", "a piece's first token", "room beyond", "all but the whole"],
)
def test_bits_that_depend_on_the_cut_are_found(fault: Callable[[int, int, int, int], float]) -> None:
    with pytest.raises(ParityError, match=r"a prompt of \d+ tokens is not read to the same bits"):
        check_pieces([FaultyReader(fault)], ROWS)


def test_readers_that_differ_from_each_other_are_found() -> None:
    with pytest.raises(ParityError, match="same bits"):
        check_pieces([FaultyReader(), FaultyReader(lambda place, start, size, spare: 1e-3 * (place == 39))], ROWS)
