"""Connections over gRPC, with frames that no gRPC client sends: number, idle time, calls, watches; health and reflection."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.callers import connection
from tests.system.harness.grpc_client import failure
from tests.system.harness.http2 import DATA, GOAWAY, HEADERS, PING, PREFACE, RST_STREAM, Http2, frame
from tests.system.harness.server import Server, serving, stopped, wait_until

pytestmark = pytest.mark.e2e

CHECK, WATCH, GENERATE = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/dragoman.v1.Generation/Generate"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
RESOURCE_EXHAUSTED, REFUSED_STREAM, MAX_CONNECTIONS = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], 7, 6
SERVING, UNKNOWN = HealthCheckResponse.SERVING, HealthCheckResponse.SERVICE_UNKNOWN
REQUEST = GenerateRequest(model="alpha", text="a")
FLAGS = {
    "max-connections": MAX_CONNECTIONS,
    "max-connection-idle-seconds": 0.5,
    "max-concurrent-streams": 70,
}
MAX_STREAMS, MAX_WATCHES = 64, 16
"""Limits of a connection, as in docs/serve.md."""


@pytest.fixture(scope="module")
def server(translators: Path) -> Iterator[Server]:
    with serving(translators, *(text for name, value in FLAGS.items() for text in (f"--{name}", str(value)))) as started:
        yield started
        assert started.terminate() == 0
        assert not started.problems()


def is_served(port: int) -> bool:
    with suppress(OSError, EOFError), Http2(port) as connection:
        return status(connection) == 0
    return False


@pytest.fixture
def port(server: Server) -> int:
    """The port, once no connection of the test before is left."""
    number = server.port

    def is_free() -> bool:
        with ExitStack() as stack, suppress(OSError, EOFError):
            return all(not status(stack.enter_context(Http2(number))) for _ in range(MAX_CONNECTIONS))
        return False

    wait_until(is_free, "connections of the test before have ended")
    wait_until(lambda: is_served(number), "those of this fixture have ended")
    return number


@pytest.fixture
def channel(server: Server, port: int) -> Iterator[grpc.Channel]:
    with connection(server) as opened:
        yield opened


def status(connection: Http2, path: str = CHECK, message: bytes = b"") -> int:
    return connection.wait_for_status(connection.call(path, message))


def ends(connection: socket.socket) -> bool:
    with suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return True


def test_connections_are_bounded_and_one_that_ends_makes_room(port: int) -> None:
    with ExitStack() as stack:
        held: list[Http2] = []

        def hold_one() -> bool:
            with suppress(OSError, EOFError):
                connection = stack.enter_context(Http2(port))
                connection.call(GENERATE, None, is_last=False)  # with a call that has begun it is not idle
                if status(connection) == 0:
                    held.append(connection)
            return len(held) == MAX_CONNECTIONS

        wait_until(hold_one, "there is room, also where the last connection of the fixture was")
        with pytest.raises((OSError, EOFError)), Http2(port) as refused:
            status(refused)
        held[0].socket.close()
        wait_until(lambda: is_served(port), "there is room again")
        assert status(held[1]) == 0, "the others are served all along"


def test_connections_over_http_are_bounded_by_themselves(server: Server, port: int) -> None:
    address = "127.0.0.1", int(server.http_address.rpartition(":")[2])
    head = b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(MAX_CONNECTIONS)]
        for each in held:
            each.sendall(head)  # an idle one would be closed soon
        with socket.create_connection(address, 30) as refused:
            assert ends(refused)
        assert is_served(port), "the other port has its own limit"
        held.pop().close()

        def has_room() -> bool:
            with suppress(OSError), socket.create_connection(address, 30) as other:
                other.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                return other.recv(64).startswith(b"HTTP/1.1 200")
            return False

        wait_until(has_room, "there is room again")
        held[0].sendall(b"}" * 9)
        assert held[0].recv(64).startswith(b"HTTP/1.1 400"), "the others are served all along"


def test_idle_connections_are_closed_and_those_with_calls_are_not(port: int) -> None:
    with Http2(port) as idle, Http2(port) as busy:
        busy.wait_for(DATA, busy.call(WATCH))
        assert status(idle) == 0
        idle.wait_for_end()
        assert status(busy) == 0


def test_connections_without_a_handshake_and_clients_that_have_vanished_are_closed(port: int) -> None:
    """The last one acknowledges nothing; gRPC core would wait a minute for it, whatever its keepalive timeout."""
    with ExitStack() as stack:
        silent = stack.enter_context(Http2(port))
        silent.call(WATCH)
        held = [silent.socket]
        for greeting in (b"", PREFACE, PREFACE + b"\0\0\0", b"GET / HTTP/1.1\r\n\r\n"):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)))
            held[-1].sendall(greeting)
        assert all(map(ends, held))


def test_calls_of_a_connection_are_bounded_and_taken_back_ones_do_not_pile_up(port: int, server: Server) -> None:
    """A flood of cancelled calls on one connection used to take gigabytes: each waited to be taken up."""
    with Http2(port) as connection, stopped(*server.engines("alpha")):
        streams = [connection.call(GENERATE, REQUEST.SerializeToString()) for _ in range(72)]
        assert [connection.wait_for(RST_STREAM).stream for _ in range(2)] == streams[70:]
        with Http2(port) as other:
            assert status(other) == 0
    with Http2(port) as connection:
        assert status(connection) == 0
        with stopped(server.process.pid):  # none is taken up meanwhile
            for _ in range(1000):
                connection.socket.sendall(frame(RST_STREAM, 0, connection.call(GENERATE, None, is_last=False), b"\0\0\0\x08"))
        assert struct.unpack("!I", connection.wait_for(RST_STREAM).payload)[0] == REFUSED_STREAM
    with Http2(port) as other:
        assert status(other) == 0
    server.wait_until_idle()


def test_too_many_pings_and_too_long_headers_are_refused(port: int, channel: grpc.Channel) -> None:
    with Http2(port) as connection:
        connection.socket.sendall(frame(PING, 0, 0, b"12345678") * 10)
        assert b"too_many_pings" in connection.wait_for(GOAWAY).payload
    send = GenerationStub(channel).Generate
    watch = HealthStub(channel).Watch(HealthCheckRequest())  # the connection is never idle
    assert next(watch).status == SERVING
    for name, value in (("x-long", "x" * 17_000), ("authorization", "x" * 100_000)):
        assert failure(lambda n=name, v=value: send(GenerateRequest(), metadata=((n, v),)))[0] == "RESOURCE_EXHAUSTED"
    watch.cancel()


def stays_open(request_id: str) -> Iterator[GenerateRequest]:
    yield GenerateRequest(model="alpha", text="a", request_id=request_id)
    with suppress(AssertionError):
        wait_until(lambda: False, "never", 20)


def test_batch_streams_of_a_connection_are_bounded(channel: grpc.Channel) -> None:
    stub = GenerationStub(channel)
    names = list(map(str, range(MAX_STREAMS)))
    held = [stub.GenerateBatch(stays_open(name)) for name in names]
    assert [next(call).request_id for call in held] == names
    code, message = failure(lambda: list(stub.GenerateBatch(stays_open("one more"))))
    assert code == "RESOURCE_EXHAUSTED" and message.startswith(f"streams of requests: {MAX_STREAMS} on one connection")
    held[0].cancel()

    def has_room() -> bool:
        with suppress(grpc.RpcError):
            return bool(list(stub.GenerateBatch(iter([GenerateRequest(model="alpha", text="a", request_id="again")]))))
        return False

    wait_until(has_room, "there is room for another stream")
    for call in held:
        call.cancel()


def test_watches_of_a_connection_are_bounded(port: int) -> None:
    def watch(connection: Http2) -> int | None:
        """Return None for a watch that has its first message, else its status."""
        stream = connection.call(WATCH)
        found = connection.wait_for(HEADERS, stream)
        if found.status is None:
            connection.wait_for(DATA, stream)
        return found.status

    with Http2(port) as first, Http2(port) as second:
        assert [watch(first) for _ in range(MAX_WATCHES + 1)] == [None] * MAX_WATCHES + [RESOURCE_EXHAUSTED]
        assert watch(second) is None, "another connection has places of its own"
        assert status(first) == 0, "a single check needs no place"


def test_health_has_names_of_models_and_services_and_refuses_others(channel: grpc.Channel) -> None:
    health = HealthStub(channel)
    for name in ("", "readiness", "liveness", "dragoman.v1.Generation", "inference.GRPCInferenceService", "alpha", "beta"):
        assert health.Check(HealthCheckRequest(service=name)).status == SERVING, name
    for name in ("nobody", "x" * 100_000):
        assert failure(lambda name=name: health.Check(HealthCheckRequest(service=name)))[0] == "NOT_FOUND"
    watch = health.Watch(HealthCheckRequest(service="nobody"))
    assert next(watch).status == UNKNOWN
    watch.cancel()
    message = "service: 1025 characters; at most 1024 are allowed"
    assert failure(lambda: next(health.Watch(HealthCheckRequest(service="x" * 1025)))) == ("INVALID_ARGUMENT", message)
    assert failure(lambda: health.List(HealthListRequest()))[0] == "UNIMPLEMENTED"


def test_reflection_streams_of_a_connection_are_bounded(port: int) -> None:
    question = ServerReflectionRequest(list_services="").SerializeToString()
    with Http2(port) as connection:
        streams = [connection.call(REFLECTION, question, is_last=False) for _ in range(4)]
        for stream in streams:
            connection.wait_for(DATA, stream)
        assert status(connection, REFLECTION, question) == RESOURCE_EXHAUSTED
        connection.send(streams[0], question, is_last=True)
        assert connection.wait_for_status(streams[0]) == 0
        assert status(connection, REFLECTION, question) == 0
