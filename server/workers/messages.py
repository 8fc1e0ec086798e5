"""Messages between the parent and a frontend worker: MessagePack over pipes, each with its length before it."""

import asyncio

import msgspec
from msgspec import Struct

from dragoman.server.engine.settings import EngineSettings
from dragoman.server.models.model_file import Sticky, Traits
from dragoman.server.service.administration import Listing, Operator, Order
from dragoman.server.telemetry.series import Series

_LENGTH_BYTES = 4


class VersionAddress(Struct, frozen=True, array_like=True):
    """A version of a model that requests can get.

    Attributes:
        endpoint: ZeroMQ address of its dispatcher, never used for another version; nothing listens there while it is asleep.
        label: Name of the version's folder.
        bundle: Directory with a copy of its manifest and tokenisers.
        settings: Of its engines, but for those that differ between them.
        num_replicas: Engines.
        is_ready: Whether an engine is ready.
        was_ready: Whether an engine has ever been ready.
        traits: Settings of the model alone.
        is_asleep: Whether the version is not loaded, and loaded on demand.
        device: Device that it has run on; only while it is asleep.
    """

    endpoint: str
    label: str
    bundle: str
    settings: EngineSettings
    num_replicas: int
    is_ready: bool
    was_ready: bool = False
    traits: Traits = Traits()
    is_asleep: bool = False
    device: str = ""


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
    """Answer later requests by these routes.

    Attributes:
        serial: Number of the message; they count up.
        models: Routes of all models.
        kept: Endpoints of all versions that may get requests again.
    """

    serial: int
    models: list[ModelRoute]
    kept: list[str] = []

    @property
    def endpoints(self) -> set[str]:
        """Endpoints of all versions."""
        return {version.endpoint for model in self.models for version in model.versions}


class Start(Struct, frozen=True, array_like=True, tag="start"):
    """First message to a worker.

    Attributes:
        number: Of the worker, from 0.
        identity: Of the process at dispatchers, never used again.
        port: Port of gRPC.
        http_port: Port of HTTP, where it is on.
        config: The settings, as JSON.
        files: Contents of files, by the setting that names the file.
        routes: Of all models.
        folder: Of the dispatchers' sockets; a worker that outlives the parent removes it.
        table: Descriptor of the shared counters.
        version: Of the server.
    """

    number: int
    identity: str
    port: int
    http_port: int
    config: str
    files: dict[str, bytes]
    routes: Routes
    folder: str
    table: int
    version: str


class Files(Struct, frozen=True, array_like=True, tag="files"):
    """Files have changed; their contents by setting."""

    contents: dict[str, bytes]


class LoadFailed(Struct, frozen=True, array_like=True, tag="load_failed"):
    """A model that requests wait for cannot be loaded now."""

    model: str
    reason: str
    retry_after_seconds: float


class AdminResponse(Struct, frozen=True, array_like=True, tag="admin_response"):
    """Outcome of an `AdminRequest`.

    Attributes:
        number: Of the request.
        listing: Answer to the operator; None if the request failed.
        error: Class name of the error, one of `server.errors`; empty for an unexpected one.
        message: Of the error.
        retry_after_seconds: Of the error.
    """

    number: int
    listing: Listing | None
    error: str = ""
    message: str = ""
    retry_after_seconds: float | None = None


class CollectMetrics(Struct, frozen=True, array_like=True, tag="collect_metrics"):
    """Send `MetricsReport`."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Take no new requests, finish the others within some seconds, and end."""

    seconds: float


ToWorker = Start | Files | Routes | LoadFailed | AdminResponse | CollectMetrics | Drain


class State(Struct, frozen=True, array_like=True, tag="state"):
    """State of a worker, sent when it changes and, as a sign of life, once a second.

    Attributes:
        is_listening: Whether the worker answers.
        is_ready: Whether it takes requests, and as many of its models as `ready_when` asks for.
    """

    is_listening: bool = False
    is_ready: bool = False


class MetricsReport(Struct, frozen=True, array_like=True, tag="metrics"):
    """Metrics of a worker since its start: now and then, in answer to each `CollectMetrics`, and as its last message."""

    series: Series
    is_requested: bool = False


class RoutesTaken(Struct, frozen=True, array_like=True, tag="routes_taken"):
    """Requests are answered by the `Routes` of a serial number, or by those before because of a problem."""

    serial: int
    problem: str = ""


class UsageReport(Struct, frozen=True, array_like=True, tag="usage"):
    """Use of versions since the last such message, by endpoint.

    Attributes:
        outcomes: Fields of `Outcomes`.
        held: Requests that hold the version, and `Use.warm_until`.
    """

    outcomes: dict[str, tuple[int, int, float]]
    held: dict[str, tuple[int, float]] = {}


class AwaitedModels(Struct, frozen=True, array_like=True, tag="awaited"):
    """Names of all models that requests of the worker wait for to be loaded."""

    models: list[str]


class Released(Struct, frozen=True, array_like=True, tag="released"):
    """No request holds a version any more that the last `Routes` did not have."""

    endpoint: str


class AdminRequest(Struct, frozen=True, array_like=True, tag="admin_request"):
    """An operator, authenticated by the worker, asks for a change; answered by an `AdminResponse` of the same number."""

    number: int
    operator: Operator
    order: Order


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot start, for a reason of one line; its process exits."""

    reason: str


FromWorker = State | MetricsReport | RoutesTaken | UsageReport | AwaitedModels | Released | AdminRequest | Failed


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message, not decoded yet; None at the end."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def to_bytes(message: ToWorker | FromWorker) -> bytes:
    """Return a message as it is written."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
