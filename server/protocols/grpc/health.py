"""grpc.health.v1, for load balancers and Kubernetes, and gRPC reflection.

`liveness` is always SERVING. The empty name, `readiness` and the generating services follow the server's readiness; a model's name
follows the model's.
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
# A watch keeps its name; no model has a longer one.
MAX_NAME_LENGTH = 1024
# Each watch is a task; clients watch one or two services, and gRPC's clients one per connection.
MAX_WATCHES, MAX_WATCHES_PER_CONNECTION = 1024, 16

REFLECTED = (GENERATION.full_name, INFERENCE.full_name, HEALTH.full_name, reflection.SERVICE_NAME)
MAX_REFLECTION_STREAMS, MAX_REFLECTION_STREAMS_PER_CONNECTION = 64, 4
REFLECTION_IDLE_SECONDS = 30.0
# A response repeats its request; no descriptor name is longer.
MAX_REFLECTION_REQUEST_BYTES = 1024


class _Watch:
    def __init__(self, service: str) -> None:
        self.service = service
        self.written: int | None = None
        self.changed = asyncio.Event()


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it brings no types
    """The health service; the protocol defines the method names.

    Each watch writes the latest status in its own task, so that a client that does not read delays no other.
    """

    def __init__(self) -> None:
        self._watches: set[_Watch] = set()
        self._limit = StreamLimit("health watches", MAX_WATCHES, MAX_WATCHES_PER_CONNECTION)
        self._written = asyncio.Event()
        self.update((), is_ready=False, is_draining=False)

    def update(self, models: Iterable[LoadedModel], *, is_ready: bool, is_draining: bool) -> None:
        """Publish the statuses of the server and its loaded models."""
        ready = {model.name: model.engine.is_ready and not is_draining for model in models}
        statuses = ready | dict.fromkeys(OVERALL, is_ready) | {LIVENESS: True}
        self._statuses: dict[str, int] = {
            name: HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
            for name, is_serving in statuses.items()
        }
        for watch in self._watches:
            watch.changed.set()

    async def all_told(self, seconds: float) -> bool:
        """Wait up to `seconds` until every watch has written the latest status; return whether all have."""
        try:
            async with asyncio.timeout(seconds):
                while any(watch.written != self._status(watch.service) for watch in self._watches):
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            return False
        return True

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """Return a service's status; raise `UnknownService` if there is none of that name."""
        status = self._statuses.get(request.service)
        if status is None:
            raise UnknownService
        return HealthCheckResponse(status=status)

    async def List(self, request: HealthListRequest, context: Context) -> NoReturn:
        """Refuse: callers without credentials must not learn the models' names."""
        raise NotOffered("names are not listed; ask about one with Check, or for the models with ListModels")

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        """Write a service's status whenever it changes; `SERVICE_UNKNOWN` for an unknown name.

        Raises:
            InvalidRequest: If the name is too long.
            ConnectionLimit: If there are too many watches, in total or on this connection.
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
    """gRPC reflection of all services, with limits on streams, request size and idle time."""

    def __init__(self, idle_seconds: float = REFLECTION_IDLE_SECONDS) -> None:
        super().__init__(REFLECTED)
        self._idle_seconds = idle_seconds
        self._limit = StreamLimit("reflection streams", MAX_REFLECTION_STREAMS, MAX_REFLECTION_STREAMS_PER_CONNECTION)

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[ServerReflectionRequest | Refused], context: Context
    ) -> AsyncIterator[ServerReflectionResponse]:
        """Yield the response to each request.

        Raises:
            ConnectionLimit: If there are too many streams, in total or on this connection.
            InvalidRequest: If a request is malformed or too long.
            IdleStream: If no request comes in time.
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
