"""The RPC at hand: what the access log and the metrics say about it when it has ended."""

import time
from asyncio import Task
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import CallSpan


@dataclass(slots=True, eq=False)
class Call:
    """One RPC, filled in on its way.

    Attributes:
        method: Full name, `/package.Service/Method`.
        task: The asyncio task that serves it.
        request_id: The caller's or ours; empty until it is known.
        arrival: `time.monotonic()` when it came.
        model: Name of the model, once that is known to be loaded.
        source_tokens: Tokens of its source.
        generated_tokens: Tokens generated for it.
        is_ended_by_server: Whether the server cancelled it to shut down.
        code: Name of the gRPC status it ended with; empty until then. Its answer may still be on the way.
        refusal: Why it was turned away before any work; see `ServiceError`.
        span: What traces it; None if nothing does.
    """

    method: str
    task: Task[Any]
    request_id: str = ""
    arrival: float = field(default_factory=time.monotonic)
    model: str = ""
    source_tokens: int = 0
    generated_tokens: int = 0
    is_ended_by_server: bool = False
    code: str = ""
    refusal: str = ""
    span: "CallSpan | None" = None


# Set for each RPC in its own task, so it is as private as an argument; gRPC leaves no other way from interceptor to servicer.
current_call: ContextVar[Call] = ContextVar("current_call")
