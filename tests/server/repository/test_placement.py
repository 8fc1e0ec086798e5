"""Who gives way to whom when memory is short."""

import asyncio
from collections.abc import Callable

import pytest

from dragoman.server.repository import placement as placement_file
from dragoman.server.repository.memory import Room
from dragoman.server.repository.placement import (
    LEAVE_SECONDS,
    MIN_BUSY_STAY_SECONDS,
    MIN_STAY_SECONDS,
    NotWanted,
    Placement,
    Stay,
)
from dragoman.server.repository.versions import Cause, Refused

MIB = 2**20


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_file, "LOOK_SECONDS", 0.001)


class House:
    """Models with memory, and a clock that goes on by a bit with each look."""

    def __init__(self, bound: int = 100, room: int = 10**6, wait_seconds: float = 30.0) -> None:
        self.now, self.step = 1000.0, 0.1
        self.lodgers: list[Lodger] = []
        self.placement = Placement(
            lambda: self.lodgers,
            bound_bytes=bound * MIB,
            wait_seconds=wait_seconds,
            measure_room=lambda: Room(room * MIB, "of the machine is free"),
            clock=self.tick,
        )

    def tick(self) -> float:
        self.now += self.step
        return self.now

    def add(self, name: str, size: int, **stay: float | bool) -> "Lodger":
        lodger = Lodger(self, name, size, **stay)
        self.lodgers.append(lodger)
        return lodger

    def make_room(self, size: int, is_wanted: Callable[[], bool] = lambda: True) -> list[str]:
        """Return who has left, in order."""
        asyncio.run(self.placement.make_room("new", size * MIB, is_wanted))
        return [one.name for one in sorted(self.lodgers, key=lambda one: one.left_at) if one.left_at < float("inf")]


class Lodger:
    def __init__(
        self,
        house: House,
        name: str,
        size: int,
        num_held: int = 0,
        used: float = 0.0,
        came: float = 0.0,
        is_busy: bool = False,
        is_kept: bool = False,
        leaves_after: float = 0.0,
    ) -> None:
        self.house, self.name, self.size, self.is_kept, self.leaves_after = house, name, size, is_kept, leaves_after
        self.is_here, self.asked_at, self.left_at = True, float("inf"), float("inf")
        self._stay = Stay(num_held, used, came, is_busy)

    @property
    def is_leaving(self) -> bool:
        return self.is_here and self.asked_at < float("inf")

    def memory_bytes(self) -> int:
        if self.is_here and self.house.now >= self.asked_at + self.leaves_after:
            self.is_here, self.left_at = False, self.house.now
        return self.size * MIB if self.is_here else 0

    def stay(self) -> Stay | None:
        return None if self.is_kept or self.asked_at < float("inf") else self._stay

    def give_way(self) -> None:
        assert not self.is_kept and not self._stay.is_busy
        self.asked_at = self.house.now


def test_nobody_leaves_while_there_is_room() -> None:
    house = House()
    house.add("a", 60)
    assert house.make_room(40) == []


def test_the_least_used_leave_first_one_after_the_other_and_no_more_than_must() -> None:
    house = House()
    for name, used in (("often", 30.0), ("seldom", 10.0), ("sometimes", 20.0)):
        house.add(name, 30, used=used)
    assert house.make_room(60) == ["seldom", "sometimes"]


def test_who_is_held_leaves_after_who_is_not_however_little_it_was_used() -> None:
    house = House()
    house.add("held", 50, num_held=1, used=1.0)
    house.add("free", 50, used=2.0)
    assert house.make_room(40) == ["free"]


def test_models_that_are_always_loaded_stay_and_the_refusal_says_what_is_missing() -> None:
    house = House()
    house.add("kept", 70, is_kept=True)
    with pytest.raises(Refused, match=r"it may take 40 MiB, and 30 MiB of 100 MiB \(models_memory_gib\) is left") as refusal:
        house.make_room(40)
    assert refusal.value.cause is Cause.MEMORY


def test_what_never_fits_is_refused_without_asking_anybody() -> None:
    house = House()
    lodger = house.add("a", 60)
    with pytest.raises(Refused, match="it may take 101 MiB"):
        house.make_room(101)
    assert lodger.is_here and lodger.asked_at == float("inf")


def test_who_cannot_leave_in_time_is_named() -> None:
    house = House()
    house.add("b", 60, is_busy=True)
    house.add("a", 30, is_busy=True)
    with pytest.raises(Refused, match="in use: a, b"):
        house.make_room(40)


@pytest.mark.parametrize(("num_held", "stays"), [(0, MIN_STAY_SECONDS), (1, MIN_BUSY_STAY_SECONDS)])
def test_who_has_just_come_stays_a_while(num_held: int, stays: float) -> None:
    house = House()
    house.step = 0.01
    lodger = house.add("a", 80, num_held=num_held, came=house.now)
    assert house.make_room(40) == ["a"]
    assert stays <= lodger.asked_at - 1000.0 < stays + 0.1


def test_one_that_takes_long_to_leave_keeps_nobody_waiting_if_another_can() -> None:
    house = House()
    slow = house.add("slow", 50, used=1.0, leaves_after=25.0)
    house.add("quick", 50, used=2.0)
    assert house.make_room(40) == ["quick"]
    assert house.now < slow.asked_at + LEAVE_SECONDS + 1


def test_the_machines_own_room_counts_too() -> None:
    house = House(bound=0, room=30)
    with pytest.raises(Refused, match="30 MiB of the machine is free"):
        house.make_room(40)
    house.placement.check(40 * MIB, is_start=True)


def test_the_bound_also_holds_at_the_start() -> None:
    house = House()
    house.add("a", 70, is_kept=True)
    with pytest.raises(Refused):
        house.placement.check(40 * MIB, is_start=True)


def test_who_is_not_waited_for_any_more_asks_nobody_to_leave() -> None:
    house = House()
    lodger = house.add("a", 80)
    with pytest.raises(NotWanted):
        house.make_room(40, lambda: False)
    assert lodger.is_here
