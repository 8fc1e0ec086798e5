"""gRPC reflection, within bounds: what a caller sends is short, and a stream that nobody uses ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from dragoman.server.errors import IdleStream, InvalidRequest
from dragoman.server.faces.grpc.interceptors import Context
from dragoman.server.faces.grpc.methods import GENERATION, HEALTH
from dragoman.server.faces.grpc.reading import Refused
from dragoman.server.faces.oip.methods import INFERENCE
from dragoman.server.service.in_flight import StreamLimit

NAMES = (GENERATION.full_name, INFERENCE.full_name, HEALTH.full_name, reflection.SERVICE_NAME)
MAX_STREAMS = 64
MAX_STREAMS_PER_CONNECTION = 4
IDLE_SECONDS = 30.0
# An answer repeats its question; no name in a description is longer.
MAX_REQUEST_BYTES = 1024


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it brings no types
    """Describes the services. Method names are the protocol's."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """Describe all of them; a stream ends when nothing has come for so long."""
        super().__init__(NAMES)
        self._idle_seconds = idle_seconds
        self._streams = StreamLimit("reflection streams", MAX_STREAMS, MAX_STREAMS_PER_CONNECTION)

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[ServerReflectionRequest | Refused], context: Context
    ) -> AsyncIterator[ServerReflectionResponse]:
        """Yield the answer to each question.

        Raises:
            ConnectionLimit: If there are too many such streams, in all or on this connection.
            InvalidRequest: If a question cannot be read, or is too long.
            IdleStream: If no question comes.
        """
        with self._streams.stream(context.peer()):
            async with aclosing(super().ServerReflectionInfo(self._checked(requests), context)) as responses:
                async for response in responses:
                    yield response

    async def _checked(self, requests: AsyncIterator[Any]) -> AsyncIterator[ServerReflectionRequest]:
        """Yield questions that can be answered, until there are no more."""
        while True:
            try:
                async with asyncio.timeout(self._idle_seconds):
                    request = await anext(requests, None)
            except TimeoutError:
                raise IdleStream(self._idle_seconds) from None
            if request is None:
                return
            if isinstance(request, Refused):
                raise request.error
            if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
                raise InvalidRequest("request", f"{size} bytes; at most {MAX_REQUEST_BYTES} are allowed")
            yield request
