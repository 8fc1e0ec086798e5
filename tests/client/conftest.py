"""A fake server, a clock that advances only in waits, and one interface for both clients."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.sync import Client
from tests.client.fake_server import PATIENCE_SECONDS, FakeServer, Service
from tests.clock import Clock


class FakeClock(Clock):
    """Time that passes only in waits, which are recorded and end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, event: threading.Event, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
        """Return what a function returns on the loop, a coroutine's result when it is there."""

        async def run() -> Any:
            value = function(*args, **arguments)
            return await value if inspect.isawaitable(value) else value

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_SECONDS)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Blocking:
    """An `AsyncClient`, or an asynchronous stream or generator, with the interface of its blocking counterpart."""

    def __init__(self, loop: Loop, target: Any) -> None:
        self._loop, self._target = loop, target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)

        def call(*args: Any, **arguments: Any) -> Any:
            result = self._loop.run(value, *args, **arguments)
            return Blocking(self._loop, result) if hasattr(result, "__anext__") else result

        return call if callable(value) else value

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self._loop.run(lambda: anext(self._target, self))
        if item is self:
            raise StopIteration
        return item

    def __enter__(self) -> "Blocking":
        assert self._loop.run(self._target.__aenter__) is self._target
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._target.__aexit__, *error)

    def close(self) -> None:
        self._loop.run(getattr(self._target, "aclose", None) or self._target.close)


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def service(server: FakeServer) -> Service:
    return server.service


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["sync", "aio"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def connect(kind: str, server: FakeServer, clock: FakeClock, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Make a client of either kind: of the fake server, on the fake clock unless `is_real` says otherwise."""
    loop = request.getfixturevalue("loop") if kind == "aio" else None
    with ExitStack() as stack:

        def connect(target: str = "", is_real: bool = False, **settings: Any) -> Any:
            waits = {} if is_real else {"clock": clock} | ({"sleep": clock.sleep} if loop else {"wait": clock.wait})
            arguments = {"target": target or server.target, **waits, **settings}
            client = Blocking(loop, loop.run(AsyncClient, **arguments)) if loop else Client(**arguments)
            stack.callback(client.close)
            return client

        yield connect


@pytest.fixture
def client(connect: Callable[..., Any]) -> Any:
    return connect()


@pytest.fixture
def call(connect: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method of a new client of either kind; iterables are drained into a list."""

    def call(method: str, *args: Any, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
        value = getattr(connect(**(options or {})), method)(*args, **arguments)
        return list(value) if hasattr(value, "__next__") else value

    return call


@pytest.fixture
def sync_client(server: FakeServer, clock: FakeClock) -> Iterator[Client]:
    with Client(server.target, clock=clock, wait=clock.wait) as client:
        yield client
