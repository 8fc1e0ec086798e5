import itertools

import pytest

from dragoman.server.runtime.device.buckets import NO_GRAPH, Buckets, at_least, padded_sizes


def test_buckets_are_cut_to_the_model_and_end_with_the_most_there_can_be() -> None:
    buckets = Buckets.of(100, 40, 700, 512)
    assert buckets.rows == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert buckets.candidates == (1, 16)
    assert buckets.targets == (512, 700) and buckets.sources == (512,)
    assert Buckets.of(1, 10, 1, 1) == Buckets((1,), (1,), (2,), (2,)), (
        "a cache of one position looks like a first token to the kernels"
    )


def test_sizes_that_are_asked_for_take_the_place_of_the_usual_ones() -> None:
    buckets = Buckets.of(8, 100, 128, 128, rows=(3, 5, 99), capacities=(32, 64))
    assert buckets.rows == (3, 5, 8) and buckets.targets == buckets.sources == (32, 64, 128)


@pytest.mark.parametrize(("size", "expected"), [(1, 2), (2, 2), (3, 8), (8, 8)])
def test_a_size_is_rounded_up(size: int, expected: int) -> None:
    assert at_least((2, 8), size) == expected


def test_padded_sizes_are_powers_of_two_and_the_halves_between_them() -> None:
    assert padded_sizes(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert padded_sizes(1) == (1,) and padded_sizes(5) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("largest", [1, 2, 7, 512, 1000])
def test_what_is_padded_grows_by_less_than_a_half(largest: int) -> None:
    sizes = padded_sizes(largest)
    assert all(at_least(sizes, size) < 1.5 * size for size in range(1, largest + 1))
    assert len(sizes) <= 2 * largest.bit_length()


def test_more_than_the_largest_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        at_least((2, 8), 9)


def test_many_candidates_are_not_rounded_and_have_no_graph() -> None:
    buckets = Buckets.of(8, 1000, 128, 128)
    assert [buckets.padded_candidates(k) for k in (1, 2, 16, 17, 64, 65, 1000)] == [1, 16, 16, 64, 64, 65, 1000]
    assert buckets.graph_id(8, 65, 128, 128) == NO_GRAPH


def test_each_shape_has_a_graph_of_its_own() -> None:
    buckets = Buckets.of(8, 1000, 2000, 600, rows=(1, 4))
    shapes = list(itertools.product(buckets.rows, buckets.candidates, buckets.targets, buckets.sources))
    ids = {buckets.graph_id(*shape) for shape in shapes}
    assert len(ids) == len(shapes) and min(ids) == 1
