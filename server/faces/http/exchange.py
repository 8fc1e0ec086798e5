"""One request over HTTP, on its way to its answer."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from dragoman.server.core.calls import Call
from dragoman.server.errors import ServiceError
from dragoman.server.faces.http.events import EventStream


@dataclass(slots=True)
class Exchange:
    """See above.

    Attributes:
        http: The request as it came.
        call: Its record.
        message: What its body says, as the endpoint reads it.
        timeout_seconds: How long it may take, by its caller; None where that was not said.
        events: What is sent instead of one answer, once something is.
        is_operator: Whether whose it is may administer.
    """

    http: web.Request
    call: Call
    message: Any
    timeout_seconds: float | None = None
    events: EventStream | None = field(default=None)
    is_operator: bool = False

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the caller's deadline; None if there is none."""
        return None if self.timeout_seconds is None else self.timeout_seconds - (time.monotonic() - self.call.arrival)

    def stream(self) -> EventStream:
        """Return what sends events; whatever goes wrong from now on is told as the last of them, if any was sent."""
        self.events = EventStream(self.http, self.call)
        return self.events


class Manner(Protocol):
    """How a protocol that HTTP carries says what went wrong."""

    def refuse(self, error: ServiceError, request_id: str) -> web.Response:
        """Return the answer to a request that has none."""
        ...

    def error_event(self, error: ServiceError, request_id: str) -> tuple[str, str]:
        """Return name and data of the event that ends a stream which has begun."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and a path, and what is behind them.

    Attributes:
        method: `GET` or `POST`.
        path: As aiohttp has it, with parts in braces.
        answer: Answers.
        read: Makes a message of a body; None where there is none. What it raises is told to the caller.
        is_counted: Whether the metrics know of it: it is there to generate or to score.
        is_awaited: Whether a drain waits for it.
        is_open: Whether anybody may ask; who is known all the same is the caller.
        has_items: Whether it stands for several requests, each of which has a record of its own.
        key_of: Returns the caller's token where a body says it; empty for none. A header's goes first.
    """

    method: str
    path: str
    answer: Callable[[Exchange], Awaitable[web.StreamResponse]]
    read: Callable[[web.Request, bytes], Awaitable[Any]] | None = None
    is_counted: bool = False
    is_awaited: bool = True
    is_open: bool = False
    has_items: bool = False
    key_of: Callable[[Any], str] | None = None
