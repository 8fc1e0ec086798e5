"""Whether there is memory for another version, by what the kernel says and a bundle's manifest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.export.bundle import Bundle
from dragoman.server.config import load
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings
from dragoman.server.repository.memory import (
    MARGIN,
    PROCESS_BYTES,
    WEIGHTS_FACTOR,
    Measured,
    Room,
    needed_bytes,
    room,
    slot_bytes,
    weight_bytes,
)

MIB = 2**20
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    4096 kB\nBuffers: 1 kB\n"


def group(folder: Path, limit: str, current: str = "0", stat: str = "anon 5\ninactive_file 0\n") -> Path:
    folder.mkdir()
    for name, text in (("memory.max", limit), ("memory.current", current), ("memory.stat", stat)):
        (folder / name).write_text(text.rstrip() + "\n")
    return folder


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path / "meminfo"


def test_the_machine_is_the_limit_where_no_group_is(tmp_path: Path, meminfo: Path) -> None:
    machine = Room(4 * MIB, "of the machine is free")
    assert room(tmp_path / "none", meminfo) == machine
    assert room(group(tmp_path / "unlimited", "max"), meminfo) == machine
    assert room(group(tmp_path / "odd", "much"), meminfo) == machine


def test_a_container_may_have_less_and_files_that_can_be_read_again_do_not_count(tmp_path: Path, meminfo: Path) -> None:
    stat = f"anon {MIB}\ninactive_file {MIB // 2}\nslab_reclaimable {MIB // 4}\nactive_file {MIB}\n"
    folder = group(tmp_path / "group", str(3 * MIB), str(2 * MIB), stat)
    assert room(folder, meminfo) == Room(MIB + MIB // 2 + MIB // 4, "of the container's limit is left")


def test_a_container_over_its_limit_has_nothing(tmp_path: Path, meminfo: Path) -> None:
    assert room(group(tmp_path / "group", "100", "300"), meminfo).num_bytes == -200


def test_a_kernel_that_says_nothing_leaves_the_whole_machine(tmp_path: Path) -> None:
    assert room(tmp_path / "none", tmp_path / "none").num_bytes > MIB
    assert room().num_bytes > MIB


@pytest.fixture
def settings(tiny_bundle: Path) -> EngineSettings:
    (settings,) = engine_settings(
        load({"models": tiny_bundle, "weights_cache": "off"}), Bundle.open(tiny_bundle), EnginePlan(1, ((),))
    )
    return replace(settings, max_slots=10)


def test_what_is_needed_is_weights_caches_and_processes(tiny_bundle: Path, settings: EngineSettings) -> None:
    bundle = Bundle.open(tiny_bundle)
    files = {path.name: path.stat().st_size for path in tiny_bundle.iterdir() if path.suffix in (".onnx", ".weights")}
    assert weight_bytes(bundle) == sum(files.values())
    caches = bundle.manifest.caches
    assert slot_bytes(bundle) > 0 and len(caches) > 0
    packed = weight_bytes(bundle) * WEIGHTS_FACTOR
    one = needed_bytes(bundle, settings, 1)
    assert one == int(packed) + PROCESS_BYTES + 10 * slot_bytes(bundle)
    assert needed_bytes(bundle, settings, 2) == int(2 * packed) + 2 * (PROCESS_BYTES + 10 * slot_bytes(bundle))
    shared: Any = replace(settings, device=replace(settings.device, weights_cache="somewhere"))
    assert needed_bytes(bundle, shared, 2) == int(packed) + 2 * (PROCESS_BYTES + 10 * slot_bytes(bundle))


def test_what_another_version_has_taken_tells_more_than_a_bound(tiny_bundle: Path, settings: EngineSettings) -> None:
    bundle = Bundle.open(tiny_bundle)
    bound = needed_bytes(bundle, settings, 1)
    assert needed_bytes(bundle, settings, 1, Measured(50 * MIB, bound, 1)) == int(50 * MIB * MARGIN)
    assert needed_bytes(bundle, settings, 1, Measured(50 * MIB, bound + 1000, 1)) == int(50 * MIB * MARGIN), "that was larger"
    assert needed_bytes(bundle, settings, 1, Measured(2**40, bound, 1)) == bound, "no more than the most"
    assert needed_bytes(bundle, settings, 1, Measured(50 * MIB, bound, 2)) == bound, "of another number of engines"
    more = replace(settings, max_slots=20)
    growth = needed_bytes(bundle, more, 1) - bound
    assert needed_bytes(bundle, more, 1, Measured(50 * MIB, bound, 1)) == int((50 * MIB + growth) * MARGIN), "so many more slots"


def test_caches_of_an_int8_model_are_as_their_manifest_says() -> None:
    def cache(precision: str | None) -> Any:
        return SimpleNamespace(role="self", precision=precision, row_shape=lambda length: (2, length, 3))

    def bundle(precision: str, *caches: Any) -> Any:
        manifest = {"precision": precision, "max_target_tokens": 5, "max_source_tokens": 7, "caches": caches}
        return SimpleNamespace(manifest=SimpleNamespace(**manifest))

    assert slot_bytes(bundle("int8", cache(None))) == 2 * 5 * 3 * 4
    assert slot_bytes(bundle("int8", cache("int8"))) == 2 * 5 * 3
    assert slot_bytes(bundle("fp16", cache(None), cache(None))) == 2 * (2 * 5 * 3 * 2)
