"""GenerateBatch: many requests on one stream, each served as Generate serves it, answered when it is done, and failing alone.

A stream has a bounded number of requests in hand: those read whose answers are not written yet. It is not read further meanwhile,
so a caller who sends faster than the models answer, or reads slower than they do, is held back by gRPC's own flow control and
costs no memory. What the bound does not cover is the ids seen, of which a stream may have `MAX_REQUESTS`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from structlog.contextvars import bind_contextvars, unbind_contextvars

from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.core.endings import RETRY_SECONDS
from dragoman.server.core.ids import check_request_id
from dragoman.server.errors import InvalidRequest, Unavailable
from dragoman.server.faces.grpc import errors
from dragoman.server.faces.grpc.interceptors import Context, Unreadable, cancellation_code, current_call
from dragoman.v1 import generation_pb2

# Requests in hand for each slot of the largest model: one that decodes and one that is ready to take its place.
REQUESTS_PER_SLOT = 2
MAX_REQUESTS = 1_000_000

Message: TypeAlias = generation_pb2.GenerateRequest | Unreadable
Generate: TypeAlias = "Callable[[generation_pb2.GenerateRequest, Context], Awaitable[generation_pb2.GenerateResponse]]"


class Batch:
    """One stream of requests."""

    def __init__(self, generate: Generate, core: Core, context: Context) -> None:
        """Start without requests, inside the RPC's task.

        Args:
            generate: What answers one request; `current_call` is that request's when it is called.
            core: Whose models answer, and whose calls these are.
            context: Of the RPC.
        """
        self._generate = generate
        self._records = core.calls.records
        self._draining = core.calls.draining
        self._context = context
        self._rpc = current_call.get()
        self._ids: set[str] = set()
        self._writing = asyncio.Lock()  # gRPC sends one message at a time
        slots = max((model.max_slots for model in core.models.all()), default=1)
        self._places = asyncio.Semaphore(REQUESTS_PER_SLOT * slots)

    async def serve(self, requests: AsyncIterator[Message]) -> None:
        """Answer what comes until the caller has sent everything, or the server drains: then what was read is answered.

        Cancelling this cancels every request that runs.

        Raises:
            Unavailable: If the server drains before the caller has sent everything; what has no answer was not looked at.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(requests, tasks))
                watching = tasks.create_task(_cancel_when(self._draining, reading))
                reading.add_done_callback(lambda _: watching.cancel())
        except BaseExceptionGroup as group:
            # Of a request nothing gets this far but that its answer could not be written: the caller is gone.
            raise group.exceptions[0] from None
        if reading.cancelled():
            raise Unavailable("the server is shutting down", retry_after_seconds=RETRY_SECONDS)

    async def _read(self, requests: AsyncIterator[Message], tasks: asyncio.TaskGroup) -> None:
        """Start each request; the next is read when there is a place for it."""
        await self._places.acquire()
        async for request in requests:
            tasks.create_task(self._answer(request))
            await self._places.acquire()

    async def _answer(self, request: Message) -> None:
        """Serve one request and write what became of it."""
        call = Call.begin(self._rpc.method)
        current_call.set(call)
        unbind_contextvars("request_id")
        bind_contextvars(batch_id=self._rpc.request_id)
        self._records.begin_item(call, self._rpc)
        response = generation_pb2.GenerateBatchResponse(request_id=getattr(request, "request_id", ""))
        try:
            response.response.CopyFrom(await self._serve(request, call))
        except asyncio.CancelledError:
            is_ours = self._rpc.is_ended_by_server
            self._finish(call, Unavailable.code if is_ours else cancellation_code(self._context, self._rpc.arrival))
            raise
        except Exception as error:
            fault = self._records.fault(error)
            response.error.CopyFrom(errors.to_message(fault, call.request_id))
            call.refusal = fault.refusal
            self._finish(call, fault.code)
        else:
            self._finish(call, "OK")
        async with self._writing:
            await self._context.write(response)
        self._places.release()

    async def _serve(self, request: Message, call: Call) -> generation_pb2.GenerateResponse:
        """Return the answer to one request, whose id is checked first.

        Raises:
            ServiceError: As `Generate` does; for a request that cannot be read; for an id that is missing, unfit or not new.
        """
        if isinstance(request, Unreadable):
            raise InvalidRequest("request", "cannot be parsed; is every string UTF-8?")
        call.request_id = check_request_id("request_id", request.request_id)
        bind_contextvars(request_id=call.request_id)
        if not call.request_id:
            raise InvalidRequest("request_id", "is missing; each request of a batch needs one")
        if call.request_id in self._ids:
            raise InvalidRequest("request_id", "was used on this stream before")
        if len(self._ids) == MAX_REQUESTS:
            raise InvalidRequest("request_id", f"is one too many: a stream takes {MAX_REQUESTS}; open another")
        self._ids.add(call.request_id)
        return await self._generate(request, self._context)

    def _finish(self, call: Call, code: str) -> None:
        """Write a request's record; its tokens count for the RPC's too."""
        self._rpc.source_tokens += call.source_tokens
        self._rpc.generated_tokens += call.generated_tokens
        self._records.finish(call, code, event="item")


async def _cancel_when(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Cancel a task when an event is set."""
    await event.wait()
    task.cancel()
