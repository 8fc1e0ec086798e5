import asyncio
import gc
from contextlib import aclosing

import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.errors import Cancelled, InternalError, InvalidArgument, Unavailable
from dragoman.client.retry import RetryPolicy

PATIENCE_SECONDS = 60


def test_client_outside_of_a_loop_fails_at_once(server) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient(server.target)


def test_cancelled_task_cancels_the_call(server, service, held, running_async) -> None:
    behaviour = held()
    service.script.append(behaviour)

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            task = asyncio.create_task(client.generate("x"))
            await asyncio.to_thread(behaviour.wait_until_began)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(behaviour.assert_cancelled)

    running_async(main)


def test_timeout_around_a_call_cancels_it(server, service, held, running_async) -> None:
    behaviour = held()
    service.script.append(behaviour)

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    asyncio.create_task(expire(limit))  # noqa: RUF006
                    await client.generate("x")
            await asyncio.to_thread(behaviour.assert_cancelled)

    async def expire(limit: asyncio.Timeout) -> None:
        await asyncio.to_thread(behaviour.wait_until_began)
        limit.reschedule(asyncio.get_running_loop().time())

    running_async(main)


def test_cancelled_task_cancels_its_stream(server, service, held, running_async) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            stream = client.stream("abcd")
            assert (await anext(stream)).text == "AB"
            task = asyncio.create_task(anext(stream))
            await asyncio.to_thread(behaviour.wait_until_began)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(behaviour.assert_cancelled)
            assert [piece async for piece in stream] == []

    running_async(main)


def test_cancelled_stream_tells_its_reader(server, service, held, running_async) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            stream = client.stream("abcd", request_id="r-1")
            await anext(stream)
            reader = asyncio.create_task(anext(stream))
            await asyncio.to_thread(behaviour.wait_until_began)
            stream.cancel()
            with pytest.raises(Cancelled) as caught:
                await reader
            assert caught.value.request_id == "r-1"
            await asyncio.to_thread(behaviour.assert_cancelled)

    running_async(main)


def test_leaving_the_block_cancels_the_stream(server, service, held, running_async) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            async with client.stream("abcd") as stream:
                await anext(stream)
                await asyncio.to_thread(behaviour.wait_until_began)
            await asyncio.to_thread(behaviour.assert_cancelled)

    running_async(main)


def test_dropping_the_stream_cancels(server, service, held, running_async) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            stream = client.stream("abcd")
            await anext(stream)
            await asyncio.to_thread(behaviour.wait_until_began)
            del stream
            gc.collect()
            await asyncio.to_thread(behaviour.assert_cancelled)

    running_async(main)


def test_stream_cancelled_before_it_is_read_asks_nothing_more(server, service, clock, running_async) -> None:
    async def main() -> None:
        async with AsyncClient(server.target, clock=clock, sleep=clock.sleep) as client:
            stream = client.stream("abcd")
            stream.cancel()
            with pytest.raises(Cancelled):
                await anext(stream)

    running_async(main)
    assert clock.waits == []


def test_result_is_there_after_the_last_piece_only(server, running_async) -> None:
    async def main() -> None:
        async with AsyncClient(server.target) as client, client.stream("abcd") as stream:
            with pytest.raises(RuntimeError, match="last piece"):
                _ = stream.result
            assert [piece.text async for piece in stream] == ["AB", "CD"]
            assert stream.result.text == "ABCD"
            assert [piece async for piece in stream] == []

    running_async(main)


def test_failed_stream_stays_ended(server, service, failing, running_async) -> None:
    service.script.append(failing("INTERNAL", "incident 7", place="middle"))

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            stream = client.stream("abcd")
            await anext(stream)
            with pytest.raises(InternalError, match="incident 7"):
                await anext(stream)
            assert [piece async for piece in stream] == []

    running_async(main)


