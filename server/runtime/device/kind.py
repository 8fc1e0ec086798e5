"""The caches of one role as a device keeps them: all of one shape, so that they lie in one block at equal distances."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.export.caches import Cache, Role
from dragoman.server.runtime.device.device import DeviceError


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Caches of one role, which have one shape.

    Attributes:
        names: Of the tensors, in the graphs' order.
        cache: Any of them.
        element_bytes: Size of a number.
    """

    names: tuple[str, ...]
    cache: Cache
    element_bytes: int

    @classmethod
    def of(cls, caches: Sequence[Cache], role: Role, element_bytes: int) -> "CacheKind":
        """Take the caches of a role from all of a model's.

        Raises:
            DeviceError: If there are none, or one is not as the first, or is not indexed by position; it is named.
        """
        alike = [cache for cache in caches if cache.role == role]
        if not alike:
            raise DeviceError(f"the model has no {role}-attention caches, which a device needs; run it with --device cpu")
        for cache in alike:
            if cache.position_axis is None:
                raise DeviceError(f"cache {cache.name} is not indexed by position, which a device needs; run it with --device cpu")
            if cache.shape != alike[0].shape:
                raise DeviceError(
                    f"cache {cache.name} has another shape than {alike[0].name}, and a device keeps one shape a role; "
                    "run it with --device cpu"
                )
        return cls(tuple(cache.name for cache in alike), alike[0], element_bytes)

    @property
    def num_tensors(self) -> int:
        """How many there are."""
        return len(self.names)

    @property
    def num_pieces(self) -> int:
        """Pieces of memory that a row of one of them is made of: heads, where the shape is `[H, T, Dh]`."""
        return math.prod(size for size in self.cache.shape[: self.cache.position_axis] if isinstance(size, int))

    @property
    def position_bytes(self) -> int:
        """What one position of one piece takes: Dh numbers, where the shape is `[H, T, Dh]`."""
        return self.token_bytes // self.num_pieces

    @property
    def token_bytes(self) -> int:
        """What one position of all pieces of one tensor takes."""
        return self.cache.elements_per_position * self.element_bytes

    def shape(self, num_rows: int, capacity: int) -> tuple[int, ...]:
        """Return the shape of so many rows with room for `capacity` positions."""
        return num_rows, *self.cache.row_shape(capacity)
