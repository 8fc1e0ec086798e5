"""Streams, cancellation, closing and Ctrl-C: the pieces of an answer, and how calls under way are ended."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.calls import Scope, opened
from dragoman.client.errors import Cancelled, InternalError, Unavailable
from dragoman.client.lines import in_order
from dragoman.client.request import Request
from tests.client.fake_server import PATIENCE_SECONDS, Held, failing, interrupt
from tests.system.harness.server import wait_until

CLOSED = r"^the client is closed$"
CANCELLED = r"^the call was cancelled$"
STUCK = {
    "stream": lambda client, **options: client.stream("stuck", **options),
    "generate_many": lambda client, **options: client.generate_many(["a", "stuck"], **options),
    "generate_batch": lambda client, **options: client.generate_batch(map(Request, ("a", "stuck")), **options),
}
CALLS = {
    "generate": lambda client, **options: client.generate("x", **options),
    "score": lambda client, **options: client.score("x", "y", **options),
    "generate_many of nothing": lambda client, **options: list(client.generate_many([], **options)),
    **{method: lambda client, start=start, **options: next(start(client, **options)) for method, start in STUCK.items()},
}
OTHER_CALLS = (
    lambda client: client.models(),
    lambda client: client.model("en-de"),
    lambda client: client.is_ready(),
    lambda client: client.__enter__(),
)


def hold(service, method: str) -> Held:
    service.behaviours["stuck"] = held = Held("middle" if method == "stream" else "start")
    return held


def test_a_stream_ends_with_its_result_or_a_failure(client, call, service) -> None:
    with client.stream("abcd") as stream:
        with pytest.raises(RuntimeError, match="last piece"):
            _ = stream.result
        assert [piece.text for piece in stream] == ["AB", "CD"]
    stream.cancel()
    assert stream.result.text == "ABCD"
    assert list(stream) == []
    service.script.append(failing("UNAVAILABLE", place="end"))
    assert call("stream", "abcd")[-1].result.text == "ABCD", "how the call ends does not matter any more"
    assert len(service.requests) == 2
    service.script.append(failing("UNAVAILABLE", "engine died", place="middle"))
    stream = client.stream("abcd")
    assert next(stream).text == "AB"
    with pytest.raises(Unavailable, match="engine died"):
        next(stream)
    assert list(stream) == [] and len(service.requests) == 3
    with pytest.raises(RuntimeError):
        _ = stream.result

    def end_early(_: Any) -> type:
        return StopIteration

    end_early.place = "middle"
    service.script.append(end_early)
    with pytest.raises(InternalError, match="without its result") as caught:
        call("stream", "a", request_id="r-5")
    assert caught.value.request_id == "r-5"


def test_a_stream_starts_before_it_is_read(client, service) -> None:
    service.script.append(held := Held())
    with client.stream("abcd"):
        held.wait_until_began()
    held.assert_cancelled()


@pytest.mark.parametrize("has_bulk", [True, False])
@pytest.mark.parametrize("end", ["leave", "drop", "close"])
@pytest.mark.parametrize("method", STUCK)
def test_a_stream_that_is_left_is_cancelled_on_the_server(client, service, method: str, end: str, has_bulk: bool) -> None:
    service.has_bulk = has_bulk
    held, items = hold(service, method), STUCK[method](client)
    assert next(items)
    held.wait_until_began()
    if end == "drop":
        del items
        gc.collect()
    elif end == "close":
        with ThreadPoolExecutor() as threads:
            reader = threads.submit(next, items)
            client.close()
            with pytest.raises(Cancelled, match=CLOSED):
                reader.result(PATIENCE_SECONDS)
        assert list(items) == []
    elif method != "stream":
        items.close()
    else:
        with pytest.raises(ZeroDivisionError), items:
            _ = 1 / 0
    held.assert_cancelled()


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_cancelled_stream_raises_with_its_id(client, service, is_waiting: bool) -> None:
    service.script.append(held := Held("middle"))
    stream = client.stream("abcd", request_id="r-1")
    assert next(stream).text == "AB"
    held.wait_until_began()
    with ThreadPoolExecutor() as threads:
        if is_waiting:
            reader = threads.submit(next, stream)
        stream.cancel()
        held.assert_cancelled()
        with pytest.raises(Cancelled, match=CANCELLED) as caught:
            _ = reader.result(PATIENCE_SECONDS) if is_waiting else next(stream)
    assert caught.value.request_id == "r-1"
    assert list(stream) == []


def test_closing_ends_a_call_under_way_and_refuses_others(client, connect, service) -> None:
    with connect() as left:
        pass
    with pytest.raises(Cancelled, match=CLOSED):
        left.models()
    service.script.append(held := Held())
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.generate, "x", request_id="r-1")
        held.wait_until_began()
        client.close()
        with pytest.raises(Cancelled, match=CLOSED) as caught:
            call.result(PATIENCE_SECONDS)
    assert caught.value.request_id == "r-1"
    held.assert_cancelled()
    for start in (*CALLS.values(), *OTHER_CALLS):
        with pytest.raises(Cancelled, match=CLOSED):
            start(client)
    assert len(service.requests) == 1


@pytest.mark.parametrize("method", ["generate", *STUCK])
def test_a_scope_cancels_its_own_calls_and_starts_no_others(sync_client, service, method: str) -> None:
    service.script.append(other := Held())
    with ThreadPoolExecutor() as threads, sync_client.scope() as scope:
        undisturbed = threads.submit(sync_client.generate, "x")
        other.wait_until_began()
        held = hold(service, method)
        start = STUCK.get(method, lambda client, **options: iter([client.generate("stuck", **options)]))
        call = threads.submit(lambda: list(start(sync_client, scope=scope)))
        held.wait_until_began()
        scope.cancel()
        with pytest.raises(Cancelled, match=CANCELLED):
            call.result(PATIENCE_SECONDS)
        held.assert_cancelled()
        other.release()
        assert undisturbed.result(PATIENCE_SECONDS).text == "X"
        num_requests = len(service.requests)
        for ended in (CALLS["generate"], CALLS["score"], *STUCK.values()):
            with pytest.raises(Cancelled, match=CANCELLED):
                list(ended(sync_client, scope=scope))
    smaller = sync_client.scope()
    sync_client.close()
    with pytest.raises(Cancelled, match=CLOSED):
        sync_client.generate("x", scope=smaller)
    assert len(service.requests) == num_requests


def test_the_client_keeps_no_stream_that_has_ended(sync_client, service) -> None:
    def num_scopes() -> int:
        gc.collect()
        return sum(type(thing) is Scope for thing in gc.get_objects())

    before = num_scopes()
    list(sync_client.stream("ab"))
    sync_client.stream("ab").cancel()
    service.behaviours["bad"] = failing("INTERNAL")
    with pytest.raises(InternalError):
        list(sync_client.stream("bad"))
    wait_until(lambda: num_scopes() <= before, "the scopes of ended streams are gone")


@pytest.mark.parametrize("method", ["generate", *STUCK])
def test_a_cancelled_task_cancels_its_call(loop, server, service, method: str) -> None:
    held = hold(service, method)

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            if method == "generate":
                task = asyncio.create_task(client.generate("stuck"))
            else:
                items = STUCK[method](client)
                assert await anext(items)
                task = asyncio.create_task(anext(items))
            await asyncio.to_thread(held.wait_until_began)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(held.assert_cancelled)
            if method != "generate":
                assert [item async for item in items] == []

    loop.run(main)
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient("localhost")


PROGRAM = """
import asyncio, sys
from dragoman import AsyncClient, Client, Request

