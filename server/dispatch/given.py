"""What replicas have been given, and the numbers that they know it by."""

import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Given(Generic[T]):
    """Items and their numbers. Front ends count their requests each by itself, so a replica is told numbers of the desk's own."""

    def __init__(self, numbers: "itertools.count[int]") -> None:
        """Start with nothing given.

        Args:
            numbers: That have not been used; shared by all that is given to the same replicas.
        """
        self._new_numbers = numbers
        self._items: dict[int, T] = {}
        self._numbers: dict[T, int] = {}

    def add(self, item: T) -> int:
        """Return a number for an item that is being given to a replica."""
        number = next(self._new_numbers)
        self._items[number] = item
        self._numbers[item] = number
        return number

    def find(self, number: int) -> T | None:
        """Return the item of a number; None if it has been taken back."""
        return self._items.get(number)

    def number(self, item: T) -> int:
        """Return the number of an item that is given."""
        return self._numbers[item]

    def discard(self, item: T) -> None:
        """Take an item back, if it was given."""
        if (number := self._numbers.pop(item, None)) is not None:
            del self._items[number]
