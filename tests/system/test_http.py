"""HTTP of the real server: malformed requests, bodies and their sizes, hosts and origins, event streams, the document, curl."""

import asyncio
import gzip
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import ClientSession
from google.protobuf import json_format

from dragoman.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    ScoreRequest,
    ScoreResponse,
)
from tests.system.harness.http_client import events
from tests.system.harness.openinference import JSON, infer_body, json_tensor
from tests.system.harness.server import ROOT, Event, Server, serving, stopped, wait_until

pytestmark = pytest.mark.e2e

BODY = b'{"model": "alpha", "text": "a"}'
POST = b"POST /v1/generate HTTP/1.1\r\nHost: mt.example\r\nContent-Type: application/json\r\n"
GOOD = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /v1/models HTTP/1.1\r\nHost: mt.example\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
# Requests that proxies and servers may read in two ways, and bytes that are no HTTP at all.
MALFORMED: dict[str, bytes] = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": bytes(5000) + b"\r\n\r\n",
    "version": b"GET /v1/models HTTP/7.7\r\nHost: x\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "method": b"G\x00T /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "line end in path": b"GET /v1/mod\rels HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: y\r\n\r\n",
    "no colon": GET + b"nothing\r\n\r\n",
    "space before colon": GET + b"X-A : b\r\n\r\n",
    "folded header": GET + b"X-A: b\r\n c\r\n\r\n",
    "zero in header": GET + b"X-A: \x00\r\n\r\n",
    "zero in token": POST + b"Authorization: Bearer s3cret\0\r\n\r\n",
    "bare line ends": POST.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
    "expectation": GET + b"Expect: 200-s3cret\r\n\r\n",
    "expectation, no UTF-8": GET + b"Expect: \xff\r\n\r\n",
    "expectation at no path": GET.replace(b"models", b"nothing") + b"Expect: \xed\xa0\x80\r\n\r\n",
    "id, no UTF-8": POST + b"X-Request-Id: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
    "long path": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": GET + b"X-A: " + b"x" * 100_000 + b"\r\n\r\n",
    "many headers": GET + b"X-A: b\r\n" * 80 + b"\r\n",
    "a million headers": GET + b"X-A: b\r\n" * 200_000 + b"\r\n",
    "two lengths": POST + b"Content-Length: 13\r\nContent-Length: 14\r\n\r\n" + BODY,
    "list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    **{f"length {text[:8]!r}": POST + b"Content-Length: " + text + b"\r\n\r\n{}" for text in (b"-1", b"+13", b"ten", b"9" * 1000)},
    "length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    **{
        f"coding {text!r}": POST + b"Transfer-Encoding: " + text + b"\r\n\r\n0\r\n\r\n"
        for text in (b"nonsense", b"xchunked", b"chunked, chunked", b"chunked, identity", b"identity, chunked", b"gzip, chunked")
    },
    "coding with a space": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + GOOD,
    **{f"chunk {text[:10]!r}": CHUNKED + text + b"\r\n{}\r\n0\r\n\r\n" for text in (b"xyz", b"-5", b"f" * 18)},
    "long chunk extension": CHUNKED + b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    "longer chunk extension": CHUNKED + b"2;" + b"x" * 3_000_000 + b"\r\n{}\r\n0\r\n\r\n",
    "long chunk": CHUNKED + b"2\r\n{}}}}}}\r\n0\r\n\r\n",
    "tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    "path outside": b"GET /../../etc/passwd HTTP/1.1\r\nHost: mt.example\r\n\r\n",
    "broken escapes": b"GET /v1/models/%zz%ff%00 HTTP/1.1\r\nHost: mt.example\r\n\r\n",
    "another address": b"GET http://[::1/v1/models HTTP/1.1\r\nHost: mt.example\r\n\r\n",
    "half a body": POST + b"Content-Length: 99\r\n\r\n{",
    "nothing": b"",
}
UNFINISHED = ("half a body", "nothing")
# Refused as requests, after which others may follow on the connection.
REFUSED_ALONE = {"tunnel", "path outside", "broken escapes", "id, no UTF-8", "long chunk extension"}
REFUSALS = {b"400", b"404", b"405", b"413", b"417", b"421", b"431", b"501", b"505"}
SECRETS = ("Traceback", ".py", "aiohttp", str(ROOT), "s3cret")
ORIGIN = "https://a.example"
FLAGS = ("--max-connection-idle-seconds", "1", "--max-message-bytes", "65536", "--http-allowed-hosts", "mt.example")


