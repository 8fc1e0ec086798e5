"""What is asked of each kind of server, with servers that are not the real ones, and how calls are named."""

import asyncio
import json
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

from benchmarks.harness.load import Load
from benchmarks.peers import sender
from benchmarks.peers.faces import AskError
from benchmarks.peers.sender import Order, translate
from dragoman.v1 import generation_pb2, generation_pb2_grpc


class Echo(generation_pb2_grpc.GenerationServicer):
    """Answers in capitals; refuses the text `no`."""

    def Generate(self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext) -> generation_pb2.GenerateResponse:
        if request.text == "no":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return generation_pb2.GenerateResponse(answers=[generation_pb2.Answer(text=request.text.upper())])


@pytest.fixture
def dragoman() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def infer(content: bytes, context: grpc.ServicerContext) -> bytes:
    """Answer as Triton does, taking the messages apart by hand: the numbers are those of the KServe v2 protocol."""
    assert content.startswith(b"\x0a\x09translate")  # field 1, the model's name
    inputs = b"\x0a\x04text\x12\x05BYTES\x1a\x02\x01\x01"
    assert b"\x2a" + bytes([len(inputs)]) + inputs in content  # field 5: name, type, and shape [1, 1]
    raw = content[content.rindex(b"\x3a") :]  # field 7, the last
    (size,) = struct.unpack_from("<I", raw, 2)
    text = raw[6:].decode()
    assert size == len(raw[6:])
    if text == "no":
        context.abort(grpc.StatusCode.UNAVAILABLE, "full")
    answer = text.upper().encode()
    packed = struct.pack("<I", len(answer)) + answer
    return b"\x0a\x09translate\x32" + bytes([len(packed)]) + packed  # field 6


@pytest.fixture
def triton() -> Iterator[str]:
    pytest.importorskip("grpc_tools", reason="grpcio-tools compiles Triton's messages")
    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


class Capitals(BaseHTTPRequestHandler):
    """Answers JSON with JSON, and keeps the connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["content-length"])))["text"]
        self.answer(503 if text == "no" else 200, {"text": text.upper()})

    def answer(self, status: int, value: dict[str, str]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def http() -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="the benchmark's client for HTTP")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Capitals)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/predict"
    server.shutdown()
    thread.join()
    server.server_close()


REFUSALS = {"dragoman": "RESOURCE_EXHAUSTED", "triton": "UNAVAILABLE", "http": "HTTP 503"}


@pytest.mark.parametrize("face", REFUSALS)
def test_texts_come_back_translated_in_their_order(face: str, request: pytest.FixtureRequest) -> None:
    texts = ["ein Hund läuft", "a", "b" * 60, "c"]
    answers = asyncio.run(translate(face, request.getfixturevalue(face), texts, 2))
    assert answers == [text.upper() for text in texts]


@pytest.mark.parametrize("face", REFUSALS)
def test_a_refusal_is_named(face: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(AskError, match=f"^{REFUSALS[face]}$"):
        asyncio.run(translate(face, request.getfixturevalue(face), ["no"], 1))


@pytest.mark.parametrize(
    ("face", "code"), [("dragoman", "UNAVAILABLE"), ("triton", "UNAVAILABLE"), ("http", "ClientConnectorError")]
)
def test_a_server_that_is_not_there_is_a_failure_too(face: str, code: str) -> None:
    pytest.importorskip({"dragoman": "grpc", "triton": "grpc_tools", "http": "aiohttp"}[face])
    with pytest.raises(AskError, match=f"^{code}$"):
        asyncio.run(translate(face, {"http": "http://127.0.0.1:1/"}.get(face, "127.0.0.1:1"), ["a"], 1))


@pytest.mark.parametrize(("rate", "concurrency"), [(100.0, 0), (None, 2)])
def test_a_process_of_its_own_sends_and_reports(dragoman: str, rate: float | None, concurrency: int) -> None:
    record = sender.run(Order("dragoman", Load(dragoman, ["a", "no"], 1, 0.3, rate, concurrency)))
    codes = [outcome.code for outcome in record.outcomes]
    assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
    assert abs(codes.count("OK") - codes.count("RESOURCE_EXHAUSTED")) <= 1


def test_our_own_sender_needs_no_peer_s_packages(dragoman: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiohttp", "grpc_tools"):
        monkeypatch.setitem(sys.modules, name, None)
    assert asyncio.run(translate("dragoman", dragoman, ["a"], 1)) == ["A"]
