"""Memory that is free, by what the kernel says, and memory that a version needs, by its manifest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.export.bundle import Bundle
from dragoman.server.config import load
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings
from dragoman.server.repository import memory
from dragoman.server.repository.memory import MARGIN, PROCESS_BYTES, Measured, Room, needed_bytes, room, slot_bytes, weight_bytes

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