@pytest.fixture(scope="module")
def server(translators: Path) -> Iterator[Server]:
    with serving(translators, *FLAGS, "--http-allowed-origins", f"{ORIGIN}, moz-extension://1-2") as started:
        yield started
        assert started.terminate() == 0
        assert not started.problems() and "s3cret" not in str(started.events)


def post(server: Server, path: str, **arguments: Any) -> requests.Response:
    return requests.post(server.http_address + path, timeout=60, **arguments)


async def opened(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.http_address.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def sent(server: Server, data: bytes, *, is_ended: bool = False) -> bytes:
    reader, writer = await opened(server)
    try:
        writer.write(data)
        if is_ended:
            writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:  # it was cut off while it still sent
        return b""
    finally:
        writer.close()


async def status(server: Server, data: bytes) -> bytes:
    reader, writer = await opened(server)
    writer.write(data)
    line = await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    return line.split()[1] if line else b""


async def test_malformed_requests_are_refused_and_what_follows_them_is_not_read(server: Server) -> None:
    """A proxy may take for a body the bytes that the server could read as another request."""
    before, answered_twice = server.metric("dragoman_request_success_total"), set[str]()
    texts = {name: data + GOOD * (name not in UNFINISHED) for name, data in MALFORMED.items()}
    answers = await asyncio.gather(*(sent(server, data, is_ended=name in UNFINISHED) for name, data in texts.items()))
    for name, answer in zip(MALFORMED, answers, strict=True):
        assert not answer or answer.split(b" ", 2)[1] in REFUSALS, (name, answer[:1000])
        assert not [secret for secret in SECRETS if secret in answer.decode(errors="replace")], (name, answer[:1000])
        if answer and (num_answers := answer.count(b"\r\nServer: dragoman\r\n")) != 1:
            assert num_answers == 2, (name, answer[:1000])
            answered_twice.add(name)
    assert answered_twice <= REFUSED_ALONE
    assert server.metric("dragoman_request_success_total") == before + len(answered_twice)
    assert post(server, "/v1/generate", data=BODY, headers=JSON).status_code == 200


async def test_requests_sent_at_once_are_answered_in_order(server: Server) -> None:
    numbered = [GOOD.replace(b"\r\nC", f"\r\nX-Request-Id: r{number}\r\nC".encode(), 1) for number in range(20)]
    last = GET + b"Connection: close\r\n\r\n"
    answer = await sent(server, b"".join(numbered) + last)
    ids = [line.partition(b": ")[2].decode() for line in answer.split(b"\r\n") if line.startswith(b"X-Request-Id")]
    assert ids[:20] == [f"r{number}" for number in range(20)] and answer.count(b"HTTP/1.1 200 OK") == 21
    reader, writer = await opened(server)
    for byte in GOOD.replace(b"\r\nC", b"\r\nConnection: close\r\nC", 1):
        writer.write(bytes([byte]))
        await writer.drain()
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and json.loads(body)["requestId"]
    writer.close()


async def test_a_client_that_ends_its_own_side_alone_gets_its_answers_and_one_that_leaves_is_seen(server: Server) -> None:
    """Both look alike until something is sent to them: a client that is there skips what says to go on."""
    with stopped(*server.engines("alpha")):
        reader, writer = await opened(server)
        writer.write(GOOD + GET + b"\r\n")
        writer.write_eof()
        await reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n")
        _, other = await opened(server)
        labels = {"model": "alpha", "code": "CANCELLED"}
        before = server.metric(FAILED, **labels)
        other.write(GOOD)
        other.close()
        await asyncio.to_thread(server.wait_for_metric, before + 1, FAILED, **labels)
    async with asyncio.timeout(20):
        assert (await reader.read()).count(b"HTTP/1.1 200 OK\r\n") == 2
    writer.close()
    for _ in range(5):  # one request, and the end directly behind it
        reader, writer = await opened(server)
        writer.write(GET + b"\r\n")
        writer.write_eof()
        async with asyncio.timeout(20):
            assert b"HTTP/1.1 200 OK\r\n" in await reader.read()
        writer.close()


FAILED = "dragoman_requests_failed_total"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
FILLED: dict[str, tuple[bytes, bytes]] = {
    "requests": (b"", (GET + b"\r\n") * 3000),
    "half a body": (b"", POST + b"Content-Length: 4000000\r\n\r\n" + b" " * 3_000_000),
    "what follows an upgrade": (UPGRADE, b" " * 3_000_000),
}


@pytest.mark.parametrize("name", FILLED)
async def test_a_connection_that_is_filled_behind_a_request_in_hand_is_ended(server: Server, name: str) -> None:
    """Nobody would see that such a caller leaves, for a connection that is not read does not show its end."""
    body, labels = b'{"model": "alpha", "text": "a", "maxNewTokens": 900}', {"model": "alpha", "code": "CANCELLED"}
    header, behind = FILLED[name]
    first = POST.replace(b"generate", b"generate:stream") + header + b"Content-Length: %d\r\n\r\n" % len(body) + body
    before = server.metric(FAILED, **labels)
    reader, writer = await opened(server)
    writer.write(first)
    await reader.readuntil(b"data: ")
    with stopped(*server.engines("alpha")):
        writer.write(behind)
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 20)
        await sent(server, first + behind)  # all of it at once
        await asyncio.to_thread(wait_until, lambda: server.metric(FAILED, **labels) > before, "the request is cancelled")


