import asyncio
from contextlib import aclosing

import grpc
import pytest

from client.aio import AsyncClient
from client.aio_batch_stream import FirstStatus
from client.errors import Cancelled, Unavailable, from_rpc_error
from client.request import Request


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


def test_batch_leaves_no_tasks_behind(server, running_async) -> None:
    async def main() -> None:
        async with AsyncClient(server.target) as client:
            before = asyncio.all_tasks()
            assert len([outcome async for outcome in client.generate_batch([Request("a"), Request("b")])]) == 2
            assert asyncio.all_tasks() == before

    running_async(main)


class EndingCall:
    """A call whose status can be set, and set again."""

    def __init__(self) -> None:
        self.callbacks = []
        self.status = None

    def add_done_callback(self, callback) -> None:
        self.callbacks.append(callback)

    def end(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.status = (code, details, metadata)
        for callback in self.callbacks:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self.status[0]

    async def details(self) -> str:
        return self.status[1]

    async def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self.status[2]


def test_status_that_the_server_gave_outlives_a_failure_to_write(refusing) -> None:
    call = EndingCall()
    status = FirstStatus(call)
    assert not status.is_known
    details = refusing("UNAVAILABLE", "draining", retry_after=(3, 0)).SerializeToString()
    call.end(grpc.StatusCode.UNAVAILABLE, "draining", (("grpc-status-details-bin", details),))
    call.end(grpc.StatusCode.INTERNAL, "Internal error from Core", ())
    error = from_rpc_error(status, "r-1")
    assert isinstance(error, Unavailable)
    assert (error.message, error.retry_after_seconds, error.request_id) == ("draining", 3.0, "r-1")
