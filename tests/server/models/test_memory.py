"""Memory: free by what the kernel says, needed by a version's manifest, and made free by the eviction of models."""

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.export.bundle import Bundle
from dragoman.server.config import load
from dragoman.server.models import memory
from dragoman.server.models.memory import (
    LEAVE_SECONDS,
    MARGIN,
    MIN_BUSY_STAY_SECONDS,
    MIN_STAY_SECONDS,
    PROCESS_BYTES,
    Candidate,
    Measured,
    NotWanted,
    Placement,
    Room,
    needed_bytes,
    room,
    slot_bytes,
    weight_bytes,
)
from dragoman.server.models.version import Cause, Refused
from dragoman.server.workers.engines import EnginePlan, engine_settings

MIB = 2**20
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    4096 kB\nBuffers: 1 kB\n"
MACHINE = Room(4 * MIB, "of the machine is free")
V1 = "5:cpuset:/\n4:memory,other:{}\n0::/\n"
STAT = f"anon {MIB}\ninactive_file {MIB // 2}\nslab_reclaimable {MIB // 4}\nactive_file {MIB}"
STAT_1 = f"inactive_file 0\ntotal_inactive_file {MIB // 2}"
UNLIMITED = {"system.slice/dragoman.service/memory.max": "max"}


def group(limit: object, used: object = 0, stat: str = "anon 5", folder: str = "") -> dict[str, object]:
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": stat}


def group_1(limit: int, folder: str = "") -> dict[str, object]:
    names = {"limit_in_bytes": limit, "usage_in_bytes": 2 * MIB, "stat": STAT_1}
    return {f"memory/{folder}memory.{name}": value for name, value in names.items()}