async def test_bodies_that_are_too_large_too_late_or_of_another_kind_have_their_statuses(server: Server) -> None:
    for headers, expected in (
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ):
        assert post(server, "/v1/generate", data=BODY, headers=headers).status_code == expected, headers
    for encoding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        whole, bomb = compress(BODY), compress(BODY + b" " * 10_000_000)
        bodies = [(whole, 200), (whole[:-5], 400), (whole + whole, 400), (BODY, 400), (bomb, 413), (bomb[:-5], 413)]
        for body, expected in bodies:
            response = post(server, "/v1/generate", data=body, headers=JSON | {"Content-Encoding": encoding})
            assert response.status_code == expected, (encoding, len(body), response.text)
    assert post(server, "/v1/generate", data=BODY, headers=JSON | {"Content-Encoding": "br"}).status_code == 415
    assert await status(server, POST + b"Content-Length: 70000\r\n\r\n") == b"413", "before it is read"
    too_large = CHUNKED + (b"400\r\n" + b" " * 1024 + b"\r\n") * 65
    assert await status(server, too_large) == b"413", "once it is too large"
    assert await status(server, b"POST /v1/gen") == b"", "an idle connection is closed"


async def test_a_caller_that_leaves_with_half_a_body_is_counted_once(server: Server) -> None:
    labels = {"model": "", "code": "CANCELLED"}
    before = server.metric("dragoman_requests_failed_total", **labels)
    _, writer = await opened(server)
    writer.write(POST + b"Content-Length: 99\r\n\r\n{")
    await asyncio.sleep(0.1)
    writer.close()
    await asyncio.to_thread(server.wait_for_metric, before + 1, "dragoman_requests_failed_total", **labels)


def test_a_deadline_may_come_in_a_header(server: Server) -> None:
    statuses = {"1n": 504, "0m": 504, "5S": 200, "99999999H": 200}
    statuses |= dict.fromkeys(("", "5", "S", "-5S", "5s", "123456789S", "1.5S", "5S ,5S"), 400)
    for header, expected in statuses.items():
        response = post(server, "/v1/generate", data=BODY, headers=JSON | {"Grpc-Timeout": header})
        assert response.status_code == expected, header
        assert response.json().get("message", "").startswith("Grpc-Timeout: ") == (expected == 400), header


