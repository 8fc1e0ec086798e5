"""Memory for models: estimates, free memory, and eviction of idle models.

Loads are serialized (`VersionLoader.turn`). A loaded model counts with its estimate, or its resident memory if that is more.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dragoman.export.bundle import Bundle
from dragoman.export.fields import MAX_COPY_BYTES, Precision
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.models.version import Cause, Refused

# Resident memory of an engine process without a model.
PROCESS_BYTES = 120 * 2**20
# Memory for each byte of weights, with prepacked weights and intermediate results.
WEIGHTS_FACTOR = 1.25
ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "int8": 1, "fp16": 2, "bf16": 2}
# Free memory for each engine that is started without being asked for, most of it for caches.
MEMORY_PER_ENGINE = 4 * PROCESS_BYTES
# Safety factor on the measured memory of another version of the model.
MARGIN = 1.25
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


class _Names(NamedTuple):
    """File names of a cgroup version, and lines of `memory.stat`."""

    folder: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]


VERSION_1 = _Names("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",))
VERSION_2 = _Names("", "memory.max", "memory.current", ("inactive_file", "slab_reclaimable"))


@dataclass(frozen=True, slots=True)
class Room:
    """Free memory, and a description of its limit."""

    num_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured memory of another version of the same model."""

    num_bytes: int  # resident memory of all its engines
    most_bytes: int  # upper bound by `needed_bytes`
    num_replicas: int


def needed_bytes(bundle: Bundle, settings: EngineSettings, num_replicas: int, measured: Measured | None = None) -> int:
    """Return an upper estimate of the CPU memory of a version's engines: weights, caches of all slots, processes.

    `measured` of another version lowers the estimate, since caches seldom hold the longest texts in all slots. Engines that share
    weights count them once, without a copy for the scorer.
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


def max_engines(bundle: Bundle, max_slots: int, num_bytes: int) -> int:
    """Return how many engines that share weights may be started in some memory without being asked for; 0 if it is not even one."""
    per_engine = max(MEMORY_PER_ENGINE, PROCESS_BYTES + max_slots * slot_bytes(bundle))
    return max(0, num_bytes - int(weight_bytes(bundle) * WEIGHTS_FACTOR)) // per_engine


def weight_bytes(bundle: Bundle) -> int:
    """Return the size of a bundle's graphs and weights."""
    return sum(entry.size for path, entry in bundle.manifest.files.items() if path.endswith((".weights", ".onnx")))


def slot_bytes(bundle: Bundle) -> int:
    """Return the size of a slot's caches for the longest source and answer."""
    manifest = bundle.manifest
    usual: Precision = "fp32" if manifest.precision == "int8" else manifest.precision
    lengths = {"self": manifest.max_target_tokens, "cross": manifest.max_source_tokens}
    return sum(math.prod(cache.row_shape(lengths[cache.role])) * ITEM_BYTES[cache.precision or usual] for cache in manifest.caches)


def room(cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS, meminfo: Path = MEMINFO) -> Room:
    """Return the free memory of the container or the machine, whichever is less."""
    rooms = [Room(_available(meminfo), "of the machine is free")]
    for folder, names in _groups(cgroups, own_cgroups):
        try:
            limit = (folder / names.limit).read_text(encoding="ascii").strip()
            if limit != "max":
                used = int((folder / names.used).read_text(encoding="ascii")) - _reclaimable(folder / "memory.stat", names)
                rooms.append(Room(int(limit) - used, "of the container's limit is left"))
        except (OSError, ValueError):  # the root cgroup has no limit, and a kernel may lack cgroups
            pass
    return min(rooms, key=lambda one: one.num_bytes)


