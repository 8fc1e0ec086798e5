"""The call at hand: what the access log, the metrics and the trace say about it when it has ended."""

import asyncio
import time
from asyncio import Task
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dragoman.server.engine.messages import ANYBODY, Share

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import CallSpan


@dataclass(slots=True, eq=False)
class Call:
    """One call of whichever face, or one request of a batch; filled in on its way.

    Attributes:
        method: Full name, `/package.Service/Method`.
        task: The asyncio task that serves it.
        is_counted: Whether the metrics know of it: it is there to generate or to score.
        is_awaited: Whether a drain waits for it.
        request_id: The caller's or ours; empty until it is known.
        share: Whose it is, as engines are told.
        arrival: `time.monotonic()` when it came.
        model: Name of the model, once that is known to be loaded.
        source_tokens: Tokens of its source.
        generated_tokens: Tokens generated for it.
        count_answer: Counts its answer once that is sure to be given; None while there is none.
        is_ended_by_server: Whether the server cancelled it to shut down.
        code: Name of the status it ended with; empty until then. Its answer may still be on the way.
        refusal: Why it was turned away before any work; see `ServiceError`.
        span: What traces it; None if nothing does.
    """

    method: str
    task: Task[Any]
    is_counted: bool = True
    is_awaited: bool = True
    request_id: str = ""
    share: Share = ANYBODY
    arrival: float = field(default_factory=time.monotonic)
    model: str = ""
    source_tokens: int = 0
    generated_tokens: int = 0
    count_answer: Callable[[], None] | None = None
    is_ended_by_server: bool = False
    code: str = ""
    refusal: str = ""
    span: "CallSpan | None" = None

    @classmethod
    def begin(cls, method: str, *, is_counted: bool = True, is_awaited: bool = True) -> "Call":
        """Return the record of a call that comes now and is served by the task that runs."""
        task = asyncio.current_task()
        assert task is not None
        return cls(method, task, is_counted, is_awaited)