def test_other_paths_and_methods_are_refused_in_json(server: Server) -> None:
    for method, path, status in (("GET", "/v1/generate", 405), ("POST", "/v1/nothing", 404), ("GET", "/x", 404)):
        response = requests.request(method, server.http_address + path, timeout=60)
        assert response.status_code == status and response.json()["message"]
        assert (response.headers["Server"], response.headers["X-Content-Type-Options"]) == ("dragoman", "nosniff")
    response = requests.get(f"{server.http_address}/v2/models/alpha/infer", timeout=60)
    assert (response.status_code, response.json()) == (405, {"error": "GET is not for this path; POST is"})
    assert post(server, "/v2/nowhere", json={}).json() == {"error": "nothing is at this path"}
    # Of KServe's v1 and of DeepL: what there is instead.
    elsewhere = {"/v1/models/alpha:predict": "/v2/models/NAME/infer", "/v2/write": "texts", "/v3/style_rules": "documents"}
    for path, instead in elsewhere.items():
        response = post(server, path, json={})
        assert response.status_code == 404 and instead in response.json()["message"], response.text


def test_only_allowed_hosts_are_answered(server: Server) -> None:
    """A page whose own name was turned into the server's address is of the server's own origin otherwise."""
    statuses = dict.fromkeys(("mt.example", "MT.example:8080", "localhost:8080", "127.0.0.1", "[::1]:8080"), 200)
    statuses |= dict.fromkeys(
        ("evil.example", "mt.example.evil.example", "[::1", "", "127.0.0.1.evil.example", "u@mt.example", "mt.example/evil"), 421
    )
    for host, expected in statuses.items():
        response = post(server, "/v1/generate", data=BODY, headers=JSON | {"Host": host, "Origin": f"http://{host}"})
        assert response.status_code == expected and ("http_allowed_hosts" in response.text) == (expected == 421), host


