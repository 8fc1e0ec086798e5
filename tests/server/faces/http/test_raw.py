"""What is no HTTP, or lies about itself: it is refused or cut off, tells nothing, and harms nobody."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.faces.grpc.conftest import eventually

POST = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GOOD = POST + b"Content-Length: 13\r\n\r\n" + b'{"text": "a"}'
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
MESSAGES: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "HTTP/2's beginning": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a line of zeros": bytes(5000) + b"\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "an unknown version": b"GET /v1/models HTTP/7.7\r\nHost: x\r\n\r\n",
    "a method of no letters": b"G\x00T /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path with a line end": b"GET /v1/mod\rels HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header without a colon": GET + b"nothing\r\n\r\n",
    "a header with a space before its colon": GET + b"X-A : b\r\n\r\n",
    "a header that goes on in the next line": GET + b"X-A: b\r\n c\r\n\r\n",
    "a header with a zero": GET + b"X-A: \x00\r\n\r\n",
    "a header that is no UTF-8": GET + b"X-Request-Id: \xff\xfe\r\n\r\n",
    "an expectation of nothing known": GET + b"Expect: miracles\r\n\r\n",
    "an expectation that is no UTF-8": GET + b"Expect: \xff\r\n\r\n",
    "an expectation at no path": GET.replace(b"models", b"nothing") + b"Expect: \xed\xa0\x80\r\n\r\n",
    "a huge path": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge header": GET + b"X-A: " + b"x" * 100_000 + b"\r\n\r\n",
    "a million headers": GET + b"X-A: b\r\n" * 200_000 + b"\r\n",
    "two lengths": POST + b"Content-Length: 13\r\nContent-Length: 14\r\n\r\n" + b'{"text": "a"} ',
    "a negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "a length with a sign": POST + b"Content-Length: +13\r\n\r\n" + b'{"text": "a"}',
    "a length of letters": POST + b"Content-Length: ten\r\n\r\n{}",
    "a length of a thousand digits": POST + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n{}",
    "a length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown transfer encoding": POST + b"Transfer-Encoding: nonsense\r\n\r\n{}",
    "chunks twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "a chunk of letters": POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than it says": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}}}}}}\r\n0\r\n\r\n",
    "a chunk of a huge size": POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "a huge extension of a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    "an upgrade": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "a tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    "a path outside": b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path of broken escapes": b"GET /v1/models/%zz%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "another server's address": b"GET http://[::1/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a body": POST + b"Content-Length: 99\r\n\r\n{",
    "nothing": b"",
}
UNFINISHED = ("half a body", "nothing")
# Of what there must be nothing in an answer.
SECRETS = ("Traceback", ".py", "aiohttp", str(Path(__file__).resolve().parents[4]))
# Nothing is at the path, or it is not there by that method, among others.
REFUSALS = {b"400", b"404", b"405", b"413", b"417", b"431", b"501", b"505"}
# Answered as if it had not been said, or, without a version, as HTTP/0.9.
HARMLESS = {"an upgrade": {b"200"}, "no version": {b"200"}}


async def sent(port: int, data: bytes, *, has_ended: bool = False) -> bytes:
    """Return all that comes back to some bytes until the server closes; with `has_ended` it is told that there is nothing else."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if has_ended:
            writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:  # it was cut off while it still sent
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_malformed_is_refused_and_others_are_answered(serve_http: Any, logged: Any, name: str) -> None:
    async def run() -> None:
        async with serve_http(max_connection_idle_seconds=0.3) as world:
            answer = await sent(world.http.port, MESSAGES[name], has_ended=name in UNFINISHED)
            status = answer.split(b" ", 2)[1] if answer else b""
            assert not answer or status in HARMLESS.get(name, REFUSALS), answer[:1000]
            assert not status or b"\r\nServer: dragoman\r\n" in answer, answer[:1000]
            assert not [secret for secret in SECRETS if secret in answer.decode(errors="replace")], answer[:1000]
            assert (await world.ask("/v1/generate", {"text": "a"}))[0] == 200
            assert len(world.engine.requests) == 1, "what was malformed has asked for nothing"
            assert not [line for line in logged() if line.get("level") in ("error", "critical")]
            await world.session.close()
            await eventually(lambda: not world.http._runner.server.connections and world.server.num_running == 0)

    asyncio.run(run())


def test_requests_that_are_sent_at_once_are_answered_in_their_order(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            requests = [
                POST + f"X-Request-Id: r{number}\r\nContent-Length: 13\r\n\r\n".encode() + b'{"text": "a"}' for number in range(20)
            ]
            answer = await sent(world.http.port, b"".join(requests) + GET + b"Connection: close\r\n\r\n")
            ids = [line.partition(b": ")[2].decode() for line in answer.split(b"\r\n") if line.startswith(b"X-Request-Id")]
            assert ids[:20] == [f"r{number}" for number in range(20)]
            assert answer.count(b"HTTP/1.1 200 OK") == 21

    asyncio.run(run())


def test_what_follows_a_lie_about_the_length_is_no_request(serve_http: Any) -> None:
    """A proxy that takes both for one request must not find that the server has answered two."""

    async def run() -> None:
        async with serve_http() as world:
            hidden = b"0\r\n\r\n" + GOOD
            for lie in (b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n" % len(hidden), b"Transfer-Encoding : chunked\r\n"):
                answer = await sent(world.http.port, POST + lie + b"\r\n" + hidden)
                assert answer.count(b"Content-Length: ") == 1 and b" 400 " in answer
            assert not world.engine.requests

    asyncio.run(run())


def test_a_body_that_comes_byte_by_byte_is_answered(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.http.port)
            for byte in GOOD.replace(b"Host: x", b"Host: x\r\nConnection: close"):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and json.loads(body)["requestId"]
            writer.close()

    asyncio.run(run())
