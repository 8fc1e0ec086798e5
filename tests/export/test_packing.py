"""Sources without padding: every token is there once, at its own position, and can be found from both sides."""

import numpy as np
import pytest

from dragoman.export.encoder_parity import check_sources_apart
from dragoman.export.packing import is_packed, pack
from dragoman.export.parity import ParityError
from dragoman.export.row import Row

SOURCES = [[5, 6, 1], [1], [9, 8, 7, 6, 1], [4, 1]]


def test_tokens_follow_each_other_and_know_their_places() -> None:
    packed = pack(SOURCES)
    assert packed["src_ids"].tolist() == [5, 6, 1, 1, 9, 8, 7, 6, 1, 4, 1]
    assert packed["positions"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1]
    assert packed["src_lens"].tolist() == [3, 1, 5, 2]
    assert packed["grid"].shape == (4, 5)
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in packed.values())


def test_from_rows_to_sources_and_back_nothing_is_lost() -> None:
    packed = pack(SOURCES)
    apart = packed["src_ids"][packed["grid"]]
    assert [row[:length].tolist() for row, length in zip(apart, packed["src_lens"], strict=True)] == SOURCES
    np.testing.assert_array_equal(apart.ravel()[packed["cells"]], packed["src_ids"])
    assert packed["grid"].max() < len(packed["src_ids"]), "what stands beyond a source's end is a token all the same"


def test_halves_are_padded() -> None:
    assert [is_packed(precision) for precision in ("fp32", "int8", "fp16", "bf16")] == [True, True, False, False]


class Batching:
    """An encoder whose bits depend on how many sources there are, from a number on."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lengths: set[tuple[int, ...]] = set()

    def encode(self, sources: list[list[int]]) -> list[list[np.ndarray]]:
        self.lengths.add(tuple(map(len, sources)))
        return [[np.array(source) + (len(sources) >= self.limit) * 1e-9] for source in sources]


ROWS = [Row([*range(3, 3 + length), 1], [2], 1) for length in (3, 1, 9, 70, 12, 1, 5, 5)]


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_bits_that_depend_on_company_are_refused(limit: int) -> None:
    with pytest.raises(ParityError, match="not encoded to the same bits"):
        check_sources_apart([Batching(limit)], ROWS)


def test_sources_are_encoded_alone_in_mixtures_and_all_together() -> None:
    encoder = Batching(100)
    check_sources_apart([encoder], ROWS)
    assert {(length,) for length in (2, 4, 6, 10, 13, 71)} <= encoder.lengths
    assert (2, 71, 2) in encoder.lengths and max(map(len, encoder.lengths)) == 5
