"""How a message is answered, whichever face it came by: each of its texts is a request that joins the running batch by itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from dragoman.inference import inference_pb2
from dragoman.server.core.answers import Generated
from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.core.requests import GenerateRequest
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.faces.grpc.hand import Hand
from dragoman.server.faces.items import Items
from dragoman.server.faces.oip.given import STREAM
from dragoman.server.faces.oip.inference import TEXT_INPUT, Inference
from dragoman.server.faces.oip.responses import to_piece_response, to_response
from dragoman.server.faces.oip.sizes import ResponseLimit

# Requests of one message that are begun before others have their turn.
REQUESTS_PER_TURN = 16

Response: TypeAlias = inference_pb2.ModelInferResponse
# Says how many seconds are left until the caller's deadline; None if there is none.
Remaining: TypeAlias = Callable[[], float | None]
# Gives a call of several requests its hand.
Holds: TypeAlias = Callable[[], AbstractContextManager[Hand]]


def seconds_left(inference: Inference, arrival: float, remaining: float | None) -> float | None:
    """Return the time until a message's deadline: its face's own, or its `timeout`; None if it has none.

    Args:
        inference: The message.
        arrival: When it came, by `time.monotonic()`.
        remaining: Seconds until the deadline that its face knows of; None if there is none.
    """
    if inference.timeout_seconds is None:
        return remaining
    ours = inference.timeout_seconds - (time.monotonic() - arrival)
    return ours if remaining is None else min(remaining, ours)


class Answering:
    """Answers the messages of one call."""

    def __init__(self, core: Core, items: Items, remaining: Remaining, max_message_bytes: int) -> None:
        """Answer none yet.

        Args:
            core: What answers.
            items: What accompanies the requests of the call.
            remaining: Says how much time the call has left.
            max_message_bytes: Largest message that is sent.
        """
        self._generation = core.generation
        self._items = items
        self._remaining = remaining
        self._max_message_bytes = max_message_bytes

    async def one(self, inference: Inference, call: Call) -> Generated:
        """Return the answer to a message of one text.

        Args:
            inference: The message.
            call: Its record.

        Raises:
            ServiceError: If there is none.
        """
        return await self._generate(inference, inference.requests[0], call, call.arrival)

    async def whole(self, inference: Inference, call: Call, holds: Holds) -> Response:
        """Return the answers to all texts of a message.

        Args:
            inference: The message.
            call: Its record.
            holds: Gives it a hand, if it has several texts.

        Raises:
            ServiceError: If one of them has none.
        """
        if len(inference) == 1:
            answered = [await self.one(inference, call)]
        else:
            call.is_counted = False  # its texts are
            with holds() as hand:
                answered = await self.each(inference, call.request_id, hand, asyncio.Event())
        return await to_response(inference, answered, call.request_id, self._max_message_bytes)

    async def in_pieces(
        self, inference: Inference, request_id: str, call: Call, write: Callable[[Response], Awaitable[object]]
    ) -> Response:
        """Answer a message of one text in pieces, unless it is wanted whole; return what is left to be written, the last of them.

        Args:
            inference: The message.
            request_id: Its id.
            call: Its record.
            write: Sends a piece to the caller, when that takes it.

        Raises:
            ServiceError: If there is no answer.
        """
        [request] = inference.requests
        has_several = (request.num_return_sequences or 1) > 1
        if inference.is_streamed and has_several:
            raise InvalidRequest(STREAM, "goes with one answer only; num_return_sequences says that more are wanted")
        if inference.is_streamed is False or has_several:
            return await to_response(inference, [await self.one(inference, call)], request_id, self._max_message_bytes)
        left, limit = seconds_left(inference, call.arrival, self._remaining()), ResponseLimit(self._max_message_bytes)
        async with self._generation.stream(request, call, left, limit) as pieces:
            async for piece in pieces:
                response = await to_piece_response(inference, piece, call.model, request_id, self._max_message_bytes)
                if piece.result is not None:
                    return response
                if response.outputs:
                    await write(response)
        raise AssertionError("the last piece has the whole answer")

    async def each(self, inference: Inference, request_id: str, hand: Hand, has_begun: asyncio.Event) -> list[Generated]:
        """Return the answers to a message of several texts; one that fails ends them all.

        Cancelling this cancels every request that runs.

        Args:
            inference: The message.
            request_id: Its id.
            hand: What its stream, or the message, has in hand: no more are under way than that has room for, nor than its caller's
                limits would let in if nothing else of theirs ran.
            has_begun: Is set when the last one has begun, or none will.

        Raises:
            ServiceError: What one of them failed with; its message says which.
        """
        arrival = time.monotonic()
        tasks: list[asyncio.Task[Generated]] = []
        caller = self._items.whole.caller
        places = asyncio.Semaphore((caller and caller.most_at_once) or len(inference))
        hand.hold(inference.ByteSize())
        try:
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(inference.requests):
                    await places.acquire()
                    await hand.room()
                    if number % REQUESTS_PER_TURN == 0:
                        await asyncio.sleep(0)
                    hand.read(0)
                    tasks.append(group.create_task(self._item(inference, request, request_id, number, arrival)))
                    tasks[-1].add_done_callback(lambda _: _give_back(hand, places))
                has_begun.set()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            has_begun.set()
            hand.hold(-inference.ByteSize())
        return [task.result() for task in tasks]

    async def _item(
        self, inference: Inference, request: GenerateRequest, request_id: str, number: int, arrival: float
    ) -> Generated:
        """Answer one text of several."""
        try:
            with self._items.one(request_id, f"{request_id}#{number}", is_part=number > 0) as call:
                return await self._generate(inference, request, call, arrival)
        except ServiceError as error:
            raise error.copy(f"{TEXT_INPUT}[{number}]: {error.message}") from None

    async def _generate(self, inference: Inference, request: GenerateRequest, call: Call, arrival: float) -> Generated:
        limit = ResponseLimit(self._max_message_bytes, len(inference))
        return await self._generation.generate(request, call, seconds_left(inference, arrival, self._remaining()), limit)


def _give_back(hand: Hand, places: asyncio.Semaphore) -> None:
    hand.answered(0, 0)
    hand.taken(0)
    places.release()
