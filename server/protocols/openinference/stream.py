"""ModelStreamInfer: requests on one stream, each answered as it goes, in pieces where it has one text, and failing alone.

What a stream has in hand is bounded as that of GenerateBatch, with which it shares the server's allowance (`streams.py`). It is not
read further meanwhile, so a caller who sends faster than the models answer is held back by gRPC's own flow control.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest, ServiceError, Unavailable
from dragoman.server.protocols.grpc.inflight import Hand
from dragoman.server.protocols.grpc.interceptors import Context, current_call, own_ending
from dragoman.server.protocols.grpc.reading import Refused, Turns, large_bytes_read
from dragoman.server.protocols.openinference.answers import Answering, streamed, to_failure, to_response
from dragoman.server.protocols.openinference.requests import STREAM, Inference
from dragoman.server.protocols.several_requests import Items
from dragoman.server.service.context import Call
from dragoman.server.service.ids import new_incident
from dragoman.server.service.outcomes import RETRY_SECONDS
from dragoman.server.service.service import Core


class InferStream:
    """One stream of requests."""

    def __init__(self, core: Core, context: Context, hand: Hand, turns: Turns, max_message_bytes: int) -> None:
        """Start without requests, inside the RPC's task.

        Args:
            core: What answers, and whose calls these are.
            context: Of the RPC.
            hand: What the stream has in hand.
            turns: Of the connection's streams, at reading.
            max_message_bytes: Largest message that is sent.
        """
        self._draining = core.calls.draining
        self._context = context
        self._hand = hand
        self._turns = turns
        self._max_message_bytes = max_message_bytes
        call = current_call.get()
        self._items = Items(core.calls.records, call, partial(own_ending, context, call.arrival))
        self._answering = Answering(core, self._items, context.time_remaining, max_message_bytes)
        self._ids: set[str] = set()  # under way
        self._writing = asyncio.Lock()  # gRPC sends one message at a time

    async def serve(self, requests: AsyncIterator[Inference | Refused]) -> None:
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

    async def _read(self, requests: AsyncIterator[Inference | Refused], tasks: asyncio.TaskGroup) -> None:
        """Start each request; the next message is read when there is a place for it."""
        arrivals = aiter(requests)
        is_first = True
        while True:
            await self._hand.room()
            try:
                # The first one may be large for all we know.
                is_in_turn = is_first or large_bytes_read.get()
                message = self._enter(await (self._turns.take(anext(arrivals)) if is_in_turn else anext(arrivals)))
            except StopAsyncIteration:
                return
            is_first = False
            await self._hand.turn()
            if isinstance(message, Inference) and len(message) > 1:
                has_begun = asyncio.Event()
                tasks.create_task(self._answer_several(message, has_begun))
                await has_begun.wait()
            else:
                self._hand.read(message.ByteSize())
                tasks.create_task(self._answer(message))
            del message  # or it would be kept until the next one comes

    def _enter(self, message: Inference | Refused) -> Inference | Refused:
        """Return a message that may be begun, whose id is under way from now on, or what says why it may not."""
        if isinstance(message, Refused):
            return message
        request_id = message.request_id
        if request_id in self._ids:
            return Refused(InvalidRequest("id", "is that of another request, which is under way on this stream"), request_id)
        if message.is_streamed and len(message) > 1:
            return Refused(InvalidRequest(STREAM, f"goes with one text only, and there are {len(message)}"), request_id)
        if request_id:
            self._ids.add(request_id)
        return message

    def _leave(self, message: Inference | Refused) -> None:
        """Let the id of a message that was begun come again."""
        if isinstance(message, Inference):
            self._ids.discard(message.request_id)

    async def _answer(self, message: Inference | Refused) -> None:
        """Answer a message of one text, or say why it is refused."""
        request_id = message.request_id or new_incident()
        try:
            with self._items.one(request_id) as call:
                if isinstance(message, Refused):
                    request_id = message.request_id
                    raise message.error
                last = await self._serve(message, request_id, call)
        except ServiceError as error:
            last = to_failure(error, request_id)
        self._leave(message)
        await self._write_last(last, message.ByteSize())

    async def _serve(self, inference: Inference, request_id: str, call: Call) -> inference_pb2.ModelStreamInferResponse:
        """Write the answer to a message of one text in pieces, unless it is wanted whole; return what is left to be written."""
        response = await self._answering.in_pieces(
            inference, request_id, call, lambda piece: self._write(streamed(piece, is_final=False))
        )
        return streamed(response, is_final=True)

    async def _answer_several(self, inference: Inference, has_begun: asyncio.Event) -> None:
        """Answer a message of several texts, when all have their answers."""
        request_id = inference.request_id or new_incident()
        try:
            answered = await self._answering.each(inference, request_id, self._hand, has_begun)
            response = await to_response(inference, answered, request_id, self._max_message_bytes)
            last = streamed(response, is_final=True)
        except ServiceError as error:
            last = to_failure(error, request_id)
        self._leave(inference)
        self._hand.read(0)
        await self._write_last(last, 0)

    async def _write_last(self, last: inference_pb2.ModelStreamInferResponse, request_bytes: int) -> None:
        """Write the last response to a request, which is in hand until it is taken."""
        num_bytes = last.ByteSize()
        self._hand.answered(request_bytes, num_bytes)
        await self._write(last)
        self._hand.taken(num_bytes)

    async def _write(self, response: inference_pb2.ModelStreamInferResponse) -> None:
        async with self._writing:
            await self._context.write(response)


async def _cancel_when(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Cancel a task when an event is set."""
    await event.wait()
    task.cancel()
