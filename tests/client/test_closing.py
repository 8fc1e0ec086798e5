"""What callers read who use a client after its end, and who is waiting when it comes."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.errors import Cancelled
from dragoman.client.request import Request
from dragoman.client.sync import Client

PATIENCE_SECONDS = 60
CLOSED = r"^the client is closed$"
CALLS: dict[str, Callable] = {
    "generate": lambda client: client.generate("x"),
    "stream": lambda client: client.stream("x"),
    "generate_many": lambda client: client.generate_many(["x"]),
    "generate_many of nothing": lambda client: client.generate_many([]),
    "generate_batch": lambda client: client.generate_batch([Request("x")]),
    "score": lambda client: client.score("x", "y"),
    "models": lambda client: client.models(),
    "model": lambda client: client.model("en-de"),
    "is_ready": lambda client: client.is_ready(),
}


@pytest.mark.parametrize("method", CALLS)
def test_closed_client_says_so(server, service, method: str) -> None:
    client = Client(server.target)
    client.close()
    client.close()
    with pytest.raises(Cancelled, match=CLOSED):
        CALLS[method](client)
    assert service.requests == []


@pytest.mark.parametrize("method", CALLS)
def test_closed_client_for_asyncio_says_so(server, service, running_async, method: str) -> None:
    async def main() -> None:
        client = AsyncClient(server.target)
        await client.close()
        await client.close()
        with pytest.raises(Cancelled, match=CLOSED):
            answer = CALLS[method](client)
            await answer

    running_async(main)
    assert service.requests == []


def test_closed_client_is_not_entered_again(server, running_async) -> None:
    with Client(server.target) as client:
        assert client.generate("x").text == "X"
    with pytest.raises(Cancelled, match=CLOSED), client:
        pass

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            assert (await client.generate("x")).text == "X"
        with pytest.raises(Cancelled, match=CLOSED):
            async with client:
                pass

    running_async(main)


def test_calls_and_streams_that_a_close_ends_say_so(server, service, held) -> None:
    unary, streamed = held(), held("middle")
    service.behaviours = {"unary": unary, "streamed": streamed}
    client = Client(server.target)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.generate, "unary", request_id="r-1")
        unary.wait_until_began()
        stream = client.stream("streamed", request_id="r-2")
        assert next(stream).text == "STRE"
        streamed.wait_until_began()
        client.close()
        for wait, request_id in ((lambda: call.result(PATIENCE_SECONDS), "r-1"), (lambda: next(stream), "r-2")):
            with pytest.raises(Cancelled, match=CLOSED) as caught:
                wait()
            assert caught.value.request_id == request_id
    assert list(stream) == []


def test_calls_and_streams_of_asyncio_that_a_close_ends_say_so(server, service, held, running_async) -> None:
    unary, streamed = held(), held("middle")
    service.behaviours = {"unary": unary, "streamed": streamed}

    async def main() -> None:
        client = AsyncClient(server.target)
        call = asyncio.create_task(client.generate("unary", request_id="r-1"))
        await asyncio.to_thread(unary.wait_until_began)
        stream = client.stream("streamed", request_id="r-2")
        assert (await anext(stream)).text == "STRE"
        await asyncio.to_thread(streamed.wait_until_began)
        await client.close()
        for wait, request_id in ((call, "r-1"), (anext(stream), "r-2")):
            with pytest.raises(Cancelled, match=CLOSED) as caught:
                await wait
            assert caught.value.request_id == request_id
        assert [piece async for piece in stream] == []

    running_async(main)


def test_many_answers_and_batches_under_way_say_so(server, service, held, running_async) -> None:
    for make in (
        lambda client: client.generate_many(["a", "stuck"]),
        lambda client: client.generate_batch(map(Request, ("a", "stuck"))),
    ):
        service.behaviours = {"stuck": (behaviour := held())}
        client = Client(server.target)
        answers = make(client)
        assert next(answers)
        behaviour.wait_until_began()
        client.close()
        with pytest.raises(Cancelled, match=CLOSED):
            next(answers)
        behaviour.assert_cancelled()

    async def main(make: Callable) -> None:
        service.behaviours = {"stuck": (behaviour := held())}
        client = AsyncClient(server.target)
        answers = make(client)
        assert await anext(answers)
        await asyncio.to_thread(behaviour.wait_until_began)
        await client.close()
        with pytest.raises(Cancelled, match=CLOSED):
            await anext(answers)
        await asyncio.to_thread(behaviour.assert_cancelled)

    running_async(lambda: main(lambda client: client.generate_many(["a", "stuck"])))
    running_async(lambda: main(lambda client: client.generate_batch(map(Request, ("a", "stuck")))))


def test_scope_that_was_cancelled_first_says_that(server) -> None:
    with Client(server.target) as client:
        scope = client.scope()
        scope.cancel()
        with pytest.raises(Cancelled, match=r"^the call was cancelled$"):
            client.generate("x", scope=scope)
        smaller = client.scope()
    with pytest.raises(Cancelled, match=CLOSED):
        client.generate("x", scope=smaller)


def test_threads_that_call_while_the_client_closes_are_all_told(server, service) -> None:
    enough = threading.Event()

    def call_on(client: Client, number: int) -> str:
        calls = [
            lambda: client.generate("a"),
            lambda: list(client.stream("ab")),
            lambda: list(client.generate_many(["a", "", "b"], concurrency=2)),
            lambda: list(client.generate_batch([Request("a"), Request("b")])),
        ]
        while True:
            try:
                calls[number % len(calls)]()
            except Cancelled as error:
                return error.message
            if len(service.requests) >= 100 and len(service.batches) >= 10:
                enough.set()

    client = Client(server.target)
    with ThreadPoolExecutor(8) as threads:
        ends = [threads.submit(call_on, client, number) for number in range(8)]
        assert enough.wait(PATIENCE_SECONDS)
        client.close()
        assert {end.result(PATIENCE_SECONDS) for end in ends} == {"the client is closed"}


def test_tasks_that_call_while_the_client_closes_are_all_told(server, service, running_async) -> None:
    async def call_on(client: AsyncClient, number: int, enough: asyncio.Event) -> str:
        while True:
            try:
                match number % 4:
                    case 0:
                        await client.generate("a")
                    case 1:
                        [_ async for _ in client.stream("ab")]
                    case 2:
                        [_ async for _ in client.generate_many(["a", "", "b"], concurrency=2)]
                    case _:
                        [_ async for _ in client.generate_batch([Request("a"), Request("b")])]
            except Cancelled as error:
                return error.message
            if len(service.requests) >= 100 and len(service.batches) >= 10:
                enough.set()

    async def main() -> None:
        client, enough = AsyncClient(server.target), asyncio.Event()
        ends = [asyncio.create_task(call_on(client, number, enough)) for number in range(8)]
        await enough.wait()
        await client.close()
        assert {await end for end in ends} == {"the client is closed"}

    running_async(main)


def test_close_between_the_start_of_a_call_and_its_wait_says_so(server, service, held, monkeypatch) -> None:
    """The channel's own words, "Channel closed!", came through here."""
    service.script.append(held())
    client = Client(server.target)
    start = client._stub.Generate.future

    def start_and_close(*args, **arguments):
        call = start(*args, **arguments)
        client.close()
        return call

    monkeypatch.setattr(client._stub.Generate, "future", start_and_close)
    with pytest.raises(Cancelled, match=CLOSED) as caught:
        client.generate("x", request_id="r-1")
    assert caught.value.request_id == "r-1"
