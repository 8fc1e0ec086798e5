"""GenerateBatch: many requests on one stream, each served as Generate serves it, answered when it is done, and failing alone.

A stream has a bounded number of requests and of bytes in hand (`hand.py`): requests read whose answers are not written yet. It is
not read further meanwhile, so a caller who sends faster than the models answer, or reads slower than they do, is held back by
gRPC's own flow control. Of an answer that waits to be taken nothing is kept but its bytes.

An id that is unfit is never sent back. Every answer says which message of its stream it answers, from 0.
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
from dragoman.server.faces.grpc.hand import Hand, RecentIds
from dragoman.server.faces.grpc.interceptors import Context, cancellation_code, current_call
from dragoman.server.faces.grpc.reading import Refused, Turns, large_bytes_read
from dragoman.v1 import generation_pb2

# Requests in hand for each slot of the largest model: one that decodes and one that is ready to take its place.
REQUESTS_PER_SLOT = 2

Message: TypeAlias = generation_pb2.GenerateRequest | Refused
Generate: TypeAlias = "Callable[[generation_pb2.GenerateRequest, Context, generation_pb2.GenerateResponse], Awaitable[None]]"


def requests_per_stream(core: Core) -> int:
    """Return how many requests a stream may have in hand."""
    return REQUESTS_PER_SLOT * max((model.max_slots for model in core.models.all()), default=1)


class Batch:
    """One stream of requests."""

    def __init__(self, generate: Generate, core: Core, context: Context, hand: Hand, turns: Turns) -> None:
        """Start without requests, inside the RPC's task.

        Args:
            generate: What writes the answer to one request into a message; `current_call` is that request's when it is called.
            core: Whose models answer, and whose calls these are.
            context: Of the RPC.
            hand: What the stream has in hand.
            turns: Of the connection's streams, at reading.
        """
        self._generate = generate
        self._records = core.calls.records
        self._draining = core.calls.draining
        self._context = context
        self._hand = hand
        self._turns = turns
        self._rpc = current_call.get()
        self._ids = RecentIds()
        self._num_read = 0
        self._writing = asyncio.Lock()  # gRPC sends one message at a time

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
        arrivals = aiter(requests)
        while True:
            await self._hand.room()
            try:
                # The first one may be large for all we know.
                is_in_turn = large_bytes_read.get() or not self._num_read
                request = await (self._turns.take(anext(arrivals)) if is_in_turn else anext(arrivals))
            except StopAsyncIteration:
                return
            self._hand.read(request.ByteSize())
            await self._hand.turn()
            tasks.create_task(self._answer(request, self._num_read))
            self._num_read += 1
            del request  # or it would be kept until the next one comes

    async def _answer(self, request: Message, index: int) -> None:
        """Serve one request, the number of which on its stream is given, and write what became of it."""
        call = Call.begin(self._rpc.method)
        current_call.set(call)
        unbind_contextvars("request_id")
        bind_contextvars(batch_id=self._rpc.request_id)
        self._records.begin_item(call, self._rpc)
        response = generation_pb2.GenerateBatchResponse(index=index)
        try:
            await self._serve(request, call, response)
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
        data = response.SerializeToString()
        self._hand.answered(request.ByteSize(), len(data))
        del request, response
        async with self._writing:
            await self._context.write(data)
        self._hand.taken(len(data))

    async def _serve(self, request: Message, call: Call, response: generation_pb2.GenerateBatchResponse) -> None:
        """Write the answer to one request, whose id is checked first.

        Raises:
            ServiceError: As `Generate` does; for a request that cannot be read; for an id that is missing, unfit or not new.
        """
        if isinstance(request, Refused):
            call.request_id = response.request_id = request.request_id
            raise request.error
        call.request_id = response.request_id = check_request_id("request_id", request.request_id)
        bind_contextvars(request_id=call.request_id)
        if not call.request_id:
            raise InvalidRequest("request_id", "is missing; each request of a batch needs one")
        if not self._ids.add(call.request_id):
            raise InvalidRequest("request_id", "was used on this stream before")
        await self._generate(request, self._context, response.response)

    def _finish(self, call: Call, code: str) -> None:
        """Write a request's record; its tokens count for the RPC's too."""
        self._rpc.source_tokens += call.source_tokens
        self._rpc.generated_tokens += call.generated_tokens
        self._records.finish(call, code, event="item")


async def _cancel_when(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Cancel a task when an event is set."""
    await event.wait()
    task.cancel()