def test_close_tells_those_who_wait(server, service, held, running_async) -> None:
    unary, streamed = held(), held("middle")
    service.script.extend([unary, streamed])

    async def main() -> None:
        client = AsyncClient(server.target)
        call = asyncio.create_task(client.generate("x"))
        await asyncio.to_thread(unary.wait_until_began)
        stream = client.stream("abcd")
        await anext(stream)
        reader = asyncio.create_task(anext(stream))
        await asyncio.to_thread(streamed.wait_until_began)
        await client.close()
        for task in (call, reader):
            with pytest.raises(Cancelled):
                await task
        with pytest.raises(Cancelled, match="closed"):
            await client.generate("y")
        with pytest.raises(Cancelled, match="closed"):
            client.stream("y")

    running_async(main)
    unary.assert_cancelled()
    streamed.assert_cancelled()


def test_client_recovers_when_the_server_comes_back_on_its_port(server, running_async) -> None:
    policy = RetryPolicy(max_attempts=10_000, initial_backoff_seconds=0.02, multiplier=1, jitter=0)

    async def main() -> None:
        async with (
            AsyncClient(server.target, retry=RetryPolicy(max_attempts=1)) as hasty,
            AsyncClient(server.target, retry=policy) as patient,
        ):
            assert (await patient.generate("one")).text == "ONE"
            await asyncio.to_thread(server.stop)
            with pytest.raises(Unavailable):
                await hasty.generate("two")
            call = asyncio.create_task(patient.generate("three"))
            await asyncio.to_thread(server.start)
            assert (await call).text == "THREE"

    running_async(main)


def test_client_does_not_wait_where_another_could_not_connect(server, running_async) -> None:
    settings = {"retry": RetryPolicy(max_attempts=1), "options": {"grpc.initial_reconnect_backoff_ms": 60_000}}
    server.stop()

    async def main() -> None:
        async with AsyncClient(server.target, **settings) as early, AsyncClient(server.target, **settings) as late:
            with pytest.raises(Unavailable):
                await early.generate("one")
            await asyncio.to_thread(server.start)
            assert (await late.generate("two")).text == "TWO"

    running_async(main)


def test_generate_many_takes_an_async_input_as_answers_are_taken(server, service, running_async) -> None:
    read = []

    async def texts():
        for number in range(1000):
            read.append(number)
            yield str(number)

    async def main() -> None:
        async with AsyncClient(server.target) as client, aclosing(client.generate_many(texts(), concurrency=4)) as answers:
            for taken in range(1, 21):
                assert (await anext(answers)).text == str(taken - 1)
                assert len(read) <= taken + 8

    running_async(main)
    assert service.max_running <= 4


def test_generate_many_runs_calls_side_by_side(server, service, held, running_async) -> None:
    behaviours = [held() for _ in range(4)]
    service.script.extend(behaviours)

    async def release() -> None:
        for behaviour in behaviours:
            await asyncio.to_thread(behaviour.wait_until_began)
        for behaviour in reversed(behaviours):
            behaviour.let_go()

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            releasing = asyncio.create_task(release())
            answers = [answer.text async for answer in client.generate_many(list("abcdefgh"), concurrency=4)]
            await releasing
            assert answers == list("ABCDEFGH")

    running_async(main)
    assert service.max_running == 4


def test_generate_many_fails_in_its_turn_and_cancels_the_rest(server, service, failing, held, running_async) -> None:
    stuck = held()

    def fail(context) -> None:
        stuck.wait_until_began()
        failing("INVALID_ARGUMENT", "text: blank")(context)

    service.behaviours = {"bad": fail, "stuck": stuck}

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            answers = client.generate_many(["good", "bad", "stuck"], concurrency=3)
            assert (await anext(answers)).text == "GOOD"
            with pytest.raises(InvalidArgument, match="text: blank"):
                await anext(answers)
            await asyncio.to_thread(stuck.assert_cancelled)

    running_async(main)


def test_input_that_fails_is_told_after_what_came_before_it(server, running_async) -> None:
    def texts():
        yield from "ab"
        raise OSError("disk")

    async def main() -> None:
        answers = []
        async with AsyncClient(server.target) as client:
            with pytest.raises(OSError, match="disk"):
                async for answer in client.generate_many(texts()):
                    answers.append(answer.text)
        assert answers == ["A", "B"]

    running_async(main)
