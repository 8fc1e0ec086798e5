"""What a server learns of the caller's trace."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.errors import CallError
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.settings import Settings
from dragoman.client.sync import Client

trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra `tracing`")

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
PARENT = f"00-{TRACE:032x}-{SPAN:016x}-01"
ONCE = RetryPolicy(max_attempts=1)


class Heard(grpc.ServerInterceptor):
    """Notes each call's metadata; nothing is served."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def intercept_service(self, continuation: Any, details: Any) -> None:
        self.calls.append((details.method.rpartition("/")[2], dict(details.invocation_metadata)))

    def parents(self) -> dict[str, set[Any]]:
        heard: dict[str, set[Any]] = {}
        for method, metadata in self.calls:
            heard.setdefault(method, set()).add(metadata.get("traceparent"))
        return heard


@pytest.fixture
def heard() -> Iterator[tuple[Heard, str]]:
    interceptor = Heard()
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[interceptor])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield interceptor, f"127.0.0.1:{port}"
    server.stop(None).wait()


def active() -> Any:
    state = trace.TraceState([("vendor", "7")])
    context = trace.SpanContext(TRACE, SPAN, False, trace.TraceFlags(trace.TraceFlags.SAMPLED), state)
    return trace.use_span(trace.NonRecordingSpan(context))


def call_all(client: Client) -> None:
    for call in (
        lambda: client.generate("a"),
        lambda: list(client.stream("a")),
        lambda: client.score("a", "b"),
        lambda: list(client.generate_batch([Request("a")])),
        client.models,
    ):
        with pytest.raises(CallError):
            call()


def test_each_call_names_the_active_span(heard: tuple[Heard, str]) -> None:
    interceptor, target = heard
    with Client(target, retry=ONCE, token="secret") as client, active():
        call_all(client)
    methods = ("Generate", "GenerateStream", "Score", "GenerateBulk", "GenerateBatch", "ListModels")
    assert interceptor.parents() == {method: {PARENT} for method in methods}
    assert {metadata["tracestate"] for _, metadata in interceptor.calls} == {"vendor=7"}
    assert {metadata["authorization"] for _, metadata in interceptor.calls} == {"Bearer secret"}


def test_calls_on_other_threads_name_the_span_too(heard: tuple[Heard, str]) -> None:
    interceptor, target = heard
    with Client(target, retry=ONCE) as client, active(), pytest.raises(CallError):
        list(client.generate_many(["a", "b"]))
    assert interceptor.parents() == {"GenerateBulk": {PARENT}, "GenerateBatch": {PARENT}}


def test_without_a_span_nothing_is_named(heard: tuple[Heard, str]) -> None:
    interceptor, target = heard
    with Client(target, retry=ONCE) as client:
        call_all(client)
    assert {parent for parents in interceptor.parents().values() for parent in parents} == {None}


def test_calls_of_tasks_name_their_own_span(heard: tuple[Heard, str]) -> None:
    interceptor, target = heard

    async def run() -> None:
        async with AsyncClient(target, retry=ONCE) as client:
            with active():
                for call in (client.generate("a"), _drain(client.stream("a")), _drain(client.generate_batch([Request("a")]))):
                    with pytest.raises(CallError):
                        await call
            with pytest.raises(CallError):
                await client.score("a", "b")

    async def _drain(items: Any) -> None:
        async for _ in items:
            pass

    asyncio.run(run())
    assert interceptor.parents() == {
        "Generate": {PARENT},
        "GenerateStream": {PARENT},
        "GenerateBulk": {PARENT},
        "GenerateBatch": {PARENT},
        "Score": {None},
    }


def test_a_program_without_opentelemetry_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "opentelemetry.trace")
    with active():
        assert Settings("localhost:1", 1.0, ONCE, None, {}, float).metadata() == ()
