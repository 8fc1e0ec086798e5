import asyncio
from contextlib import aclosing

import grpc
import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.aio_batch_stream import EndStatus
from dragoman.client.errors import Cancelled, Unavailable
from dragoman.client.request import Request


@pytest.fixture(autouse=True)
def _old_server(service) -> None:
    """What a server does that knows GenerateBatch only: a request a message. The other kind is in `test_bulk.py`."""
    service.has_bulk = False


def test_slow_input_does_not_keep_outcomes_back(server, running_async) -> None:
    async def main() -> None:
        is_answered = asyncio.Event()

        async def requests():
            yield Request("a")
            await is_answered.wait()
            yield Request("b")

        async with AsyncClient(server.target) as client:
            outcomes = client.generate_batch(requests())
            assert (await anext(outcomes)).result.text == "A"
            is_answered.set()
            assert [outcome.result.text async for outcome in outcomes] == ["B"]

    running_async(main)


def test_input_is_read_as_outcomes_are_taken(server, running_async) -> None:
    read = []

    async def requests():
        for number in range(1000):
            read.append(number)
            yield Request(str(number))

    async def main() -> None:
        async with AsyncClient(server.target) as client, aclosing(client.generate_batch(requests(), concurrency=4)) as outcomes:
            for taken in range(1, 21):
                await anext(outcomes)
                assert len(read) <= taken + 4

    running_async(main)


@pytest.mark.parametrize("how", ["close", "client", "task"])
def test_batch_that_is_left_is_cancelled(server, service, held, running_async, how: str) -> None:
    stuck = held()
    service.behaviours["stuck"] = stuck

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            outcomes = client.generate_batch([Request("a"), Request("stuck")])
            assert (await anext(outcomes)).result.text == "A"
            await asyncio.to_thread(stuck.wait_until_began)
            if how == "close":
                await outcomes.aclose()
            elif how == "task":
                task = asyncio.create_task(anext(outcomes))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await client.close()
                with pytest.raises(Cancelled):
                    await anext(outcomes)
            await asyncio.to_thread(stuck.assert_cancelled)

    running_async(main)


def test_closed_client_refuses_a_batch(server, running_async) -> None:
    async def main() -> None:
        client = AsyncClient(server.target)
        await client.close()
        with pytest.raises(Cancelled, match="closed"):
            await anext(client.generate_batch([Request("a")]))

    running_async(main)


@pytest.mark.parametrize("num_breaks", [0, 2])
def test_batch_leaves_no_tasks_behind(server, service, failing, clock, running_async, num_breaks: int) -> None:
    service.breaks.extend([(0, failing("UNAVAILABLE"))] * num_breaks)

    async def main() -> None:
        async with AsyncClient(server.target, clock=clock, sleep=clock.sleep) as client:
            before = asyncio.all_tasks()
            assert len([outcome async for outcome in client.generate_batch([Request("a"), Request("b")])]) == 2
            while asyncio.all_tasks() != before:  # the server's end may come after its last answer
                await asyncio.sleep(0.01)

    running_async(main)


class EndingCall:
    """A call whose status can be set, and set again; the first one is told."""

    def __init__(self) -> None:
        self.callbacks = []
        self.status = None

    def add_done_callback(self, callback) -> None:
        self.callbacks.append(callback)

    def end(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.status = (code, details, metadata)
        while self.callbacks:
            self.callbacks.pop()(self)

    async def code(self) -> grpc.StatusCode:
        return self.status[0]

    async def details(self) -> str:
        return self.status[1]

    async def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self.status[2]


WRITING = (grpc.StatusCode.INTERNAL, "Internal error from Core", ())  # what grpc.aio says of a message it could not write


@pytest.mark.parametrize("is_first", [True, False])
def test_status_that_the_server_gave_is_told_in_spite_of_a_failure_to_write(refusing, running_async, is_first: bool) -> None:
    details = refusing("UNAVAILABLE", "draining", retry_after=(3, 0)).SerializeToString()
    told = (grpc.StatusCode.UNAVAILABLE, "draining", (("grpc-status-details-bin", details),))

    async def main() -> None:
        call = EndingCall()
        status = EndStatus(call)
        first, second = (told, WRITING) if is_first else (WRITING, told)
        call.end(*first)
        asking = asyncio.create_task(status.error())
        await asyncio.sleep(0)
        call.end(*second)
        error = await asking
        assert isinstance(error, Unavailable)
        assert (error.message, error.retry_after_seconds) == ("draining", 3.0)

    running_async(main)


def test_failure_to_write_that_nothing_explains_is_a_broken_connection(running_async, monkeypatch) -> None:
    monkeypatch.setattr("dragoman.client.aio_batch_stream._STATUS_SECONDS", 0.01)

    async def main() -> None:
        call = EndingCall()
        status = EndStatus(call)
        call.end(*WRITING)
        assert isinstance(await status.error(), Unavailable)

    running_async(main)


def test_call_that_the_server_ended_well_did_not_fail(running_async) -> None:
    async def main() -> None:
        call = EndingCall()
        status = EndStatus(call)
        call.end(*WRITING)
        call.end(grpc.StatusCode.OK, "", ())
        assert await status.error() is None

    running_async(main)
