"""The call at hand: what the access log, the metrics and the trace say about it when it has ended."""

import asyncio
import time
from asyncio import Task
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dragoman.server.core.callers import Caller
from dragoman.server.engine.messages import ANYBODY, Share
from dragoman.server.errors import ServiceError
from dragoman.server.service.in_flight import Window

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import CallSpan


@dataclass(slots=True, eq=False)
class Call:
    """One call of whichever face, or one request of a batch; filled in on its way.

    Attributes:
        method: Full name, `/package.Service/Method`.
        task: The asyncio task that serves it.
        is_counted: Whether the metrics know of it: it is there to generate or to score.
        has_items: Whether it is a stream of requests, each of which has a record of its own.
        is_awaited: Whether a drain waits for it.
        request_id: The caller's or ours; empty until it is known.
        caller: Whose it is; None while nobody is known, or nobody asks.
        share: Whose it is, as engines are told.
        arrival: `time.monotonic()` when it came.
        is_entered: Whether its caller's limits have let it in, and are to be told when it ends.
        not_entered: Why they have not; for a request of a batch, which is told so when it is looked at.
        deadline_limit: Name and seconds of the server's limit that its deadline comes from; empty if the caller set it.
        model: Name of the model, once that is known to be loaded.
        source_tokens: Tokens of its source.
        generated_tokens: Tokens generated for it.
        count_answer: Counts its answer once that is sure to be given; None while there is none.
        is_ended_by_server: Whether the server cancelled it to shut down.
        has_begun_items: Whether a request of its stream or message has been let in or refused.
        code: Name of the status it ended with; empty until then. Its answer may still be on the way.
        refusal: Why it was turned away before any work; see `ServiceError`.
        span: What traces it; None if nothing does.
        window: Its in-flight window, if it is large or has several requests.
    """

    method: str
    task: Task[Any]
    is_counted: bool = True
    has_items: bool = False
    is_awaited: bool = True
    request_id: str = ""
    caller: Caller | None = None
    share: Share = ANYBODY
    arrival: float = field(default_factory=time.monotonic)
    is_entered: bool = False
    not_entered: ServiceError | None = None
    deadline_limit: str = ""
    model: str = ""
    source_tokens: int = 0
    generated_tokens: int = 0
    count_answer: Callable[[], None] | None = None
    is_ended_by_server: bool = False
    has_begun_items: bool = False
    code: str = ""
    refusal: str = ""
    span: "CallSpan | None" = None
    window: Window | None = None

    @classmethod
    def begin(cls, method: str, *, is_counted: bool = True, has_items: bool = False, is_awaited: bool = True) -> "Call":
        """Return the record of a call that comes now and is served by the task that runs."""
        task = asyncio.current_task()
        assert task is not None
        return cls(method, task, is_counted, has_items, is_awaited)

    def caller_or(self, address: str) -> str:
        """Return the name of its caller or, where callers are not known, an address."""
        return address if self.caller is None else self.caller.name

    def enter(self, caller: Caller, *, is_counted: bool = True) -> None:
        """Have its caller's limits let it in; see `Caller.enter`.

        Raises:
            LimitReached: If one does not.
            Unauthenticated: If the caller may not call any more.
        """
        self.caller = caller
        if self.has_items:
            caller.enter_stream()
        else:
            caller.enter(is_counted=is_counted)
        self.is_entered = True
        self.share = caller.share

    def leave(self) -> None:
        """Tell its caller's limits, which have let it in, that it has ended."""
        assert self.caller is not None and self.is_entered
        self.is_entered = False
        if self.has_items:
            self.caller.leave_stream()
        else:
            self.caller.leave(self.generated_tokens)
