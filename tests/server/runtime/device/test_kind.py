"""Which declared caches a device keeps, and what it says of the others."""

import numpy as np
import pytest

from dragoman.export.caches import Cache, attention_caches
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.device.kind import CacheKind


def test_kind_has_the_caches_of_its_role_with_their_sizes() -> None:
    kind = CacheKind.of(attention_caches(2, 3, 8), "cross", 2)
    assert kind.names == ("cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1")
    assert (kind.num_tensors, kind.num_pieces, kind.position_bytes, kind.token_bytes) == (4, 3, 16, 48)
    assert kind.shape(5, 7) == (5, 3, 7, 8)


def test_pieces_are_what_lies_together_for_one_position() -> None:
    """The bytes of a row follow from them wherever the axis of positions is."""
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