def _groups(cgroups: Path, own_cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield this process's cgroups and their parents, v1 and v2; a container may see its own cgroup as the root."""
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
    lines = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
    return sum(int(value) for name, value in lines if name in names.reclaimable)


# Minimum time between load and eviction, so that the requests that waited for the model are answered, in all frontends.
MIN_STAY_SECONDS = 1.0
# The same for a model that requests hold; where all models are in use they take turns.
MIN_BUSY_STAY_SECONDS = 5.0
# Time for an evicted model to end before another is evicted too: a request may hold it for longer.
LEAVE_SECONDS = 2.0
# Poll interval while waiting for free memory.
POLL_SECONDS = 0.1
MIB = 2**20


class NotWanted(Exception):
    """No request waits any more for the model that was to be loaded."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model as seen by eviction."""

    name: str
    memory_bytes: int = 0  # memory that its engines have, or may come to have
    is_leaving: bool = False  # whether some of its memory is about to become free
    may_leave: bool = False  # whether it is loaded and can be unloaded at all
    is_busy: bool = False  # whether it cannot be evicted now: it is changing, or requests wait for it
    num_held: int = 0  # requests that hold it
    warm_until: float = 0.0  # recency and frequency of use; see `together`
    awake_since: float = 0.0  # time of its load

    @property
    def may_leave_at(self) -> float:
        """Earliest time of its eviction."""
        return self.awake_since + (MIN_BUSY_STAY_SECONDS if self.num_held else MIN_STAY_SECONDS)


class Placement:
    """Memory that models share, within `bound_bytes` for all engines; 0 for the memory of the container or the machine."""

    def __init__(
        self,
        candidates: Callable[[], Iterable[Candidate]] = tuple,
        evict: Callable[[str], None] = lambda name: None,
        *,
        keep_seconds: float = math.inf,
        bound_bytes: int = 0,
        wait_seconds: float = 30.0,
        measure_room: Callable[[], Room] = room,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the memory; `candidates` returns all models, `evict` unloads a model by name as soon as possible."""
        self.keep_seconds, self.bound_bytes, self.wait_seconds = keep_seconds, bound_bytes, wait_seconds
        self._candidates, self._evict, self._measure_room, self._clock = candidates, evict, measure_room, clock
        self._news = asyncio.Event()
        self._evicted_at = -math.inf

    def note(self) -> None:
        """Signal that memory may have become free, or is no longer wanted."""
        self._news.set()

    @property
    def free_bytes(self) -> int:
        """Memory for another model without unloading one."""
        return min(one.num_bytes for one in self._rooms(is_start=False))

    def check(self, needed_bytes: int, *, is_start: bool = False) -> None:
        """Raise `Refused` unless there is memory; at server start only the bound counts, as many models load at once."""
        for there in self._rooms(is_start=is_start):
            if needed_bytes > there.num_bytes:
                raise Refused(Cause.MEMORY, f"it may take {_mib(needed_bytes)}, and {_mib(there.num_bytes)} {there.limit}")

    def _rooms(self, *, is_start: bool) -> list[Room]:
        rooms = [] if is_start else [self._measure_room()]
        if self.bound_bytes:
            free = max(0, self.bound_bytes - sum(one.memory_bytes for one in self._candidates()))
            rooms.append(Room(free, f"of {self.bound_bytes / MIB:.0f} MiB (models_memory_gib) is left"))
        return rooms

    async def make_room(self, name: str, needed_bytes: int, is_wanted: Callable[[], bool]) -> None:
        """Evict models, the least recently and frequently used first, until there is memory; the caller holds `VersionLoader.turn`.

        Raises:
            Refused: If there is not enough memory within `wait_seconds`.
            NotWanted: If the load is no longer wanted.
        """
        self._evicted_at = began = self._clock()
        while True:
            if not is_wanted():
                raise NotWanted
            try:
                self.check(needed_bytes)
                return
            except Refused as refused:
                if self.bound_bytes and needed_bytes > self.bound_bytes:  # no eviction is enough
                    raise
                self._evict_next(name, refused, began + self.wait_seconds)
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._news.wait()

    def _evict_next(self, name: str, refused: Refused, until: float) -> None:
        """Evict the next model unless one is leaving already; models in use come last."""
        now = self._clock()
        others = [one for one in self._candidates() if one.name != name]
        is_leaving, able = any(one.is_leaving for one in others), [one for one in others if one.may_leave]
        if not (is_leaving or able):
            raise refused
        if now >= until:
            names = ", ".join(sorted(one.name for one in able))
            raise Refused(Cause.MEMORY, f"{refused.reason}; in use: {names}" if names else refused.reason)
        if is_leaving and now < self._evicted_at + LEAVE_SECONDS:
            return
        free = [one for one in able if not one.is_busy]
        first = min(free, key=lambda one: (bool(one.num_held), one.warm_until), default=None)
        if first is not None and first.may_leave_at <= now:  # a model that was just loaded is waited for, not skipped
            self._evicted_at = now
            self._evict(first.name)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"