target, kind, method = sys.argv[1:]
texts = ["a", "stuck"]
arguments = {"score": ("stuck", "x"), "generate_many": (texts,), "generate_batch": (map(Request, texts),)}.get(method, ["stuck"])

async def main():
    async with AsyncClient(target) as client:
        value = getattr(client, method)(*arguments)
        await value if method in ("generate", "score") else [item async for item in value]

try:
    if kind == "aio":
        asyncio.run(main())
    else:
        with Client(target) as client:
            list(getattr(client, method)(*arguments))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("method", ["generate", "score", *STUCK])
def test_an_interrupt_ends_each_call_in_silence_and_frees_the_server(server, service, kind: str, method: str) -> None:
    held = hold(service, method)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", PROGRAM, server.target, kind, method]
    with subprocess.Popen(command, env={**os.environ, "GRPC_VERBOSITY": "NONE"}, **pipes) as process:
        held.wait_until_began()
        assert interrupt(process) == (b"", b"")
        assert process.returncode == 130
    held.assert_cancelled()


def test_the_main_thread_leaves_the_start_of_calls_to_another() -> None:
    """An interrupt during the start would leave a call that nothing serves."""
    assert opened(threading.current_thread) is not threading.main_thread()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: opened(threading.current_thread) is threading.current_thread()).result()
    with pytest.raises(ZeroDivisionError):
        opened(lambda: 1 / 0)


def test_work_is_in_order_whichever_item_is_finished_first() -> None:
    last, read = threading.Event(), []

    def work(item: int, scope: Scope) -> int:
        assert item or last.wait(PATIENCE_SECONDS)
        if item == 3:
            last.set()
        return item

    results = in_order((read.append(number) or number for number in range(9)), work, Scope(), concurrency=2)
    assert read == [] and next(results) == 0 and read == [0, 1, 2, 3]
    assert next(results) == 1 and read == [0, 1, 2, 3, 4]
    assert list(results) == [*range(2, 9)]
    with pytest.raises(ValueError, match=r"^concurrency: 0 is"):
        in_order([], work, Scope(), concurrency=0)
