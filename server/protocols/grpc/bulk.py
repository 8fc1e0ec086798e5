"""GenerateBatch and GenerateBulk: many requests on one stream, each served as by Generate, answered when it is done, failing alone.

A stream has a bounded number of requests and of bytes in hand (`hand.py`): requests read whose answers are not written yet. It is
not read further meanwhile, so a caller who sends faster than the models answer, or reads slower than they do, is held back by
gRPC's own flow control. Of an answer that waits to be taken nothing is kept but its bytes.

In GenerateBulk a message has several requests, which are begun one by one as there are places, and several answers: those that are
made in one turn of the event loop, as what the engine reports together is, or while the message before them is taken.

An id that is unfit is never sent back. Every answer says which message of its stream it answers, from 0.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from structlog.contextvars import bind_contextvars, unbind_contextvars

from dragoman.server.errors import InvalidRequest, Unavailable
from dragoman.server.protocols.grpc.inflight import Hand, RecentIds
from dragoman.server.protocols.grpc.interceptors import Context, cancellation_code, current_call
from dragoman.server.protocols.grpc.reading import Refused, Several, Turns, large_bytes_read, put_together
from dragoman.server.protocols.v1.messages import to_message
from dragoman.server.service.context import Call
from dragoman.server.service.ids import check_request_id
from dragoman.server.service.outcomes import RETRY_SECONDS
from dragoman.server.service.service import Core
from dragoman.v1 import generation_pb2

# Requests of one message that are begun before others have their turn.
REQUESTS_PER_TURN = 16
# Bytes of answers that go together; a larger one goes alone.
MAX_TOGETHER_BYTES = 64 * 2**10

Message: TypeAlias = generation_pb2.GenerateRequest | Refused
Generate: TypeAlias = "Callable[[generation_pb2.GenerateRequest, Context, generation_pb2.GenerateResponse], Awaitable[None]]"


class Batch:
    """One stream of requests."""

    def __init__(
        self, generate: Generate, core: Core, context: Context, hand: Hand, turns: Turns, *, is_bulk: bool = False
    ) -> None:
        """Start without requests, inside the RPC's task.

        Args:
            generate: What writes the answer to one request into a message; `current_call` is that request's when it is called.
            core: Whose models answer, and whose calls these are.
            context: Of the RPC.
            hand: What the stream has in hand.
            turns: Of the connection's streams, at reading.
            is_bulk: Whether a message has several answers.
        """
        self._generate = generate
        self._is_bulk = is_bulk
        self._records = core.calls.records
        self._draining = core.calls.draining
        self._context = context
        self._hand = hand
        self._turns = turns
        self._rpc = current_call.get()
        self._ids = RecentIds()
        self._num_read = 0
        self._answers: list[bytes] = []  # not sent yet
        self._is_writing = False  # gRPC sends one message at a time

    async def serve(self, requests: AsyncIterator[Message | Several]) -> None:
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

    async def _read(self, requests: AsyncIterator[Message | Several], tasks: asyncio.TaskGroup) -> None:
        """Start each request; the next message is read when there is a place for it."""
        arrivals = aiter(requests)
        while True:
            await self._hand.room()
            try:
                # The first one may be large for all we know.
                is_in_turn = large_bytes_read.get() or not self._num_read
                message = await (self._turns.take(anext(arrivals)) if is_in_turn else anext(arrivals))
            except StopAsyncIteration:
                return
            if isinstance(message, Several):
                await self._begin_each(message, tasks)
            else:
                await self._begin(message, tasks)
            del message  # or it would be kept until the next one comes

    async def _begin_each(self, message: Several, tasks: asyncio.TaskGroup) -> None:
        """Start the requests of a message, each when there is a place for it; those that are left count with their bytes."""
        num_bytes = message.ByteSize()
        self._hand.hold(num_bytes)
        for number in range(len(message)):
            if number:
                await self._hand.room()
                if number % REQUESTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            request = message.take()
            self._hand.hold(message.ByteSize() - num_bytes)
            num_bytes = message.ByteSize()
            await self._begin(request, tasks)

    async def _begin(self, request: Message, tasks: asyncio.TaskGroup) -> None:
        """Start one request, when the answers before it are taken, if they are large."""
        self._hand.read(request.ByteSize())
        await self._hand.turn()
        tasks.create_task(self._answer(request, self._num_read))
        self._num_read += 1

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
            response.error.CopyFrom(to_message(fault, call.request_id))
            call.refusal = fault.refusal
            self._finish(call, fault.code)
        else:
            self._finish(call, "OK")
        data = response.SerializeToString()
        self._hand.answered(request.ByteSize(), len(data))
        del request, response
        self._answers.append(data)
        if not self._is_writing:
            await self._write()

    async def _write(self) -> None:
        """Send the answers there are, and those that come meanwhile; whoever made them need not wait."""
        self._is_writing = True
        await asyncio.sleep(0)  # what is answered in the same turn goes along
        while self._answers:
            together = self._answers[: self._num_together()]
            del self._answers[: len(together)]
            await self._context.write(put_together(together) if self._is_bulk else together[0])
            for answer in together:
                self._hand.taken(len(answer))
        self._is_writing = False

    def _num_together(self) -> int:
        """Return how many of the answers there are fit one message; at least one."""
        if not self._is_bulk:
            return 1
        num_bytes = 0
        for count, answer in enumerate(self._answers):
            num_bytes += len(answer)
            if count and num_bytes > MAX_TOGETHER_BYTES:
                return count
        return len(self._answers)

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
