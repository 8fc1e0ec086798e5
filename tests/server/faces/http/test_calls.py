"""What happens around requests over HTTP: who calls, how long it may take, who leaves, how much may come, and the drain."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientSession, TCPConnector

from dragoman.server.config import ServerConfig
from dragoman.server.faces.grpc import connections
from dragoman.server.faces.http import reading
from tests.certificates import make_certificates
from tests.server.faces.grpc.conftest import eventually

JSON = {"Content-Type": "application/json"}
PATHS = ["/v1/generate", "/v1/generate:stream", "/v1/score"]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("web:s3cret\n")
    return path


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}])
@pytest.mark.parametrize("path", PATHS)
def test_a_request_of_nobody_known_is_refused_before_it_is_read(
    serve_http: Any, logged: Any, tokens: Path, path: str, headers: dict[str, str]
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"text": '
        await asyncio.sleep(60)

    async def run() -> None:
        async with serve_http(auth_tokens_file=tokens) as world:
            async with asyncio.timeout(20), world.session.post(world.url(path), data=body(), headers=headers | JSON) as response:
                assert (response.status, (await response.json())["code"]) == (401, 16)
                assert response.headers["WWW-Authenticate"] == "Bearer"
            assert world.engine.requests == [] and world.records() == {("", "UNAUTHENTICATED"): 1}
            assert "s3cret" not in str(logged())

    asyncio.run(run())


def test_a_caller_is_known_by_its_token_and_an_id_is_echoed(serve_http: Any, logged: Any, tokens: Path) -> None:
    async def run() -> None:
        async with serve_http(auth_tokens_file=tokens) as world:
            headers = {"Authorization": "Bearer s3cret", "X-Request-Id": "h-1"}
            async with world.post("/v1/generate", {"text": "a"}, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "h-1" == (await response.json())["requestId"]
            async with world.post("/v1/generate", {"text": "a", "requestId": "b-1"}, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "b-1"
            await eventually(lambda: sum(line["event"] == "call" for line in logged()) == 2)
            [line, _] = [line for line in logged() if line["event"] == "call"]
            assert (line["caller"], line["request_id"], line["method"], line["code"]) == ("web", "h-1", "POST /v1/generate", "OK")

    asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
def test_who_leaves_frees_the_slot(serve_http: Any, path: str) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            asking = asyncio.create_task(world.ask(path, {"text": "a"}))
            await world.engine.arrived.wait()
            assert world.server.num_running == 1
            asking.cancel()
            async with asyncio.timeout(20):
                await world.engine.left.wait()
            await eventually(lambda: world.server.num_running == 0)
            assert len(world.engine.cancelled) == 1
            assert world.records() == {("en-de", "CANCELLED"): 1}

    asyncio.run(run())


def test_who_leaves_with_a_body_half_sent_is_counted_once(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            _, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            writer.write(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
            await eventually(lambda: len(world.http._runner.server.connections) == 1)
            await asyncio.sleep(0.05)
            writer.close()
            await eventually(lambda: world.records() == {("", "CANCELLED"): 1})
            assert world.server.num_running == 0

    asyncio.run(run())


@pytest.mark.parametrize(("said", "status"), [("1n", 504), ("5S", 200), ("99999999H", 200), ("0m", 504)])
def test_a_deadline_comes_in_a_header(serve_http: Any, said: str, status: int) -> None:
    async def run() -> None:
        async with serve_http() as world:
            found, _ = await world.ask("/v1/generate", {"text": "a"}, headers={"Grpc-Timeout": said})
            assert found == status
            for request in world.engine.requests:
                assert request.deadline is not None

    asyncio.run(run())


@pytest.mark.parametrize("said", ["", "5", "S", "-5S", "5s", "123456789S", "1.5S", "5S ,5S"])
def test_what_is_no_time_is_refused(serve_http: Any, said: str) -> None:
    async def run() -> None:
        async with serve_http() as world:
            status, message = await world.refused("/v1/generate", {"text": "a"}, headers={"Grpc-Timeout": said})
            assert status == 400 and message.startswith("Grpc-Timeout: ")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_bodies_of_other_kinds_are_refused(serve_http: Any, headers: dict[str, str], status: int) -> None:
    async def run() -> None:
        async with serve_http() as world:
            sent = world.session.post(world.url("/v1/generate"), data=b'{"text": "a"}', headers=headers)
            async with sent as response:
                assert response.status == status

    asyncio.run(run())


def test_a_body_that_says_it_is_too_large_is_not_read(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http(max_message_bytes=2048) as world:
            head = "POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4096\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            writer.write(head.encode())
            async with asyncio.timeout(20):
                assert (await reader.readline()).split()[1] == b"413"
            writer.close()

    asyncio.run(run())


def test_a_body_that_turns_out_too_large_is_refused(serve_http: Any) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 1024

    async def run() -> None:
        async with serve_http(max_message_bytes=2048) as world:
            try:
                async with world.session.post(world.url("/v1/generate"), data=body(), headers=JSON) as response:
                    assert response.status == 413
            except ClientConnectionError:  # it may be told while it still sends
                pass
            await eventually(lambda: world.records() == {("", "INVALID_ARGUMENT"): 1})

    asyncio.run(run())


def test_a_body_that_does_not_come_is_given_up(serve_http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_SECONDS", 0.1)

    async def run() -> None:
        async with serve_http() as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            writer.write(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
            async with asyncio.timeout(20):
                assert (await reader.readline()).split()[1] == b"408"
            writer.close()

    asyncio.run(run())


def test_a_connection_without_a_request_is_closed(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http(max_connection_idle_seconds=0.2) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            writer.write(b"POST /v1/gen")
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(run())


def test_a_connection_too_many_is_closed(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http(max_connections=2) as world:
            held = [await asyncio.open_connection("127.0.0.1", world.http.port) for _ in range(2)]
            await eventually(lambda: len(world.http._runner.server.connections) == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            for _, each in [*held, (reader, writer)]:
                each.close()

    asyncio.run(run())


def test_connections_that_shake_no_hands_count_and_are_forgotten_when_they_go(serve_http: Any, tmp_path: Path) -> None:
    folder = make_certificates(tmp_path, {"server": "DNS:localhost,IP:127.0.0.1"})
    files = {"tls_certificate": folder / "server.pem", "tls_key": folder / "server.key"}

    async def run() -> None:
        async with serve_http(max_connections=2, **files) as world:
            held = [await asyncio.open_connection("127.0.0.1", world.http.port) for _ in range(2)]
            await eventually(lambda: len(world.http._listening._shaking) == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            async with asyncio.timeout(5):  # a handshake would have ten seconds
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            for _, each in [*held, (reader, writer)]:
                each.close()
            await eventually(lambda: not world.http._listening._shaking)
            context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            async with ClientSession(connector=TCPConnector(ssl=context)) as session:
                url = f"https://127.0.0.1:{world.http.port}/v1/generate"
                async with session.post(url, json={"text": "a"}) as response:
                    assert response.status == 200
                assert not world.http._listening._shaking and len(world.http._runner.server.connections) == 1

    asyncio.run(run())


def test_there_are_files_for_the_connections_of_both_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []
    monkeypatch.setattr(connections, "make_room", asked.append)
    for http in (True, False):
        connections.connection_options(ServerConfig(models=tmp_path, max_connections=10, http=http))
    assert asked == [20, 10]


HEAD = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# What proxies and servers may read in two ways, and what is no HTTP at all.
UNREADABLE = {
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    "a sign": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "another coding last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "another coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded line": HEAD + b"X-A: b\r\n c\r\n\r\n",
    "ends of lines without a return": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
    "a zero": HEAD + b"X-A: \0\r\n\r\n",
    "two hosts": HEAD + b"Host: y\r\nContent-Length: 2\r\n\r\n{}",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "a long line": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long header": HEAD + b"X-A: " + b"a" * 9000 + b"\r\n\r\n",
    "many headers": HEAD + b"X-A: b\r\n" * 80 + b"\r\n",
    "a token that is none": HEAD + b"Authorization: Bearer s3cret\0\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_request_is_refused_unseen_and_ends_the_connection(serve_http: Any, logged: Any, name: str) -> None:
    """What follows it could be read as a request that a proxy took for a body."""
    body = b'{"text": "a"}'
    smuggled = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def run() -> None:
        async with serve_http() as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            writer.write(UNREADABLE[name] + smuggled)
            async with asyncio.timeout(20):
                answer = await reader.read()
            writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split()[1] == b"400" and b"Server: dragoman" in head and b"aiohttp" not in answer
            assert json.loads(body)["message"] == "the request cannot be read as HTTP/1.1"
            assert world.engine.requests == [] and "s3cret" not in str(logged())

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[("mt.example", 200), ("MT.example:8080", 200), ("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:8080", 200)],
        *[("evil.example", 421), ("mt.example.evil.example", 421), ("[::1", 421), ("", 421), ("127.0.0.1.evil.example", 421)],
    ],
)
def test_who_asks_by_a_name_that_is_not_the_servers_is_refused(serve_http: Any, host: str, status: int) -> None:
    """A page whose own name was turned into the server's address is of the server's own origin otherwise."""
    headers = {"Host": host, "Origin": f"http://{host}"}

    async def run() -> None:
        async with serve_http(http_allowed_hosts="mt.example") as world:
            async with world.post("/v1/generate", {"text": "a"}, headers=headers) as response:
                text = await response.text()
                assert response.status == status and ("http_allowed_hosts" in text) == (status == 421), text
            assert len(world.engine.requests) == (status == 200)
        async with serve_http() as world, world.post("/v1/generate", {"text": "a"}, headers=headers) as response:
            assert response.status == 200, "any, where none is set"

    asyncio.run(run())


@pytest.mark.parametrize("name", ["Mt.example", "mt.example:80", "http://mt.example", "*", "", "mt..example"])
def test_what_is_no_name_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a host"):
        ServerConfig(models=tmp_path, http_allowed_hosts=name)


def test_requests_that_wait_on_a_connection_are_few(serve_http: Any) -> None:
    """They are answered one after another; further ones stay in the sockets, where they cost the sender."""

    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            body = b'{"text": "a"}'
            first = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            writer.write(first + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000)
            await world.engine.arrived.wait()
            [speaking] = world.http._runner.server.connections
            await eventually(lambda: len(speaking._messages) > 0)
            assert len(speaking._messages) < 1000
            world.engine.gate.set()
            async with asyncio.timeout(20):
                assert (await reader.readline()).split()[1] == b"200"
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/generate", 405), ("POST", "/v1/nothing", 404), ("GET", "/../x", 404)]
)
def test_what_is_not_there_is_told_in_json(serve_http: Any, method: str, path: str, status: int) -> None:
    async def run() -> None:
        async with serve_http() as world, world.session.request(method, world.url(path)) as response:
            assert response.status == status and (await response.json())["message"]
            assert response.headers["Server"] == "dragoman" and response.headers["X-Content-Type-Options"] == "nosniff"

    asyncio.run(run())


def test_a_drain_refuses_what_comes_and_finishes_what_runs(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            running = asyncio.create_task(world.ask("/v1/generate", {"text": "a"}))
            await world.engine.arrived.wait()
            draining = asyncio.create_task(world.server.drain(20))
            await eventually(lambda: world.server.core.is_draining)
            async with world.post("/v1/generate", {"text": "b"}) as response:
                assert (response.status, response.headers["Connection"]) == (503, "close")
                assert "Retry-After" in response.headers
            world.engine.gate.set()
            assert (await running)[0] == 200
            assert await draining

    asyncio.run(run())


def test_what_still_runs_at_the_end_is_told_so(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            running = asyncio.create_task(world.ask("/v1/generate", {"text": "a"}))
            await world.engine.arrived.wait()
            await world.server.core.end_calls()
            status, told = await running
            assert (status, told["code"]) == (503, 14)

    asyncio.run(run())


def test_names_in_a_certificate_say_who_calls_and_files_may_change(serve_http: Any, tmp_path: Path) -> None:
    folder = make_certificates(tmp_path, {"server": "DNS:localhost,IP:127.0.0.1", "web": "DNS:web.example.org"})
    callers = tmp_path / "callers.toml"
    callers.write_text('[callers.web]\ncertificates = ["web.example.org"]\n')
    files = {"tls_certificate": folder / "server.pem", "tls_key": folder / "server.key", "tls_client_ca": folder / "ca.pem"}

    def context(authority: Path) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(authority))
        made.load_cert_chain(folder / "web.pem", folder / "web.key")
        return made

    async def run() -> None:
        async with serve_http(auth_tokens_file=callers, **files) as world:
            url = f"https://127.0.0.1:{world.http.port}/v1/generate"
            async with ClientSession(connector=TCPConnector(ssl=context(folder / "ca.pem"))) as session:
                async with session.post(url, json={"text": "a"}) as response:
                    assert response.status == 200, await response.text()
                (tmp_path / "other").mkdir()
                other = make_certificates(tmp_path / "other", {"server": "DNS:localhost,IP:127.0.0.1"})
                for name in ("server.pem", "server.key"):
                    (folder / name).write_bytes((other / name).read_bytes())
                assert world.server.face.tls.reload()
                world.http.renew()
                async with session.post(url, json={"text": "a"}) as response:
                    assert response.status == 200, "what is connected stays so"
            connector = TCPConnector(ssl=context(other / "ca.pem"))
            async with ClientSession(connector=connector) as session, session.post(url, json={"text": "a"}) as response:
                assert response.status == 200, await response.text()

    asyncio.run(run())


def test_the_document_and_its_page_are_there_without_a_token(serve_http: Any, tokens: Path) -> None:
    async def run() -> None:
        async with serve_http(auth_tokens_file=tokens) as world:
            async with world.session.get(world.url("/openapi.json")) as response:
                told = json.loads(await response.text())
            assert told["openapi"] == "3.1.0" and "/v1/generate" in told["paths"]
            async with world.session.get(world.url("/docs")) as response:
                page = await response.text()
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert "<script" not in page and "http://" not in page and all(name in page for name in told["components"]["schemas"])

    asyncio.run(run())
