"""Kinds of caches that a device keeps, the few sizes of its steps, and host memory as a device."""

import itertools

import numpy as np
import pytest

from dragoman.export.tensors import Cache, attention_caches
from dragoman.server.runtime.device.device import DeviceError, HostDevice, OutOfDeviceMemory
from dragoman.server.runtime.device.model import NO_GRAPH, Buckets, CacheKind, at_least, padded_sizes


def test_kind_has_the_caches_of_its_role_with_their_sizes() -> None:
    kind = CacheKind.of(attention_caches(2, 3, 8), "cross", 2)
    assert kind.names == ("cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1")
    assert (kind.num_tensors, kind.num_pieces, kind.position_bytes, kind.token_bytes) == (4, 3, 16, 48)
    assert kind.shape(5, 7) == (5, 3, 7, 8)
    for shape in (["T", 6], [2, 3, "T"], [2, "T", 3, 4]):
        kind = CacheKind.of([Cache("x", "self", shape)], "self", 4)
        assert kind.num_pieces * kind.position_bytes * 9 == np.zeros(kind.shape(1, 9), np.float32).nbytes


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ([Cache("a", "self", [4, "T", 8]), Cache("b", "self", [4, "T", 16])], "cache b has another shape than a"),
        ([Cache("a", "self", [4, "T", 8]), Cache("state", "self", [32])], "cache state is not indexed by position"),
        ([Cache("c", "cross", [4, "S", 8])], "the model has no self-attention caches"),
    ],
)
def test_caches_that_a_device_does_not_keep_are_refused_by_name(caches: list[Cache], reason: str) -> None:
    with pytest.raises(DeviceError, match=reason):
        CacheKind.of(caches, "self", 2)


def test_buckets_are_cut_to_the_model_and_to_the_sizes_asked_for() -> None:
    buckets = Buckets.of(100, 40, 700, 512)
    assert buckets.rows == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert (buckets.candidates, buckets.targets, buckets.sources) == ((1, 16), (512, 700), (512,))
    assert Buckets.of(1, 10, 1, 1) == Buckets((1,), (1,), (2,), (2,)), "one position looks like a first token to the kernels"
    asked = Buckets.of(8, 100, 128, 128, rows=(3, 5, 99), capacities=(32, 64))
    assert asked.rows == (3, 5, 8) and asked.targets == asked.sources == (32, 64, 128)


def test_sizes_are_rounded_up_by_less_than_a_half() -> None:
    assert [at_least((2, 8), size) for size in (1, 2, 3, 8)] == [2, 2, 8, 8]
    with pytest.raises(AssertionError):
        at_least((2, 8), 9)
    assert padded_sizes(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert padded_sizes(1) == (1,) and padded_sizes(5) == (1, 2, 3, 4, 5)
    assert all(at_least(padded_sizes(1000), size) < 1.5 * size for size in range(1, 1001))


def test_each_shape_has_a_graph_of_its_own_but_for_many_candidates() -> None:
    buckets = Buckets.of(8, 1000, 2000, 600, rows=(1, 4))
    shapes = list(itertools.product(buckets.rows, buckets.candidates, buckets.targets, buckets.sources))
    ids = {buckets.graph_id(*shape) for shape in shapes}
    assert len(ids) == len(shapes) and min(ids) == 1
    assert [buckets.padded_candidates(k) for k in (1, 2, 16, 17, 64, 65, 1000)] == [1, 16, 16, 64, 64, 65, 1000]
    assert buckets.graph_id(8, 65, 2000, 600) == NO_GRAPH


def test_host_device_copies_pieces_from_pitch_to_pitch_and_counts_its_memory() -> None:
    device = HostDevice(max_bytes=100)
    source, target = device.allocate(12), device.allocate(20)
    device.upload(source, np.arange(12, dtype=np.uint8))
    device.copy_pieces(target, 5, source, 4, 3, 3)
    found = np.empty(20, np.uint8)
    device.download(found, target)
    assert found.tolist() == [0, 1, 2, 0, 0, 4, 5, 6, 0, 0, 8, 9, 10, 0, 0, 0, 0, 0, 0, 0]
    for to, from_ in ((target + 4, target), (target, target + 16)):  # they overlap, or lie outside
        with pytest.raises(AssertionError):
            device.copy(to, from_, 8)
    with pytest.raises(OutOfDeviceMemory, match="69 bytes are asked for, 68 are free"):
        device.allocate(69)
    device.free(source)
    assert device.num_bytes == 20 and device.available_bytes() == 80
