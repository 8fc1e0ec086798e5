"""Request streams: each request is served, answered and failed independently.

A stream is not read while its in-flight window is full, so HTTP/2 flow control slows down a caller that sends faster than the
models answer, or reads slowly. Unwritten answers are kept in serialised form only.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message
from structlog.contextvars import bind_contextvars, unbind_contextvars

from dragoman.server.errors import InvalidRequest, ServiceError, Unavailable
from dragoman.server.protocols.bulk import ItemRecords
from dragoman.server.protocols.grpc.interceptors import Context, current_call, own_ending
from dragoman.server.protocols.grpc.reading import HEAD_BYTES, BulkRequest, Refused, join
from dragoman.server.protocols.v1.messages import to_message
from dragoman.server.service.callers import RETRY_SECONDS
from dragoman.server.service.context import Call, check_request_id
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT, REQUESTS_PER_TURN
from dragoman.server.service.service import Service
from dragoman.v1 import generation_pb2

# Size limit for answers batched in one GenerateBulk message; a larger answer is sent alone.
MAX_TOGETHER_BYTES = 64 * 2**10
# Longest wait of an answer for others of its message, while requests of the stream wait for slots anyway.
TOGETHER_SECONDS = 0.02
NUM_REMEMBERED_IDS = 1024

Request = TypeVar("Request")


class RequestStream(ABC, Generic[Request]):
    """One stream of requests; create it in the RPC's task."""

    def __init__(self, service: Service, context: Context, max_together_bytes: int = 0) -> None:  # 0: one answer per message
        call = current_call.get()
        assert call.window is not None
        self.call, self.window, self.context = call, call.window, context
        self.items = ItemRecords(service.calls, call, partial(own_ending, context, call.arrival))
        self._draining = service.calls.draining
        self._max_together_bytes = max_together_bytes
        self._num_read = 0
        self._answers: list[bytes] = []  # not written yet
        self._is_writing_answers = False
        self._has_enough = asyncio.Event()
        self._writing = asyncio.Lock()  # gRPC accepts one write at a time

    async def serve(self, messages: AsyncIterator[Any]) -> None:
        """Answer requests until the caller half-closes or the server drains, then those in flight; cancelling it cancels them.

        Raises:
            Unavailable: If the server drains first; unanswered requests were not processed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(messages, tasks))
                watching = tasks.create_task(_cancel_when(self._draining, reading))
                reading.add_done_callback(lambda _: watching.cancel())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # a write failed: the caller has left
        if reading.cancelled():
            raise Unavailable("the server is shutting down", retry_after_seconds=RETRY_SECONDS)

    @abstractmethod
    async def begin(self, message: Any, tasks: asyncio.TaskGroup) -> None:
        """Start a message's requests, each when the window has room; it has room for the first."""

    @abstractmethod
    async def answer(self, request: Request, index: int, call: Call) -> Message:
        """Return the last response to the request at `index` of the stream, or raise `ServiceError`; `call` has no id yet."""

    @abstractmethod
    def failure(self, error: ServiceError, request: Request, index: int, call: Call) -> Message:
        """Return the response to a request that failed; arguments as `answer`."""

    def start(self, request: Request, num_bytes: int, tasks: asyncio.TaskGroup) -> None:
        """Start a request of `num_bytes` bytes."""
        self.window.begin(num_bytes)
        tasks.create_task(self._run(request, num_bytes, self._num_read))
        self._num_read += 1

    async def write(self, message: Message | bytes) -> None:
        """Write a message, within flow control."""
        async with self._writing:
            await self.context.write(message)

    async def finish(self, request_bytes: int, data: bytes) -> None:
        """Write a request's last response, together with others that are finished soon if messages may have several."""
        self.window.answered(request_bytes, len(data))
        self._answers.append(data)
        if self._is_writing_answers:
            if not self._may_wait:
                self._has_enough.set()
            return
        self._is_writing_answers = True
        await asyncio.sleep(0)  # collect answers of the same event loop iteration
        if self._may_wait:
            self._has_enough.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(TOGETHER_SECONDS):
                    await self._has_enough.wait()
        while self._answers:
            together = self._answers[: self._num_together()]
            del self._answers[: len(together)]
            await self.write(join(together) if self._max_together_bytes else together[0])
            for answer in together:
                self.window.end(len(answer))
        self._is_writing_answers = False

    @property
    def _may_wait(self) -> bool:
        """Whether unanswered requests are more than fit into the slots, so that no engine becomes idle while answers wait."""
        num_unanswered = self.window.num_requests - len(self._answers)
        return self._max_together_bytes > 0 and num_unanswered > self.window.max_requests // REQUESTS_PER_SLOT

    async def _read(self, messages: AsyncIterator[Any], tasks: asyncio.TaskGroup) -> None:
        async for message in messages:
            await self.begin(message, tasks)
            del message  # would be kept until the next message
            await self.window.wait()

    async def _run(self, request: Request, num_bytes: int, index: int) -> None:
        unbind_contextvars("request_id")
        bind_contextvars(batch_id=self.call.request_id)
        try:
            with self.items.item() as call:
                response = await self.answer(request, index, call)
        except ServiceError as error:
            response = self.failure(error, request, index, call)
        data = response.SerializeToString()
        del request, response
        await self.finish(num_bytes, data)

    def _num_together(self) -> int:
        """Return the number of answers that fit one message, at least one."""
        num_bytes = 0
        for count, answer in enumerate(self._answers):
            num_bytes += len(answer) + HEAD_BYTES
            if count and num_bytes > self._max_together_bytes:
                return count
        return len(self._answers)


