"""Memory needed and available for models; eviction when it is short."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from dragoman.export.bundle import Bundle
from dragoman.export.fields import MAX_COPY_BYTES, Precision
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.models.version import Cause, Refused

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


# Once it is loaded a model is not asked to give way for so long: those who waited for it are to be answered, wherever they are.
MIN_STAY_SECONDS = 1.0
# The same of a model that requests hold; where all are in use they take turns.
MIN_BUSY_STAY_SECONDS = 5.0
# So long somebody who leaves is waited for before another is asked, too: a request may hold it for longer.
LEAVE_SECONDS = 2.0
# Between two looks at whether somebody has become free.
LOOK_SECONDS = 0.1
MIB = 2**20


class NotWanted(Exception):
    """Nobody waits any more for what was to be loaded."""


@dataclass(frozen=True, slots=True)
class Stay:
    """A loaded model that may be asked to give way.

    Attributes:
        num_held: Requests that hold it.
        warm_until: How recently, and how often lately, one did; see `server.models.use`.
        awake_since: When it was loaded.
        is_busy: Whether it cannot be asked now: it is being changed, or waited for.
    """

    num_held: int
    warm_until: float
    awake_since: float
    is_busy: bool = False

    @property
    def may_leave_at(self) -> float:
        """When it can be asked, unless it is busy."""
        return self.awake_since + (MIN_BUSY_STAY_SECONDS if self.num_held else MIN_STAY_SECONDS)


class Tenant(Protocol):
    """A model, as far as memory goes."""

    name: str

    @property
    def is_leaving(self) -> bool:
        """Whether memory of it is about to become free."""
        ...

    def memory_bytes(self) -> int:
        """Return what its engines take, or may come to take."""
        ...

    def stay(self) -> Stay | None:
        """Return how it is used; None if it is not loaded, or is never unloaded."""
        ...

    def give_way(self) -> None:
        """Have it fall asleep as soon as it can."""
        ...


class Placement:
    """See above.

    Attributes:
        keep_seconds: How long models stay loaded without a request that say nothing of it themselves; infinite for always.
        bound_bytes: What all engines together may take; 0 for what the container or the machine has.
        wait_seconds: How long others' leaving is waited for.
    """

    def __init__(
        self,
        tenants: Callable[[], Iterable[Tenant]] = tuple,
        *,
        keep_seconds: float = math.inf,
        bound_bytes: int = 0,
        wait_seconds: float = 30.0,
        measure_room: Callable[[], Room] = room,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the memory.

        Args:
            tenants: Returns all models.
            keep_seconds: See the attributes, as the next two.
            bound_bytes: See the attributes.
            wait_seconds: See the attributes.
            measure_room: Returns what the container or the machine has.
            clock: In seconds.
        """
        self.keep_seconds, self.bound_bytes, self.wait_seconds = keep_seconds, bound_bytes, wait_seconds
        self._tenants, self._measure_room, self._clock = tenants, measure_room, clock
        self._news = asyncio.Event()
        self._asked_at = -math.inf

    @property
    def taken_bytes(self) -> int:
        """What all engines together take, or may come to take."""
        return sum(tenant.memory_bytes() for tenant in self._tenants())

    def note(self) -> None:
        """Take note that something may have become free, or be wanted no more."""
        self._news.set()

    def check(self, needed_bytes: int, *, is_start: bool = False) -> None:
        """Do nothing if there is memory for engines.

        Args:
            needed_bytes: That they may take.
            is_start: Whether many are loaded at once: then only the bound tells, for what is free does not yet.

        Raises:
            Refused: If there is not.
        """
        rooms = [] if is_start else [self._measure_room()]
        if self.bound_bytes:
            free = max(0, self.bound_bytes - self.taken_bytes)
            rooms.append(Room(free, f"of {self.bound_bytes / MIB:.0f} MiB (models_memory_gib) is left"))
        for there in rooms:
            if needed_bytes > there.num_bytes:
                raise Refused(Cause.MEMORY, f"it may take {_mib(needed_bytes)}, and {_mib(there.num_bytes)} {there.limit}")

    async def make_room(self, name: str, needed_bytes: int, is_wanted: Callable[[], bool]) -> None:
        """Have models give way, the least used of late first, until there is memory; the caller has the turn to load.

        Args:
            name: Of the model that is to be loaded, which does not give way to itself.
            needed_bytes: That it may take.
            is_wanted: Returns whether it is still to be.

        Raises:
            Refused: If there is not, and nobody gives way in time.
            NotWanted: If it is not to be loaded any more.
        """
        self._asked_at = began = self._clock()
        until = began + self.wait_seconds
        while True:
            if not is_wanted():
                raise NotWanted
            try:
                self.check(needed_bytes)
            except Refused as refused:
                if self.bound_bytes and needed_bytes > self.bound_bytes:  # however many give way
                    raise
                await self._one_gives_way(name, refused, until)
            else:
                return

    async def _one_gives_way(self, name: str, refused: Refused, until: float) -> None:
        """Ask the next one, unless one is leaving already, and wait for news. Those in use come last."""
        now = self._clock()
        others = [tenant for tenant in self._tenants() if tenant.name != name]
        is_leaving = any(tenant.is_leaving for tenant in others)
        stays = [(stay, tenant) for tenant in others if (stay := tenant.stay()) is not None]
        if not (is_leaving or stays):
            raise refused
        if now >= until:
            names = ", ".join(sorted(tenant.name for _, tenant in stays))
            raise Refused(Cause.MEMORY, f"{refused.reason}; in use: {names}" if names else refused.reason)
        if not is_leaving or now >= self._asked_at + LEAVE_SECONDS:
            able = [(bool(stay.num_held), stay.warm_until, stay, tenant) for stay, tenant in stays if not stay.is_busy]
            for _, _, stay, tenant in sorted(able, key=lambda one: one[:2])[:1]:
                if stay.may_leave_at <= now:  # who has just come is waited for, not passed over
                    self._asked_at = now
                    tenant.give_way()
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._news.wait()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"
