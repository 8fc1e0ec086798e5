"""Messages between the parent and a frontend worker: length-prefixed MessagePack over pipes."""

import asyncio

import msgspec
from msgspec import Struct

from dragoman.server.engine.settings import EngineSettings
from dragoman.server.models.model_file import Sticky, Traits
from dragoman.server.models.use import Outcomes
from dragoman.server.service.administration import Listing, Operator, Order
from dragoman.server.telemetry.series import Series

_LENGTH_BYTES = 4


class VersionAddress(Struct, frozen=True, array_like=True):
    """A version of a model that requests can use."""

    endpoint: str  # ZeroMQ address of its dispatcher, never reused; without a listener while the version is asleep
    label: str
    bundle: str  # directory with a copy of its manifest and tokenizers
    settings: EngineSettings  # settings of the first engine; the others differ in their cores
    num_replicas: int
    is_ready: bool
    was_ready: bool = False  # whether an engine has ever been ready
    traits: Traits = Traits()
    is_asleep: bool = False  # whether the version is unloaded, and loaded on demand
    device: str = ""  # last device; only while the version is asleep


class ModelRoute(Struct, frozen=True, array_like=True):
    """Versions that answer a model's requests, see `Route`; `default` is an endpoint."""

    name: str
    default: str
    versions: list[VersionAddress]
    shares: dict[str, float]
    labels: dict[str, str]
    sticky: Sticky
    is_stand_in: bool = False


class Routes(Struct, frozen=True, array_like=True, tag="routes"):
    """Route later requests by these routes."""

    serial: int  # increasing number of the message
    models: list[ModelRoute]
    kept: list[str] = []  # endpoints of all versions that may get requests again

    @property
    def endpoints(self) -> set[str]:
        """Endpoints of all versions."""
        return {version.endpoint for model in self.models for version in model.versions}


class Start(Struct, frozen=True, array_like=True, tag="start"):
    """First message to a worker."""

    number: int  # number of the worker, from 0
    identity: str  # identity of the process at dispatchers, never reused
    port: int
    http_port: int  # 0 where HTTP is off
    config: str  # JSON
    files: dict[str, bytes]  # contents by setting
    routes: Routes
    folder: str  # folder of the dispatchers' sockets; a worker that outlives the parent removes it
    table: int  # file descriptor of the shared counters
    version: str


class Files(Struct, frozen=True, array_like=True, tag="files"):
    """New contents of files, by setting."""

    contents: dict[str, bytes]


class LoadFailed(Struct, frozen=True, array_like=True, tag="load_failed"):
    """Fail the requests that wait for a model: it cannot be loaded now."""

    model: str
    reason: str
    retry_after_seconds: float


class AdminResponse(Struct, frozen=True, array_like=True, tag="admin_response"):
    """Response to an `AdminRequest`."""

    number: int
    listing: Listing | None  # None if the request failed
    error: str = ""  # class name in `server.errors`; empty for an unexpected error
    message: str = ""
    retry_after_seconds: float | None = None


class CollectMetrics(Struct, frozen=True, array_like=True, tag="collect_metrics"):
    """Request for a `MetricsReport`."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Reject new requests, let the others finish within some seconds, and exit."""

    seconds: float


ToWorker = Start | Files | Routes | LoadFailed | AdminResponse | CollectMetrics | Drain


class State(Struct, frozen=True, array_like=True, tag="state"):
    """State of a worker, sent on change and every second as a heartbeat."""

    is_listening: bool = False
    is_ready: bool = False  # whether requests are accepted, and `ready_when` is met


class MetricsReport(Struct, frozen=True, array_like=True, tag="metrics"):
    """Metrics of a worker since its start: periodic, in answer to each `CollectMetrics`, and as its last message."""

    series: Series
    is_requested: bool = False


class RoutesTaken(Struct, frozen=True, array_like=True, tag="routes_taken"):
    """Confirmation of `Routes`; with a problem, the routes before stay in use."""

    serial: int
    problem: str = ""


class UsageReport(Struct, frozen=True, array_like=True, tag="usage"):
    """Use of versions since the last such message, by endpoint."""

    outcomes: dict[str, Outcomes]
    held: dict[str, tuple[int, float]] = {}  # requests that hold the version, and `Use.warm_until`


class AwaitedModels(Struct, frozen=True, array_like=True, tag="awaited"):
    """Names of all unloaded models that requests of the worker wait for."""

    models: list[str]


class Released(Struct, frozen=True, array_like=True, tag="released"):
    """No request holds a version any more that the last `Routes` did not contain."""

    endpoint: str


class AdminRequest(Struct, frozen=True, array_like=True, tag="admin_request"):
    """Request of an operator authenticated by the worker, answered by an `AdminResponse` of the same number."""

    number: int
    operator: Operator
    order: Order


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot start, with a reason of one line; its process exits."""

    reason: str


FromWorker = State | MetricsReport | RoutesTaken | UsageReport | AwaitedModels | Released | AdminRequest | Failed


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next encoded message; None at the end."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def to_bytes(message: ToWorker | FromWorker) -> bytes:
    """Encode a message with its length."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
