"""What crosses between a front end and the process that started it: MessagePack, each with its length before it, over pipes."""

import asyncio

import msgspec
from msgspec import Struct

from dragoman.server.engine.settings import EngineSettings
from dragoman.server.models.model_file import Sticky
from dragoman.server.service.administration import Listing, Operator, Order
from dragoman.server.service.ports import Traits
from dragoman.server.telemetry.series import Series

_LENGTH_BYTES = 4


class Desk(Struct, frozen=True, array_like=True):
    """A version of a model that is served, and where.

    Attributes:
        endpoint: ZeroMQ address of its desk; no two that ever were have the same.
        label: What its folder calls the version.
        bundle: Directory with a copy of its bundle's manifest and tokenisers.
        settings: What its engines are started with, but for what is theirs alone.
        num_replicas: Engines behind the desk.
        is_ready: Whether one of them is ready.
        was_ready: Whether one of them was ready at any time.
        traits: What the model has of its own.
        is_asleep: Whether there is no desk: the version is loaded when the model is awaited.
        device: What it has run on; only of one that is asleep.
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


class Served(Struct, frozen=True, array_like=True):
    """How the requests for one model are answered, see `server.models.registry.Route`.

    Attributes:
        name: Of the model.
        default: Endpoint of the default version's desk.
        desks: Of all versions that requests can get.
        shares: By version.
        labels: Versions by their labels.
        sticky: What of a request decides which share it is in.
        is_stand_in: Whether nobody answers for now.
    """

    name: str
    default: str
    desks: list[Desk]
    shares: dict[str, float]
    labels: dict[str, str]
    sticky: Sticky
    is_stand_in: bool = False


class Start(Struct, frozen=True, array_like=True, tag="start"):
    """What a front end is to be; the first message to it.

    Attributes:
        number: Which one it is, from 0.
        identity: What it calls itself at desks; no two that ever were have the same.
        port: To listen on.
        http_port: To answer HTTP on, where the settings say so.
        config: The settings, as JSON.
        files: What is in the files that settings name, by setting.
        models: All that is served.
        folder: Where desks' sockets are; what ends last of the two removes it.
        table: Descriptor of what callers have used.
        version: Of the server.
    """

    number: int
    identity: str
    port: int
    http_port: int
    config: str
    files: dict[str, bytes]
    models: "Serve"
    folder: str
    table: int
    version: str


class Files(Struct, frozen=True, array_like=True, tag="files"):
    """Files have changed; what is in them now, by setting."""

    contents: dict[str, bytes]


class Serve(Struct, frozen=True, array_like=True, tag="serve"):
    """Have requests that come from now on be answered so.

    Attributes:
        serial: Which such message it is; they count up.
        models: All of them.
        kept: Endpoints of all desks that requests may be sent to again, beside those that they are sent to now.
    """

    serial: int
    models: list[Served]
    kept: list[str] = []


class NotLoaded(Struct, frozen=True, array_like=True, tag="not_loaded"):
    """A model that is awaited cannot be loaded now.

    Attributes:
        model: Its name.
        reason: Why not.
        retry_after_seconds: When to try again.
    """

    model: str
    reason: str
    retry_after_seconds: float


class Collect(Struct, frozen=True, array_like=True, tag="collect"):
    """Say what you have counted."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Take no new work, finish what runs, and end.

    Attributes:
        seconds: How long that may take.
    """

    seconds: float


class CarriedOut(Struct, frozen=True, array_like=True, tag="carried_out"):
    """What has become of an order.

    Attributes:
        number: Of the order.
        listing: What its operator is told; None if it was not carried out.
        error: Name of the error that says why not, one of `server.errors`; empty for one that nobody foresaw.
        message: Of the error.
        retry_after_seconds: Of the error.
    """

    number: int
    listing: Listing | None
    error: str = ""
    message: str = ""
    retry_after_seconds: float | None = None


ToFrontEnd = Start | Files | Serve | NotLoaded | CarriedOut | Collect | Drain


class State(Struct, frozen=True, array_like=True, tag="state"):
    """How a front end is, told when that changes and, as a sign of life, once a second.

    Attributes:
        is_listening: Whether it answers.
        is_ready: Whether it takes requests, and as many of its models as `ready_when` asks for.
    """

    is_listening: bool = False
    is_ready: bool = False


class Counted(Struct, frozen=True, array_like=True, tag="counted"):
    """What a front end has counted since it was started: now and then, in answer to each `Collect`, and as its last word.

    Attributes:
        series: What it has.
        is_asked: Whether it answers a `Collect`; these are answered in order.
    """

    series: Series
    is_asked: bool = False


class Serving(Struct, frozen=True, array_like=True, tag="serving"):
    """Requests are answered as a `Serve` has said, or as before.

    Attributes:
        serial: Of the message.
        problem: Why they are answered as before; empty where they are not.
    """

    serial: int
    problem: str = ""


class Used(Struct, frozen=True, array_like=True, tag="used"):
    """What became of requests since the last such message, see `server.models.use.Outcomes`.

    Attributes:
        outcomes: Of each version of which there were any, by the endpoint of its desk.
        held: Of each version that was used since then, by the same: requests that hold it, and `Use.warm_until`.
    """

    outcomes: dict[str, tuple[int, int, float]]
    held: dict[str, tuple[int, float]] = {}


class Awaited(Struct, frozen=True, array_like=True, tag="awaited"):
    """Requests here wait for models that are asleep, and for no others any more.

    Attributes:
        models: Their names.
    """

    models: list[str]


class Released(Struct, frozen=True, array_like=True, tag="released"):
    """No request here holds a version any more that no other can get.

    Attributes:
        endpoint: Of its desk.
    """

    endpoint: str


class Ordered(Struct, frozen=True, array_like=True, tag="ordered"):
    """An operator, whom the front end knows, asks for something; `CarriedOut` answers.

    Attributes:
        number: Which order of the front end it is.
        operator: Who asks.
        order: For what.
    """

    number: int
    operator: Operator
    order: Order


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """It cannot start; the process exits.

    Attributes:
        reason: One line for the operator.
    """

    reason: str


FromFrontEnd = State | Counted | Serving | Used | Awaited | Released | Ordered | Failed


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message, not decoded yet; None at the end."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def to_bytes(message: ToFrontEnd | FromFrontEnd) -> bytes:
    """Return a message as it is written."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
