"""What crosses between a front end and the process that started it: MessagePack, each with its length before it, over pipes."""

import asyncio

import msgspec
from msgspec import Struct

from dragoman.server.telemetry.series import Series

_LENGTH_BYTES = 4


class Desk(Struct, frozen=True, array_like=True):
    """A model that is served, and where.

    Attributes:
        bundle: Its directory.
        version: Of the bundle, as the engines have it.
        endpoint: ZeroMQ address of its desk.
        num_replicas: Engines behind it.
        is_ready: Whether one of them is ready.
        was_ready: Whether one of them was ready at any time.
        digest: SHA-256 of the bundle's manifest, as the engines have it; empty for any.
    """

    bundle: str
    version: str
    endpoint: str
    num_replicas: int
    is_ready: bool
    was_ready: bool = False
    digest: str = ""


class Start(Struct, frozen=True, array_like=True, tag="start"):
    """What a front end is to be; the first message to it.

    Attributes:
        number: Which one it is, from 0.
        identity: What it calls itself at desks; no two that ever were have the same.
        port: To listen on.
        config: The settings, as JSON.
        files: What is in the files that settings name, by setting.
        desks: The models.
        table: Descriptor of what callers have used.
        version: Of the server.
    """

    number: int
    identity: str
    port: int
    config: str
    files: dict[str, bytes]
    desks: list[Desk]
    table: int
    version: str


class Files(Struct, frozen=True, array_like=True, tag="files"):
    """Files have changed; what is in them now, by setting."""

    contents: dict[str, bytes]


class Collect(Struct, frozen=True, array_like=True, tag="collect"):
    """Say what you have counted."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Take no new work, finish what runs, and end.

    Attributes:
        seconds: How long that may take.
    """

    seconds: float


ToFrontEnd = Start | Files | Collect | Drain


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


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """It cannot start; the process exits.

    Attributes:
        reason: One line for the operator.
    """

    reason: str


FromFrontEnd = State | Counted | Failed


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
