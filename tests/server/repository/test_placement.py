"""Eviction of models when memory is short: the order, the limits in time, and the reason of a refusal."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dragoman.server.repository.memory import Room
from dragoman.server.repository.placement import LEAVE_SECONDS, MIN_BUSY_STAY_SECONDS, MIN_STAY_SECONDS, NotWanted, Placement, Stay
from dragoman.server.repository.versions import Cause, Refused

MIB = 2**20
NEVER = float("inf")


@dataclass
class Memory:
    """Memory with a bound, and a clock that moves a step at each reading."""

    bound: int = 100
    room: int = 10**6
    step: float = 0.1
    now: float = 1000.0
    models: "list[Model]" = field(default_factory=list)

    def __post_init__(self) -> None:
        measure: Callable[[], Room] = lambda: Room(self.room * MIB, "of the machine is free")  # noqa: E731
        self.placement = Placement(lambda: self.models, bound_bytes=self.bound * MIB, measure_room=measure, clock=self.tick)

    def tick(self) -> float:
        self.now += self.step
        return self.now

    def add(self, name: str, size: int, num_held: int = 0, used: float = 0.0, **fields: float) -> "Model":
        came, is_busy = fields.pop("came", 0.0), bool(fields.pop("is_busy", False))
        model = Model(self, name, size, Stay(num_held, used, came, is_busy), **fields)
        self.models.append(model)
        return model

    def make_room(self, size: int, is_wanted: Callable[[], bool] = lambda: True) -> list[str]:
        """Return the models that were unloaded, in order."""
        asyncio.run(self.placement.make_room("new", size * MIB, is_wanted))
        return [one.name for one in sorted(self.models, key=lambda one: one.left_at) if one.left_at < NEVER]


@dataclass
class Model:
    memory: Memory
    name: str
    size: int
    usual: Stay
    is_kept: float = False
    leaves_after: float = 0.0
    asked_at: float = NEVER
    left_at: float = NEVER

    @property
    def is_leaving(self) -> bool:
        return self.asked_at < NEVER == self.left_at

    def memory_bytes(self) -> int:
        if self.left_at == NEVER and self.memory.now >= self.asked_at + self.leaves_after:
            self.left_at = self.memory.now
        return self.size * MIB if self.left_at == NEVER else 0

    def stay(self) -> Stay | None:
        return None if self.is_kept or self.asked_at < NEVER else self.usual

    def give_way(self) -> None:
        assert not self.is_kept and not self.usual.is_busy
        self.asked_at = self.memory.now


@pytest.mark.parametrize(
    ("models", "size", "left"),
    [
        ([("a", 60)], 40, []),
        ([("a", 60)], 41, ["a"]),
        ([("often", 30, 0, 30.0), ("seldom", 30, 0, 10.0), ("sometimes", 30, 0, 20.0)], 60, ["seldom", "sometimes"]),
        ([("held", 50, 1, 1.0), ("free", 50, 0, 2.0)], 40, ["free"]),
        ([("new", 50, 0, 1.0), ("other", 50, 0, 2.0)], 40, ["other"]),
    ],
)
def test_least_used_models_that_no_request_holds_leave_first_and_no_more_than_must(
    models: list[tuple[str, int]], size: int, left: list[str]
) -> None:
    memory = Memory()
    for model in models:
        memory.add(*model)
    assert memory.make_room(size) == left


@pytest.mark.parametrize(
    ("memory", "models", "size", "reason"),
    [
        (Memory(), [("kept", 70, {"is_kept": 1})], 40, "it may take 40 MiB, and 30 MiB of 100 MiB (models_memory_gib) is left"),
        (Memory(), [("a", 60, {})], 101, "it may take 101 MiB, and 40 MiB of 100 MiB (models_memory_gib) is left"),
        (
            Memory(),
            [("b", 60, {"is_busy": 1}), ("a", 30, {"is_busy": 1})],
            40,
            "it may take 40 MiB, and 10 MiB of 100 MiB (models_memory_gib) is left; in use: a, b",
        ),
        (Memory(bound=0, room=30), [], 40, "it may take 40 MiB, and 30 MiB of the machine is free"),
    ],
)
def test_refusal_says_what_is_missing(
    memory: Memory, models: list[tuple[str, int, dict[str, float]]], size: int, reason: str
) -> None:
    others = [memory.add(name, taken, **fields) for name, taken, fields in models]
    with pytest.raises(Refused) as refusal:
        memory.make_room(size)
    assert (refusal.value.cause, refusal.value.reason) == (Cause.MEMORY, reason)
    assert all(model.asked_at == NEVER for model in others)
    assert 0 <= memory.now - 1000 <= 31


def test_at_the_start_only_the_bound_counts() -> None:
    Memory(bound=0, room=30).placement.check(40 * MIB, is_start=True)
    memory = Memory()
    memory.add("a", 70, is_kept=1)
    memory.placement.check(30 * MIB, is_start=True)
    with pytest.raises(Refused):
        memory.placement.check(40 * MIB, is_start=True)


@pytest.mark.parametrize(("num_held", "stays"), [(0, MIN_STAY_SECONDS), (1, MIN_BUSY_STAY_SECONDS)])
def test_model_that_was_just_loaded_stays_a_while(num_held: int, stays: float) -> None:
    memory = Memory(step=0.01)
    model = memory.add("a", 80, num_held=num_held, came=memory.now)
    assert memory.make_room(40) == ["a"] and stays <= model.asked_at - 1000.0 < stays + 0.1


def test_another_model_is_asked_while_one_takes_long_to_leave() -> None:
    memory = Memory()
    slow = memory.add("slow", 50, used=1.0, leaves_after=25.0)
    quick = memory.add("quick", 50, used=2.0)
    assert memory.make_room(40) == ["quick"]
    assert LEAVE_SECONDS <= quick.asked_at - slow.asked_at < LEAVE_SECONDS + 1


def test_no_model_leaves_for_one_that_is_not_waited_for() -> None:
    memory = Memory()
    model = memory.add("a", 80)
    with pytest.raises(NotWanted):
        memory.make_room(40, lambda: False)
    assert model.asked_at == NEVER
