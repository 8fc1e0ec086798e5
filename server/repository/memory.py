"""Whether there is memory for another version, reckoned before anything of it is loaded."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dragoman.export.bundle import Bundle
from dragoman.export.fields import MAX_COPY_BYTES, Precision
from dragoman.server.engine.settings import EngineSettings

# A process of ours that has loaded ONNX Runtime and no model.
PROCESS_BYTES = 120 * 2**20
# What graphs take for each byte of their weights: the order that these are put into, and what is computed with.
WEIGHTS_FACTOR = 1.25
ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "int8": 1, "fp16": 2, "bf16": 2}
# A version may need so many times what another one of the model has taken.
MARGIN = 1.25
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


class _Names(NamedTuple):
    """What a version of control groups calls its files, and lines of `memory.stat`."""

    folder: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]


VERSION_1 = _Names("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",))
VERSION_2 = _Names("", "memory.max", "memory.current", ("inactive_file", "slab_reclaimable"))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that could be taken, and what says so.

    Attributes:
        num_bytes: How much.
        limit: What of it is the limit, in words.
    """

    num_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engines of another version of the same model have taken.

    Attributes:
        num_bytes: Resident, all of them together.
        most_bytes: What they could have taken at the most, as `needed_bytes` reckons it.
        num_replicas: Engines.
    """

    num_bytes: int
    most_bytes: int
    num_replicas: int


def needed_bytes(bundle: Bundle, settings: EngineSettings, num_replicas: int, measured: Measured | None = None) -> int:
    """Return about how much memory a version's engines take on the CPU at the most: weights, caches of all slots, processes.

    Args:
        bundle: Of the version.
        settings: Of an engine; those that share weights have them once, and without a copy for the scorer.
        num_replicas: Engines.
        measured: Of a version that has served; caches seldom hold the longest texts in all slots, and this tells what they do hold.
            What this one may take beyond what that one might have taken comes on top of it.
    """
    weights = int(weight_bytes(bundle) * WEIGHTS_FACTOR)
    if not settings.device.weights_cache:
        scorers = bundle.manifest.num_weight_bytes
        weights = num_replicas * (weights + (scorers if scorers <= MAX_COPY_BYTES else 0))
    bound = weights + num_replicas * (PROCESS_BYTES + settings.max_slots * slot_bytes(bundle))
    if measured is None or measured.num_replicas != num_replicas:
        return bound
    growth = max(0, bound - measured.most_bytes)
    return min(bound, int((measured.num_bytes + growth) * MARGIN))


def weight_bytes(bundle: Bundle) -> int:
    """Return how large a bundle's graphs and weights are."""
    return sum(entry.size for path, entry in bundle.manifest.files.items() if path.endswith((".weights", ".onnx")))


def slot_bytes(bundle: Bundle) -> int:
    """Return what a slot's caches take when source and answer are the longest that they can be."""
    manifest = bundle.manifest
    usual: Precision = "fp32" if manifest.precision == "int8" else manifest.precision
    lengths = {"self": manifest.max_target_tokens, "cross": manifest.max_source_tokens}
    return sum(math.prod(cache.row_shape(lengths[cache.role])) * ITEM_BYTES[cache.precision or usual] for cache in manifest.caches)


def room(cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS, meminfo: Path = MEMINFO) -> Room:
    """Return how much memory can be taken: what the container may, or what the machine has, whichever is less.

    Args:
        cgroups: Where control groups lie.
        own_cgroups: Tells which of them are this process's.
        meminfo: Tells what the machine has.
    """
    rooms = [Room(_available(meminfo), "of the machine is free")]
    for folder, names in _groups(cgroups, own_cgroups):
        try:
            limit = (folder / names.limit).read_text(encoding="ascii").strip()
            if limit != "max":
                used = int((folder / names.used).read_text(encoding="ascii")) - _reclaimable(folder / "memory.stat", names)
                rooms.append(Room(int(limit) - used, "of the container's limit is left"))
        except (OSError, ValueError):  # the root of all groups has no limit, and a kernel may have no groups
            pass
    return min(rooms, key=lambda one: one.num_bytes)


def _groups(cgroups: Path, own_cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the groups of which the limits hold for this process: its own, and those that this is in, in either version.

    A container may see its own group as the root of all, whatever its path is called outside.
    """
    paths = {VERSION_1: PurePosixPath("/"), VERSION_2: PurePosixPath("/")}
    with suppress(OSError):
        for line in own_cgroups.read_text(encoding="utf-8", errors="replace").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, place = rest.partition(":")
            if number == "0" or "memory" in controllers.split(","):
                paths[VERSION_2 if number == "0" else VERSION_1] = PurePosixPath(place)
    for names, path in paths.items():
        root = cgroups / names.folder
        inside = PurePosixPath("/") if ".." in path.parts else path
        for group in (inside, *inside.parents):
            yield root.joinpath(*group.parts[1:]), names


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _reclaimable(stat: Path, names: _Names) -> int:
    """Return what of a group's memory is the content of files that the kernel would give up first."""
    lines = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
    return sum(int(value) for name, value in lines if name in names.reclaimable)
