"""grpc.health.v1, for load balancers and Kubernetes, and gRPC reflection.

`liveness` is served while the process answers. The empty name, `readiness` and the names of the services that generate are served
while the server is ready, by its rule; a model's name while that model is.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any, NoReturn

from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from dragoman.server.errors import IdleStream, InvalidRequest, NotOffered, UnknownService
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.protocols.grpc.interceptors import GENERATION, HEALTH, Context
from dragoman.server.protocols.grpc.reading import Refused
from dragoman.server.protocols.openinference.service import INFERENCE
from dragoman.server.service.in_flight import StreamLimit

LIVENESS = "liveness"
OVERALL = ("", "readiness", GENERATION.full_name, INFERENCE.full_name)
# A watched name is kept for as long as the watch is open; no model has a longer one.
MAX_NAME_LENGTH = 1024
# Each watch is a task. A client watches a service or two, and gRPC's clients a connection each.
MAX_WATCHES, MAX_WATCHES_PER_CONNECTION = 1024, 16

REFLECTED = (GENERATION.full_name, INFERENCE.full_name, HEALTH.full_name, reflection.SERVICE_NAME)
MAX_REFLECTION_STREAMS, MAX_REFLECTION_STREAMS_PER_CONNECTION = 64, 4
REFLECTION_IDLE_SECONDS = 30.0
# An answer repeats its question; no name in a description is longer.
MAX_REFLECTION_REQUEST_BYTES = 1024


class _Watch:
    """A `Watch` stream: its service, the status that was written last, and whether another one may be due."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.written: int | None = None
        self.changed = asyncio.Event()


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it brings no types
    """The health service; method names are the protocol's.

    An update wakes watches, each of which writes the latest status by itself: one whose client reads nothing delays no other.
    """

    def __init__(self) -> None:
        """Start alive and not ready."""
        self._watches: set[_Watch] = set()
        self._limit = StreamLimit("max_watches", MAX_WATCHES, MAX_WATCHES_PER_CONNECTION)
        self._written = asyncio.Event()
        self.update((), is_ready=False, is_draining=False)

    def update(self, models: Iterable[LoadedModel], *, is_ready: bool, is_draining: bool) -> None:
        """Publish the statuses of the server and of its models.

        Args:
            models: Loaded models.
            is_ready: Whether the server is ready as a whole.
            is_draining: Whether the server takes no new work.
        """
        ready = {model.name: model.engine.is_ready and not is_draining for model in models}
        statuses = ready | dict.fromkeys(OVERALL, is_ready) | {LIVENESS: True}
        self._statuses: dict[str, int] = {
            name: HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
            for name, is_serving in statuses.items()
        }
        for watch in self._watches:
            watch.changed.set()

    async def all_told(self, seconds: float) -> bool:
        """Wait until every watch has written the latest status, at most so long; return whether that was so."""
        try:
            async with asyncio.timeout(seconds):
                while any(watch.written != self._status(watch.service) for watch in self._watches):
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            return False
        return True

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """Return the status of a service.

        Raises:
            UnknownService: If there is none of that name.
        """
        status = self._statuses.get(request.service)
        if status is None:
            raise UnknownService
        return HealthCheckResponse(status=status)

    async def List(self, request: HealthListRequest, context: Context) -> NoReturn:
        """Refuse: callers without credentials are not told the models' names."""
        raise NotOffered("names are not listed; ask about one with Check, or for the models with ListModels")

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        """Write the status of a service, and again whenever it has changed; `SERVICE_UNKNOWN` while there is none of that name.

        Raises:
            InvalidRequest: If the name is longer than any.
            ConnectionLimit: If there are too many watches, in all or on this connection.
        """
        if len(request.service) > MAX_NAME_LENGTH:
            raise InvalidRequest("service", f"{len(request.service)} characters; at most {MAX_NAME_LENGTH} are allowed")
        watch = _Watch(request.service)
        with self._limit.stream(context.peer()):
            self._watches.add(watch)
            try:
                while True:
                    watch.changed.clear()
                    if (status := self._status(watch.service)) != watch.written:
                        await context.write(HealthCheckResponse(status=status))
                        watch.written = status
                        self._written.set()
                    await watch.changed.wait()
            finally:
                self._watches.discard(watch)
                self._written.set()

    def _status(self, service: str) -> int:
        return self._statuses.get(service, int(HealthCheckResponse.SERVICE_UNKNOWN))


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it brings no types
    """Describes the services; method names are the protocol's. Questions are short, and a stream that is not used ends."""

    def __init__(self, idle_seconds: float = REFLECTION_IDLE_SECONDS) -> None:
        """Describe all services; a stream ends after so long without a question."""
        super().__init__(REFLECTED)
        self._idle_seconds = idle_seconds
        self._limit = StreamLimit("reflection streams", MAX_REFLECTION_STREAMS, MAX_REFLECTION_STREAMS_PER_CONNECTION)

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[ServerReflectionRequest | Refused], context: Context
    ) -> AsyncIterator[ServerReflectionResponse]:
        """Yield the answer to each question.

        Raises:
            ConnectionLimit: If there are too many such streams, in all or on this connection.
            InvalidRequest: If a question cannot be read, or is too long.
            IdleStream: If no question comes.
        """
        with self._limit.stream(context.peer()):
            async with aclosing(super().ServerReflectionInfo(self._checked(requests), context)) as responses:
                async for response in responses:
                    yield response

    async def _checked(self, requests: AsyncIterator[Any]) -> AsyncIterator[ServerReflectionRequest]:
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
            if (size := request.ByteSize()) > MAX_REFLECTION_REQUEST_BYTES:
                raise InvalidRequest("request", f"{size} bytes; at most {MAX_REFLECTION_REQUEST_BYTES} are allowed")
            yield request
