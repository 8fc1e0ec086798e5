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
from dragoman.server.repository import memory
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
    folder.mkdir(parents=True)
    for name, text in (("memory.max", limit), ("memory.current", current), ("memory.stat", stat)):
        (folder / name).write_text(text.rstrip() + "\n")
    return folder


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path / "meminfo"


def look(cgroups: Path, meminfo: Path, own: str = "0::/\n") -> Room:
    (meminfo.parent / "own").write_text(own)
    return room(cgroups, meminfo.parent / "own", meminfo)


def test_the_machine_is_the_limit_where_no_group_is(tmp_path: Path, meminfo: Path) -> None:
    machine = Room(4 * MIB, "of the machine is free")
    assert look(tmp_path / "none", meminfo) == machine
    assert look(group(tmp_path / "unlimited", "max"), meminfo) == machine
    assert look(group(tmp_path / "odd", "much"), meminfo) == machine


def test_a_container_may_have_less_and_files_that_can_be_read_again_do_not_count(tmp_path: Path, meminfo: Path) -> None:
    stat = f"anon {MIB}\ninactive_file {MIB // 2}\nslab_reclaimable {MIB // 4}\nactive_file {MIB}\n"
    folder = group(tmp_path / "group", str(3 * MIB), str(2 * MIB), stat)
    assert look(folder, meminfo) == Room(MIB + MIB // 2 + MIB // 4, "of the container's limit is left")


def test_the_limit_of_a_group_around_ones_own_holds_too(tmp_path: Path, meminfo: Path) -> None:
    """As of a service, whose group is not the root of what it sees."""
    around = group(tmp_path / "groups/system.slice", str(2 * MIB), str(MIB))
    group(around / "dragoman.service", "max")
    left = Room(MIB, "of the container's limit is left")
    assert look(tmp_path / "groups", meminfo, "1:name=systemd:/x\n0::/system.slice/dragoman.service\n") == left
    assert look(tmp_path / "groups", meminfo, "0::/system.slice/gone:with a colon\n") == left
    for elsewhere in ("0::/user.slice\n", "0::/../system.slice\n", "", "0\n"):
        assert look(tmp_path / "groups", meminfo, elsewhere).num_bytes == 4 * MIB


@pytest.mark.parametrize("path", ["/kubepods/pod1", "/outside/of/what/is/seen"])
def test_groups_of_the_first_version_have_limits_too(tmp_path: Path, meminfo: Path, path: str) -> None:
    """A container may see its group as the root, and be told the path that it has outside."""
    seen = tmp_path / "groups/memory" / ("kubepods" if path.startswith("/kubepods") else "")
    seen.mkdir(parents=True)
    files = {"limit_in_bytes": 3 * MIB, "usage_in_bytes": 2 * MIB, "stat": f"inactive_file 0\ntotal_inactive_file {MIB // 2}"}
    for name, content in files.items():
        (seen / f"memory.{name}").write_text(f"{content}\n")
    own = f"5:cpuset:/\n4:memory,other:{path}\n0::/\n"
    assert look(tmp_path / "groups", meminfo, own) == Room(MIB + MIB // 2, "of the container's limit is left")
    (seen / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert look(tmp_path / "groups", meminfo, own).num_bytes == 4 * MIB, "that is what no limit looks like"


def test_a_container_over_its_limit_has_nothing(tmp_path: Path, meminfo: Path) -> None:
    assert look(group(tmp_path / "group", "100", "300"), meminfo).num_bytes == -200


def test_a_kernel_that_says_nothing_leaves_the_whole_machine(tmp_path: Path) -> None:
    assert room(*[tmp_path / "none"] * 3).num_bytes > MIB
    assert room().num_bytes > MIB


@pytest.fixture
def settings(tiny_bundle: Path) -> EngineSettings:
    (settings,) = engine_settings(
        load({"models": tiny_bundle, "weights_cache": "off"}), Bundle.open(tiny_bundle), EnginePlan(1, ((),))
    )
    return replace(settings, max_slots=10)


def test_what_is_needed_is_weights_caches_and_processes(
    tiny_bundle: Path, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(tiny_bundle)
    files = {path.name: path.stat().st_size for path in tiny_bundle.iterdir() if path.suffix in (".onnx", ".weights")}
    assert weight_bytes(bundle) == sum(files.values())
    caches = bundle.manifest.caches
    assert slot_bytes(bundle) > 0 and len(caches) > 0
    packed = int(weight_bytes(bundle) * WEIGHTS_FACTOR)
    scorers = bundle.manifest.num_weight_bytes
    assert scorers == sum(size for name, size in files.items() if name.endswith(".weights"))
    one = needed_bytes(bundle, settings, 1)
    assert one == packed + scorers + PROCESS_BYTES + 10 * slot_bytes(bundle)
    assert needed_bytes(bundle, settings, 2) == 2 * one
    shared: Any = replace(settings, device=replace(settings.device, weights_cache="somewhere"))
    assert needed_bytes(bundle, shared, 2) == packed + 2 * (PROCESS_BYTES + 10 * slot_bytes(bundle))
    monkeypatch.setattr(memory, "MAX_COPY_BYTES", scorers - 1)
    assert needed_bytes(bundle, settings, 1) == one - scorers, "a large bundle's scorer has no copy"


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