GenerateRequest: TypeAlias = generation_pb2.GenerateRequest | Refused
Generate: TypeAlias = Callable[[generation_pb2.GenerateRequest, Call, Context, generation_pb2.GenerateResponse], Awaitable[None]]


class Batch(RequestStream[GenerateRequest]):
    """A stream of GenerateBatch, or of GenerateBulk with several requests and answers per message.

    `generate` writes a request's answer into a message. Answers carry the request's index on the stream, but never an invalid id.
    """

    def __init__(self, generate: Generate, service: Service, context: Context, max_together_bytes: int = 0) -> None:
        super().__init__(service, context, max_together_bytes)
        self._generate = generate
        self._ids = RecentIds()

    async def begin(self, message: GenerateRequest | BulkRequest, tasks: asyncio.TaskGroup) -> None:
        """Start a message's requests; those not begun count with their bytes."""
        if not isinstance(message, BulkRequest):
            self.start(message, message.ByteSize(), tasks)
            return
        held = message.ByteSize()
        self.window.hold(held)
        for number in range(len(message)):
            if number:
                await self.window.wait()
                if number % REQUESTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            request = message.take()
            self.window.hold(message.ByteSize() - held)
            held = message.ByteSize()
            self.start(request, request.ByteSize(), tasks)

    async def answer(self, request: GenerateRequest, index: int, call: Call) -> generation_pb2.GenerateBatchResponse:
        """Return the answer to a request after checking its id; errors as those of Generate."""
        if isinstance(request, Refused):
            call.request_id = request.request_id
            raise request.error
        call.request_id = check_request_id("request_id", request.request_id)
        bind_contextvars(request_id=call.request_id)
        if not call.request_id:
            raise InvalidRequest("request_id", "is missing; each request of a batch needs one")
        if not self._ids.add(call.request_id):
            raise InvalidRequest("request_id", "was used on this stream before")
        response = generation_pb2.GenerateBatchResponse(index=index, request_id=call.request_id)
        await self._generate(request, call, self.context, response.response)
        return response

    def failure(
        self, error: ServiceError, request: GenerateRequest, index: int, call: Call
    ) -> generation_pb2.GenerateBatchResponse:
        """Return the error response of a request."""
        failed = to_message(error, call.request_id)
        return generation_pb2.GenerateBatchResponse(index=index, request_id=call.request_id, error=failed)


class RecentIds:
    """The last ids of a stream, at least `NUM_REMEMBERED_IDS`, as 8-byte digests."""

    def __init__(self) -> None:
        self._newest: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, request_id: str) -> bool:
        """Add an id; return whether it is new."""
        digest = blake2b(request_id.encode(), digest_size=8).digest()
        if digest in self._newest or digest in self._older:
            return False
        if len(self._newest) >= NUM_REMEMBERED_IDS:
            self._older, self._newest = self._newest, set()
        self._newest.add(digest)
        return True


async def _cancel_when(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    await event.wait()
    task.cancel()
