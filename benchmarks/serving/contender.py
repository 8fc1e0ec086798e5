"""A server that takes part in the benchmark `serving`: Dragoman, or a peer in an environment of its own."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.load import Load, Record
from benchmarks.harness.served import ServedModel
from benchmarks.peers.sender import Order, run
from benchmarks.peers.server import KINDS, Kind, PeerServer, Settings
from benchmarks.serving.goodput import Point, rate_of, summarise

DRAGOMAN = "dragoman"
NAMES = (DRAGOMAN, *(kind.name for kind in KINDS))


@dataclass(frozen=True, slots=True)
class Models:
    """The same weights for everyone.

    Attributes:
        name: Of the model.
        bundle: Dragoman's.
        ctranslate2: Folder with the peers' and the tokeniser.
        precision: `fp32` or `int8`.
    """

    name: str
    bundle: Path
    ctranslate2: Path
    precision: str


@dataclass(frozen=True, slots=True)
class Contender:
    """One server, stopped.

    Attributes:
        kind: Of peer; None for Dragoman.
        models: See there.
        environments: Folder of the peers' environments.
        flags: Of `dragoman serve`, for Dragoman.
    """

    kind: Kind | None
    models: Models
    environments: Path
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name, one of `NAMES`."""
        return self.kind.name if self.kind else DRAGOMAN

    @property
    def face(self) -> str:
        """Key of `FACES`."""
        return self.kind.face if self.kind else DRAGOMAN

    def start(self, settings: Settings | None, sample: str) -> AbstractContextManager[ServedModel | PeerServer]:
        """Return the server, started on entering; a peer needs settings, and has to translate the sample."""
        if not self.kind:
            return ServedModel(self.models.bundle, *self.flags)
        assert settings is not None
        return PeerServer(self.kind, self.environments, self.models.ctranslate2, self.models.precision, settings, sample)

    def describe(self, settings: Settings | None) -> str:
        """Say what it runs with."""
        return str(settings) if settings else " ".join(self.flags) or "defaults"


def missing(name: str, environments: Path) -> str | None:
    """Return the command that installs what a contender lacks here, or None if it can take part."""
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None:
        return None
    if not kind.python(environments).exists():
        return f"benchmarks/peers/setup.sh {environments} {name}"
    needed = {"ctranslate2", {"http": "aiohttp", "triton": "grpc_tools"}[kind.face]}
    return None if all(map(find_spec, needed)) else "pip install '.[cpu,dev,benchmark]'"


@dataclass(frozen=True, slots=True)
class Gauge:
    """What is sent to a started server, the same to each.

    Attributes:
        texts: Sources.
        seconds: How long a rate is measured.
        warm_seconds: How long a server is warmed up, and its unloaded latency measured.
    """

    texts: Sequence[str]
    seconds: float
    warm_seconds: float

    def warm_up(self, face: str, address: str) -> None:
        """Send some requests at once."""
        self._send(face, Load(address, [*self.texts], 1, self.warm_seconds, concurrency=8))

    def unloaded_seconds(self, face: str, address: str) -> float:
        """Return the median latency of requests that come one after the other.

        Raises:
            RuntimeError: If one fails.
        """
        outcomes = self._send(face, Load(address, [*self.texts], 1, 2 * self.warm_seconds, concurrency=1)).outcomes
        if failed := [outcome.code for outcome in outcomes if outcome.code != "OK"]:
            raise RuntimeError(f"a request to {address} without any other ended with {failed[0]}")
        latencies = sorted(outcome.ended - outcome.due for outcome in outcomes)
        return latencies[len(latencies) // 2]

    def point(self, face: str, address: str, rung: int, objective: float, round_number: int) -> Point:
        """Measure one rate; arrivals and the order of the texts depend on the rate and the round only."""
        load = Load(address, [*self.texts], 1, self.seconds, rate=rate_of(rung), seed=1000 * round_number + rung)
        return summarise(rung, self.seconds, objective, self._send(face, load))

    def _send(self, face: str, load: Load) -> Record:
        return run(Order(face, load))