AROUND = group(2 * MIB, MIB, folder="system.slice/") | UNLIMITED


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", group("max"), None),
        ("0::/\n", group("much"), None),
        ("0::/\n", group(3 * MIB, 2 * MIB, STAT), MIB + MIB // 2 + MIB // 4),
        ("0::/\n", group(100, 300), -200),
        ("1:name=systemd:/x\n0::/system.slice/dragoman.service\n", AROUND, MIB),
        ("0::/system.slice/gone:with a colon\n", AROUND, MIB),
        ("0::/user.slice\n", AROUND, None),
        ("0::/../system.slice\n", AROUND, None),
        ("", AROUND, None),
        ("0\n", AROUND, None),
        (V1.format("/kubepods/pod1"), group_1(3 * MIB, "kubepods/"), MIB + MIB // 2),
        (V1.format("/outside/of/what/is/seen"), group_1(3 * MIB), MIB + MIB // 2),
        (V1.format("/"), group_1(2**63 - 4096), None),
    ],
)
def test_free_memory_is_that_of_the_machine_or_what_the_container_has_left(
    tmp_path: Path, own: str, files: dict[str, object], left: int | None
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "own").write_text(own)
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{content}\n")
    found = room(tmp_path / "groups", tmp_path / "own", tmp_path / "meminfo")
    assert found == (MACHINE if left is None else Room(left, "of the container's limit is left"))
    assert room(*[tmp_path / "none"] * 3).num_bytes > MIB < room().num_bytes


def test_memory_needed_is_that_of_weights_caches_and_processes(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(tiny_bundle)
    (settings,) = engine_settings(load({"models": tiny_bundle, "weights_cache": "off"}), bundle, EnginePlan(1, ((),)))
    settings = replace(settings, max_slots=10)
    files = {path.name: path.stat().st_size for path in tiny_bundle.iterdir() if path.suffix in (".onnx", ".weights")}
    scorers = sum(size for name, size in files.items() if name.endswith(".weights"))
    assert weight_bytes(bundle) == sum(files.values()) and bundle.manifest.num_weight_bytes == scorers
    packed = int(sum(files.values()) * 1.25)
    one = needed_bytes(bundle, settings, 1)
    assert slot_bytes(bundle) > 0 and one == packed + scorers + PROCESS_BYTES + 10 * slot_bytes(bundle)
    assert needed_bytes(bundle, settings, 2) == 2 * one
    shared: Any = replace(settings, device=replace(settings.device, weights_cache="somewhere"))
    assert needed_bytes(bundle, shared, 2) == packed + 2 * (PROCESS_BYTES + 10 * slot_bytes(bundle))
    for slots, num_bytes in ((10, 10 * one), (10, one - 1), (10_000, 2**31), (10, -1)):
        count = memory.max_engines(bundle, slots, num_bytes)
        assert count == 0 or needed_bytes(bundle, replace(shared, max_slots=slots), count) <= num_bytes
        assert needed_bytes(bundle, replace(shared, max_slots=slots), 4 * (count + 1)) > num_bytes, (
            "at least a quarter of what fits"
        )
    growth = needed_bytes(bundle, replace(settings, max_slots=20), 1) - one
    for slots, measured, expected in (
        (10, Measured(50 * MIB, one, 1), int(50 * MIB * MARGIN)),
        (10, Measured(50 * MIB, one + 1000, 1), int(50 * MIB * MARGIN)),
        (10, Measured(2**40, one, 1), one),
        (10, Measured(50 * MIB, one, 2), one),  # of another number of replicas
        (20, Measured(50 * MIB, one, 1), int((50 * MIB + growth) * MARGIN)),
    ):
        assert needed_bytes(bundle, replace(settings, max_slots=slots), 1, measured) == expected
    monkeypatch.setattr(memory, "MAX_COPY_BYTES", scorers)
    assert needed_bytes(bundle, settings, 1) == one
    monkeypatch.setattr(memory, "MAX_COPY_BYTES", scorers - 1)
    assert needed_bytes(bundle, settings, 1) == one - scorers, "the scorer of a large bundle has no copy"


@pytest.mark.parametrize(
    ("precision", "caches", "num_bytes"),
    [
        ("int8", [("self", None)], 2 * 5 * 3 * 4),
        ("int8", [("self", "int8")], 2 * 5 * 3),
        ("fp16", [("self", None), ("cross", None)], 2 * (5 + 7) * 3 * 2),
    ],
)
def test_bytes_of_a_slot(precision: str, caches: list[tuple[str, str | None]], num_bytes: int) -> None:
    rows = [SimpleNamespace(role=role, precision=own, row_shape=lambda length: (2, length, 3)) for role, own in caches]
    manifest = SimpleNamespace(precision=precision, max_target_tokens=5, max_source_tokens=7, caches=rows)
    bundle: Any = SimpleNamespace(manifest=manifest)
    assert slot_bytes(bundle) == num_bytes


# Eviction: the order, the limits in time, and the reason of a refusal.


@dataclass
class Memory:
    """Memory with a bound, its models, and a clock that moves a step at each reading."""

    bound: int = 100
    room: int = 10**6
    step: float = 0.1
    now: float = 1000.0
    models: dict[str, Candidate] = field(default_factory=dict)
    leaves_after: dict[str, float] = field(default_factory=dict)
    evicted_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        measure: Callable[[], Room] = lambda: Room(self.room * MIB, "of the machine is free")  # noqa: E731
        self.placement = Placement(self.candidates, self.evict, bound_bytes=self.bound * MIB, measure_room=measure, clock=self.tick)

    def tick(self) -> float:
        self.now += self.step
        return self.now

    def add(self, name: str, size: int, num_held: int = 0, used: float = 0.0, leaves_after: float = 0.0, **fields: Any) -> None:
        usual = {"may_leave": True, "awake_since": 0.0} | fields
        self.models[name] = Candidate(name, size * MIB, num_held=num_held, warm_until=used, **usual)
        self.leaves_after[name] = leaves_after

    def candidates(self) -> list[Candidate]:
        for name, at in self.evicted_at.items():
            if self.now >= at + self.leaves_after[name]:
                self.models.pop(name, None)
        leaving = {"is_leaving": True, "may_leave": False}
        return [dataclasses.replace(one, **leaving) if one.name in self.evicted_at else one for one in self.models.values()]

    def evict(self, name: str) -> None:
        assert self.models[name].may_leave and not self.models[name].is_busy and name not in self.evicted_at
        self.evicted_at[name] = self.now

    def make_room(self, size: int, is_wanted: Callable[[], bool] = lambda: True) -> list[str]:
        """Return the models that were unloaded, in order."""
        there = list(self.models)
        asyncio.run(self.placement.make_room("new", size * MIB, is_wanted))
        gone = [name for name in there if name not in self.models]
        return sorted(gone, key=lambda name: self.evicted_at[name] + self.leaves_after[name])


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
        (
            Memory(),
            [("kept", 70, {"may_leave": False})],
            40,
            "it may take 40 MiB, and 30 MiB of 100 MiB (models_memory_gib) is left",
        ),
        (Memory(), [("a", 60, {})], 101, "it may take 101 MiB, and 40 MiB of 100 MiB (models_memory_gib) is left"),
        (
            Memory(),
            [("b", 60, {"is_busy": True}), ("a", 30, {"is_busy": True})],
            40,
            "it may take 40 MiB, and 10 MiB of 100 MiB (models_memory_gib) is left; in use: a, b",
        ),
        (Memory(bound=0, room=30), [], 40, "it may take 40 MiB, and 30 MiB of the machine is free"),
    ],
)
def test_refusal_says_what_is_missing(
    memory: Memory, models: list[tuple[str, int, dict[str, Any]]], size: int, reason: str
) -> None:
    for name, taken, fields in models:
        memory.add(name, taken, **fields)
    with pytest.raises(Refused) as refusal:
        memory.make_room(size)
    assert (refusal.value.cause, refusal.value.reason) == (Cause.MEMORY, reason)
    assert not memory.evicted_at
    assert 0 <= memory.now - 1000 <= 31


def test_at_the_start_only_the_bound_counts() -> None:
    Memory(bound=0, room=30).placement.check(40 * MIB, is_start=True)
    memory = Memory()
    memory.add("a", 70, may_leave=False)
    memory.placement.check(30 * MIB, is_start=True)
    with pytest.raises(Refused):
        memory.placement.check(40 * MIB, is_start=True)


@pytest.mark.parametrize(("num_held", "stays"), [(0, MIN_STAY_SECONDS), (1, MIN_BUSY_STAY_SECONDS)])
def test_model_that_was_just_loaded_stays_a_while(num_held: int, stays: float) -> None:
    memory = Memory(step=0.01)
    memory.add("a", 80, num_held=num_held, awake_since=memory.now)
    assert memory.make_room(40) == ["a"] and stays <= memory.evicted_at["a"] - 1000.0 < stays + 0.1


def test_another_model_is_asked_while_one_takes_long_to_leave() -> None:
    memory = Memory()
    memory.add("slow", 50, used=1.0, leaves_after=25.0)
    memory.add("quick", 50, used=2.0)
    assert memory.make_room(40) == ["quick"]
    assert LEAVE_SECONDS <= memory.evicted_at["quick"] - memory.evicted_at["slow"] < LEAVE_SECONDS + 1


def test_no_model_leaves_for_one_that_is_not_waited_for() -> None:
    memory = Memory()
    memory.add("a", 80)
    with pytest.raises(NotWanted):
        memory.make_room(40, lambda: False)
    assert not memory.evicted_at
