"""grpc.health.v1 and gRPC reflection."""

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
# A watcher's name is kept for as long as it watches; no model has a longer one.
MAX_NAME_LENGTH = 1024
# Each watcher is a task. A client watches a service or two, and gRPC's clients a connection each.
MAX_WATCHES, MAX_WATCHES_PER_CONNECTION = 1024, 16


class Watcher:
    """One stream: the service it asks about, and what it was told last."""

    def __init__(self, service: str) -> None:
        """Start with nothing told."""
        self.service = service
        self.told: int | None = None
        self.wake = asyncio.Event()


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it brings no types
    """Holds the answers and gives them. Method names are the protocol's."""

    def __init__(self) -> None:
        """Start alive and not ready."""
        self._statuses: dict[str, int] = {}
        self._watchers: set[Watcher] = set()
        self._behind: set[Watcher] = set()
        self._streams = StreamLimit("max_watches", MAX_WATCHES, MAX_WATCHES_PER_CONNECTION)
        self._all_told = asyncio.Event()
        self._all_told.set()
        self.update((), is_ready=False, is_draining=False)

    @property
    def num_watchers(self) -> int:
        """Streams of `Watch` that are open."""
        return len(self._watchers)

    def update(self, models: Iterable[LoadedModel], *, is_ready: bool, is_draining: bool) -> None:
        """Say how the models are now. It is so at once for who asks; who watches is told as soon as it takes what it is told.

        Args:
            models: What is loaded.
            is_ready: Whether the server is, as a whole.
            is_draining: Whether the server takes no new work, whatever the models are.
        """
        ready = {model.name: model.engine.is_ready and not is_draining for model in models}
        statuses = ready | dict.fromkeys(OVERALL, is_ready) | {LIVENESS: True}
        self._statuses = {
            name: HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
            for name, is_serving in statuses.items()
        }
        for watcher in self._watchers:
            self._note(watcher)
            watcher.wake.set()

    async def all_told(self, seconds: float) -> bool:
        """Wait until every watcher has been told the latest state, at most so long; return whether that was so."""
        try:
            async with asyncio.timeout(seconds):
                await self._all_told.wait()
        except TimeoutError:
            return False
        return True

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """Return the state of a service.

        Raises:
            UnknownService: If there is none of that name.
        """
        status = self._statuses.get(request.service)
        if status is None:
            raise UnknownService
        return HealthCheckResponse(status=status)

    async def List(self, request: HealthListRequest, context: Context) -> NoReturn:
        """Refuse: who has no credentials is not told what is served.

        Raises:
            NotOffered: Always.
        """
        raise NotOffered("names are not listed; ask about one with Check, or for the models with ListModels")

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        """Write the state of a service, and again whenever it has changed; `SERVICE_UNKNOWN` while there is none of that name.

        Raises:
            InvalidRequest: If the name is too long to be anybody's.
            ConnectionLimit: If there are too many watchers, in all or on this connection.
        """
        if len(request.service) > MAX_NAME_LENGTH:
            raise InvalidRequest("service", f"{len(request.service)} characters; at most {MAX_NAME_LENGTH} are allowed")
        watcher = Watcher(request.service)
        with self._streams.stream(context.peer()):
            self._watchers.add(watcher)
            self._note(watcher)
            try:
                await self._tell(watcher, context)
            finally:
                self._watchers.discard(watcher)
                self._note(watcher)

    async def _tell(self, watcher: Watcher, context: Context) -> None:
        """Tell a watcher until it leaves. What changes while it is being told it learns next, the last change alone."""
        while True:
            watcher.wake.clear()
            status = self._status(watcher)
            if status != watcher.told:
                await context.write(HealthCheckResponse(status=status))
                watcher.told = status
                self._note(watcher)
            await watcher.wake.wait()

    def _status(self, watcher: Watcher) -> int:
        return self._statuses.get(watcher.service, int(HealthCheckResponse.SERVICE_UNKNOWN))

    def _note(self, watcher: Watcher) -> None:
        """Note whether a watcher, and whether every watcher, knows the latest state."""
        if watcher in self._watchers and watcher.told != self._status(watcher):
            self._behind.add(watcher)
            self._all_told.clear()
        else:
            self._behind.discard(watcher)
            if not self._behind:
                self._all_told.set()


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