def test_pages_of_other_origins_are_answered_as_the_setting_allows(server: Server) -> None:
    preflight = {"Access-Control-Request-Method": "POST"}
    for path in ("/translate", "/v1/generate", "/languages"):
        response = requests.options(server.http_address + path, headers={"Origin": ORIGIN} | preflight, timeout=60)
        assert (response.status_code, response.headers["Access-Control-Allow-Origin"]) == (204, ORIGIN)
        allowed = response.headers["Access-Control-Allow-Headers"].split(", ")
        assert {"Authorization", "Inference-Header-Content-Length"} <= set(allowed) and response.headers["Vary"] == "Origin"
    for headers in (preflight | {"Origin": "https://b.example"}, preflight):
        response = requests.options(f"{server.http_address}/translate", headers=headers, timeout=60)
        assert response.status_code == 405 and "Access-Control-Allow-Origin" not in response.headers
    assert requests.options(f"{server.http_address}/nothing", headers={"Origin": ORIGIN} | preflight, timeout=60).status_code == 404
    message, infer = {"q": "a", "source": "en", "target": "de"}, json.dumps(infer_body("a"))
    response = post(server, "/translate", data=message, headers={"Origin": ORIGIN})
    assert (response.status_code, response.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
    # A browser sends these without asking; Triton's client does not say what its body is.
    for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert post(server, "/v2/models/alpha/infer", data=infer, headers=kind).status_code == 200
        for origin in ("https://b.example", "null"):
            for path, arguments in (
                ("/v2/models/alpha/infer", {"data": infer}),
                ("/translate", {"params": message}),
                ("/v2/repository/index", {}),
            ):
                assert post(server, path, headers=kind | {"Origin": origin}, **arguments).status_code == 403, path
    own = {"Origin": server.http_address}
    assert post(server, "/translate", data=message, headers=own).status_code == 200


def untimed(message: Any) -> Any:
    message.ClearField("request_id")
    if hasattr(message, "timings"):
        message.ClearField("timings")
    return message


def test_messages_are_those_of_grpc_in_canonical_json(server: Server, stub: Any) -> None:
    """Fields may have either spelling; every field of an answer is written."""
    sampled = {"model": "alpha", "text": "日本 🐕", "doSample": True, "seed": str(2**64 - 1), "forced_prefix": "b", "priority": -3}
    answer = post(server, "/v1/generate", json=sampled).json()
    expected = untimed(stub.Generate(json_format.ParseDict(sampled, GenerateRequest())))
    assert untimed(json_format.ParseDict(answer, GenerateResponse())) == expected
    assert answer["isTruncated"] is False and "logProbs" in answer["answers"][0]
    request = ScoreRequest(model="alpha", text="a dog", target="b", return_alignment=True, return_word_alignment=True)
    answer = post(server, "/v1/score", json=json_format.MessageToDict(request)).json()
    assert untimed(json_format.ParseDict(answer, ScoreResponse())) == untimed(stub.Score(request))
    expected = stub.ListModels(ListModelsRequest())
    listed = requests.get(f"{server.http_address}/v1/models", timeout=60).json()
    assert json_format.ParseDict(listed, ListModelsResponse(), ignore_unknown_fields=True) == expected
    one = requests.get(f"{server.http_address}/v1/models/alpha", timeout=60).json()
    assert json_format.ParseDict(one, ListModelsResponse().models.add(), ignore_unknown_fields=True) == expected.models[0]


async def test_an_error_after_the_first_piece_is_an_event(server: Server) -> None:
    async with ClientSession(server.http_address, headers={"Grpc-Timeout": "2S"}) as session, AsyncExitStack() as stack:
        streams = []
        native = {"model": "alpha", "text": "a", "maxNewTokens": 900, "requestId": "r-9"}
        inference = {"text_input": "a", "max_new_tokens": 900}
        for path, body in (("/v1/generate:stream", native), ("/v2/models/alpha/generate_stream", inference)):
            response = await stack.enter_async_context(session.post(path, json=body))
            assert (response.status, response.content_type) == (200, "text/event-stream")
            streams.append(events(response))
        firsts = [await anext(stream) for stream in streams]
        with stopped(*server.engines("alpha")):
            await asyncio.sleep(2)
        (*_, (name, error)), (*_, (plain, other)) = [[event async for event in stream] for stream in streams]
        assert [first for first, _ in firsts] == ["", ""]
        assert (name, error["code"], error["details"][0]["requestId"]) == ("error", 4, "r-9")
        assert plain == "" and list(other) == ["error"] and "deadline" in other["error"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_translates_and_streams(shared_server: Server) -> None:
    def curl(path: str, message: Any, *flags: str) -> Any:
        command = ["curl", "-s", "-N", *flags, "-d", json.dumps(message), shared_server.http_address + path]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return [json.loads(line.removeprefix("data: ")) for line in output.splitlines() if line]

    kind, text = ("-H", "Content-Type: application/json"), "A dog runs through the snow."
    [whole], pieces = (curl(path, {"text": text, "model": "en-de"}, *kind) for path in ("/v1/generate", "/v1/generate:stream"))
    assert whole["text"] == "".join(piece["text"] for piece in pieces) == pieces[-1]["result"]["text"]
    paths = ("/v2/models/en-de/generate", "/v2/models/en-de/generate_stream")
    [triton], events = (curl(path, {"text_input": text}) for path in paths)
    assert triton["text_output"] == "".join(event["text_output"] for event in events) == whole["text"] and len(events) > 3
    assert curl(paths[1], {"text_input": " "}) == [{"error": "text: is blank"}]


MODEL, SEED = "/v2/models/{model}", json_tensor("seed", "UINT64", [1], [7])
OF_PAIR = {"source_lang": "en", "target_lang": "de"}
GLOSSARY = OF_PAIR | {"entries": "dog\tHund"}
BODIES: dict[str, Any] = {
    "/v1/generate": {"model": "alpha", "text": "a"},
    "/v1/generate:stream": {"model": "alpha", "text": "a"},
    "/v1/score": {"model": "alpha", "text": "a", "target": "b"},
    "/v2/repository/index": {"ready": True},
    f"{MODEL}/infer": infer_body("a", "b", id="mine", inputs=[SEED], parameters={"do_sample": True}, outputs=[{"name": "seed"}]),
    f"{MODEL}/generate": {"text_input": ["a", "b"], "parameters": {"sampling_parameters": {"n": 1}}, "do_sample": True},
    f"{MODEL}/generate_stream": {"text_input": "a dog"},
    "/translate": {"q": ["a dog", "a cat"], "source": "en", "target": "de", "alternatives": 1},
    "/detect": {"q": "a dog"},
    "/v2/translate": {"text": ["a dog", "a cat"], "source_lang": "EN", "target_lang": "DE", "split_sentences": "0"},
    "/v2/glossaries": GLOSSARY | {"name": "a"},
    "/v3/glossaries": {"name": "a", "dictionaries": [GLOSSARY]},
    "/v3/glossaries/{id}": {"name": "b"},
    "/v3/glossaries/{id}/dictionaries": GLOSSARY,
    "/v1/completions": {"model": "alpha", "prompt": ["a dog", "a cat"], "max_tokens": 3, "suppressed_tokens": [5]},
    "/v1/chat/completions": {"model": "alpha", "messages": [{"role": "user", "content": "a"}], "split": "lines"},
}
OPTIONS = {
    "max_tokens": 3,
    "num_beams": 2,
    "top_log_probs": 1,
    "suppressed_tokens": [5],
    "timeout": 0,
    "length_penalty": 0.5,
    "forced_prefix": "a",
}


def test_answers_are_as_the_openapi_document_describes_them(server: Server) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = requests.get(f"{server.http_address}/openapi.json", timeout=60).json()
    page = requests.get(f"{server.http_address}/docs", timeout=60)
    assert document["openapi"] == "3.1.0" and "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "<script" not in page.text and all(name in page.text for name in document["components"]["schemas"])

    def check(schema: dict[str, Any], value: Any) -> None:
        jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)

    def schema_of(body: dict[str, Any]) -> Any:
        return body["content"]["application/json"]["schema"]

    # Generators of clients read no list of types, and no content without one.
    assert not re.search(r'"type": \[|"schema": \{("description": "[^"]*")?\}', json.dumps(document))
    version = requests.get(f"{server.http_address}/v1/models/alpha", timeout=60).json()["version"]
    operations = [(path, *each) for path, methods in document["paths"].items() for each in methods.items()]
    for path, method, operation in operations:
        body = BODIES.get(path.replace("/versions/{version}", "")) if "requestBody" in operation else None
        if path.startswith(("/v1/repository", "/v2/document", "/translate_file", "/v1/files", "/v1/batches")):
            continue  # of operators, or with a file
        if body is not None:
            check(schema_of(operation["requestBody"]), body)
        glossary = post(server, "/v2/glossaries", json=BODIES["/v2/glossaries"]).json()["glossary_id"] if "{id}" in path else ""
        for model in ("alpha", "nobody") if "{model}" in path else ("alpha",):
            url = server.http_address + path.format(model=model, version=version, id=glossary)
            response = requests.request(method, url, params=OF_PAIR if glossary else {}, json=body, timeout=60)
            assert response.ok is (model == "alpha"), (path, response.text)
            documented = operation["responses"][str(response.status_code)]
            if "$ref" in documented:
                documented = document["components"]["responses"][documented["$ref"].rpartition("/")[2]]
            if response.headers.get("Content-Type", "").startswith("application/json"):
                check(schema_of(documented), response.json())
            elif path.startswith("/v2/models"):
                for line in filter(None, response.text.splitlines()):
                    check({"$ref": "#/components/schemas/TextResponse"}, json.loads(line.removeprefix("data: ")))
    for name, value in OPTIONS.items():
        texts = ({"text_input": "a", name: value}, {"text_input": "a", "parameters": {name: value}})
        bodies = [("TextRequest", "generate", body) for body in texts]
        for schema, path, body in (*bodies, ("InferenceRequest", "infer", infer_body("a", parameters={name: value}))):
            check({"$ref": f"#/components/schemas/{schema}"}, body)
            assert post(server, f"/v2/models/alpha/{path}", json=body).status_code == 200, (name, path)


def test_http_can_be_turned_off(endless: Path) -> None:
    with serving(endless, "--http", "false") as server:
        assert "http_port" not in server.logged(Event.SERVING)[0]
