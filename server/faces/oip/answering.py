"""Answers to inference requests, over gRPC and over HTTP: each text is a request that joins the running batch by itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from dragoman.inference import inference_pb2
from dragoman.server.core.answers import Generated
from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.faces.items import Items
from dragoman.server.faces.oip.given import STREAM
from dragoman.server.faces.oip.inference import TEXT_INPUT, Inference
from dragoman.server.faces.oip.responses import to_piece_response, to_response
from dragoman.server.faces.oip.sizes import ResponseLimit
from dragoman.server.service.in_flight import Window

Response: TypeAlias = inference_pb2.ModelInferResponse
# Says how many seconds are left until the caller's deadline; None if there is none.
Remaining: TypeAlias = Callable[[], float | None]


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

    async def whole(self, inference: Inference, call: Call) -> Response:
        """Return the answers to all texts of a message.

        Raises:
            ServiceError: If one of them has none.
        """
        if len(inference) == 1:
            answered: Sequence[Generated] = [await self._generate(inference, 0, call, call.arrival)]
        else:
            assert call.window is not None
            call.is_counted = False  # its texts are
            answered = await self.each(inference, call.request_id, call.window)
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
            generated = await self._generate(inference, 0, call, call.arrival)
            return await to_response(inference, [generated], request_id, self._max_message_bytes)
        left, limit = seconds_left(inference, call.arrival, self._remaining()), ResponseLimit(self._max_message_bytes)
        async with self._generation.stream(request, call, left, limit) as pieces:
            async for piece in pieces:
                response = await to_piece_response(inference, piece, call.model, request_id, self._max_message_bytes)
                if piece.result is not None:
                    return response
                if response.outputs:
                    await write(response)
        raise AssertionError("the last piece has the whole answer")

    async def each(
        self, inference: Inference, request_id: str, window: Window, has_begun: asyncio.Event | None = None
    ) -> Sequence[Generated]:
        """Return the answers to a message of several texts; one that fails ends them all.

        No more run at once than the window has room for, nor than the caller's limits let in if nothing else of theirs runs.

        Args:
            inference: The message.
            request_id: Its id.
            window: Of its call.
            has_begun: Set when the last one has begun, or none will.

        Raises:
            ServiceError: Of the one that failed, with its number.
        """
        arrival, caller = time.monotonic(), self._items.whole.caller

        async def serve(number: int) -> Generated:
            try:
                with self._items.one(request_id, f"{request_id}#{number}", is_part=number > 0) as call:
                    return await self._generate(inference, number, call, arrival)
            except ServiceError as error:
                raise error.copy(f"{TEXT_INPUT}[{number}]: {error.message}") from None

        return await window.run_each(len(inference), serve, None if caller is None else caller.most_at_once, has_begun)

    async def _generate(self, inference: Inference, number: int, call: Call, arrival: float) -> Generated:
        limit, left = ResponseLimit(self._max_message_bytes, len(inference)), seconds_left(inference, arrival, self._remaining())
        return await self._generation.generate(inference.requests[number], call, left, limit)
