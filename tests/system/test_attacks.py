"""Hostile callers: what they can do is bounded, others are answered meanwhile, and afterwards the server is as it was."""

import itertools
import random
import string
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.v1.generation_pb2 import GenerateRequest, ListModelsRequest, ScoreRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.certificates import make_certificates
from tests.system.harness.callers import OPTIONS, Callers, bearer, connection, generate, unharmed
from tests.system.harness.http2 import PING, RST_STREAM, Http2, frame
from tests.system.harness.server import LONG, Event, Server, resident_bytes, serving, wait_until

pytestmark = pytest.mark.e2e

GENERATE, SCORE = "/dragoman.v1.Generation/Generate", "/dragoman.v1.Generation/Score"
LARGE = [*OPTIONS, ("grpc.max_send_message_length", -1)]
MIB = 2**20


@pytest.fixture(scope="module")
def server(endless: Path) -> Iterator[Server]:
    with serving(endless / "alpha", "--num-threads", "1") as server:
        with Callers(server) as callers:  # pools of threads, arenas and caches fill
            callers.wait_for_more(100)
        yield server


@contextmanager
def answered(server: Server) -> Iterator[Callers]:
    """Have callers of all kinds beside what is done, each of whom has to be answered, and before long."""
    with unharmed(server):
        with Callers(server, num=2, pause_seconds=0.02, max_new_tokens=8) as callers:
            yield callers
            callers.wait_for_more(10)
        assert callers.failures == []
        assert max(answer.ended - answer.began for answer in callers.answers) < 20


@contextmanager
def meanwhile(number: int, act: Callable[[threading.Event], object]) -> Iterator[None]:
    """Have so many threads act on and on until the `with` ends; they are told when that is."""
    is_over = threading.Event()

    def act_on() -> None:
        while not is_over.is_set():
            act(is_over)

    with ThreadPoolExecutor(number) as pool:
        tasks = [pool.submit(act_on) for _ in range(number)]
        try:
            yield
        finally:
            is_over.set()
        for task in tasks:
            task.result()


def call(channel: grpc.Channel, message: bytes, path: str = GENERATE) -> Any:
    return channel.unary_unary(path).future(message, timeout=120)


def large_channel(server: Server) -> grpc.Channel:
    return grpc.insecure_channel(server.address, LARGE)


def test_messages_that_cost_much_to_refuse_do_not_delay_other_calls(server: Server) -> None:
    suppressed = GenerateRequest(text="a", suppressed_tokens=bytes(i % 128 for i in range(4_100_000)))
    huge = {"do_sample": True, "seed": 1, "max_new_tokens": 1000, "top_log_probs": 20}
    noise = b"\x0a\x7f\xff\xfe"
    cases = [
        (GENERATE, suppressed.SerializeToString(), "suppressed_tokens"),
        (GENERATE, GenerateRequest(text="a", num_return_sequences=60, **huge).SerializeToString(), "num_return_sequences"),
        (GENERATE, GenerateRequest(text="a", num_return_sequences=16, **huge).SerializeToString(), "top_log_probs"),
        *((f"/grpc.health.v1.Health/{method}", noise, "request") for method in ("Check", "Watch")),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", noise, "request"),
    ]
    with answered(server), large_channel(server) as channel:
        for path, message, field in cases:
            ended = call(channel, message, path)
            assert (ended.code(), ended.details().partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, field), ended.details()
        options = huge | {"num_return_sequences": 12, "max_new_tokens": 512, "model": "alpha"}
        assert len(call(channel, GenerateRequest(text="a", **options).SerializeToString()).result()) > MIB, "the largest there are"


def test_large_ids_that_come_back_unread_take_bounded_memory(server: Server) -> None:
    large = GenerateRequest(text="a", model="alpha", request_id="a" * 4_000_000).SerializeToString()

    def stream(is_over: threading.Event) -> None:
        with large_channel(server) as channel:
            streaming = channel.stream_stream("/dragoman.v1.Generation/GenerateBatch")(itertools.repeat(large))
            is_over.wait()
            streaming.cancel()

    with unharmed(server, max_bytes=256 * MIB), large_channel(server) as other:
        before = resident_bytes(server.process.pid)
        with meanwhile(20, stream):
            end = time.monotonic() + 3
            while time.monotonic() < end:
                assert resident_bytes(server.process.pid) < before + 512 * MIB
                time.sleep(0.02)
            ids = ("first", "a" * 4_194_244, "second", "third")  # the largest id with which a request fits a message
            requests = [GenerateRequest(text="a", model="alpha", request_id=each, max_new_tokens=20) for each in ids]
            answers = list(GenerationStub(other).GenerateBatch(iter(requests), timeout=60))
            assert {answer.request_id for answer in answers if answer.HasField("response")} == {"first", "second", "third"}


COSTLY: dict[str, tuple[str, Any]] = {
    "a temperature of 100": (GENERATE, GenerateRequest(text="a dog", max_new_tokens=200, do_sample=True, temperature=100.0)),
    "a repetition penalty": (GENERATE, GenerateRequest(text="a dog", max_new_tokens=200, repetition_penalty=0.9)),
    "16 beams": (GENERATE, GenerateRequest(text="a dog", max_new_tokens=60, num_beams=16)),
    "long pairs": (SCORE, ScoreRequest(text="dog " * 10, target="dog " * 240)),
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_requests_do_not_delay_other_calls(server: Server, name: str) -> None:
    """Of 16 callers at a time, beside a stream that goes on and others who are answered."""
    codes, (path, message) = Counter[grpc.StatusCode](), COSTLY[name]

    def ask(_: threading.Event) -> None:
        with large_channel(server) as channel:
            for _ in range(5):
                codes[call(channel, message.SerializeToString(), path).code()] += 1

    with answered(server) as callers, connection(server) as channel, meanwhile(16, ask):
        request = GenerateRequest(text="a dog", model="alpha", max_new_tokens=100)
        pieces = list(GenerationStub(channel).GenerateStream(request, timeout=60))
        assert len(pieces[-1].result.tokens) == 100
        callers.wait_for_more(10)
        wait_until(lambda: codes[grpc.StatusCode.OK] > 0, "they, too, are answered")
    assert codes.keys() == {grpc.StatusCode.OK}


def test_every_deadline_that_passes_is_counted_once(server: Server) -> None:
    """As the deadline or, if its caller cancelled first, as that; one that was never sent is not counted."""
    pair = ScoreRequest(text="dog " * 10, target="dog " * 240, model="alpha")
    draws = random.Random(12)

    def counted() -> Counter[str]:
        codes = ("DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNAVAILABLE")
        return Counter({code: int(server.metric("dragoman_requests_failed_total", code=code)) for code in codes})

    with unharmed(server), connection(server) as channel, ThreadPoolExecutor(48) as pool:
        before = counted()
        deadlines = [draws.uniform(0.001, 0.1) for _ in range(3000 if LONG else 300)]
        stub = GenerationStub(channel)
        saw = Counter(pool.map(lambda seconds: stub.Score.future(pair, timeout=seconds).code().name, deadlines))
        assert saw.keys() <= {"OK", "DEADLINE_EXCEEDED"} and saw["DEADLINE_EXCEEDED"] > 0.9 * len(deadlines)
        server.wait_until_idle()
        found = counted() - before
    assert found.keys() <= {"DEADLINE_EXCEEDED", "CANCELLED"}
    assert 0.8 * saw["DEADLINE_EXCEEDED"] <= found.total() <= saw["DEADLINE_EXCEEDED"]
    assert found["DEADLINE_EXCEEDED"] > 0.8 * found.total()


@pytest.mark.parametrize("kind", ["resets", "pings", "refused calls"])
def test_floods_on_a_connection_do_not_delay_other_calls(server: Server, kind: str) -> None:
    """Calls that are reset at once, pings, and calls that are refused, as many as can be written, on two connections."""
    port = server.port
    text = " " if kind == "refused calls" else "a dog"
    message = GenerateRequest(text=text, model="alpha", max_new_tokens=1).SerializeToString()

    def write(connection: Http2) -> None:
        if kind == "pings":
            connection.socket.sendall(frame(PING, 0, 0, bytes(8)))
            return
        stream = connection.call(GENERATE, message)
        if kind == "resets":
            connection.socket.sendall(frame(RST_STREAM, 0, stream, b"\0\0\0\x08"))

    def flood(is_over: threading.Event) -> None:
        try:
            with Http2(port, timeout_seconds=2) as connection:
                while not is_over.is_set():
                    write(connection)
        except OSError:
            is_over.wait(0.05)  # thrown out

    with answered(server) as callers, meanwhile(2, flood):
        callers.wait_for_more(10)


CHARACTERS = string.digits + string.ascii_letters + string.punctuation
TOKENS = {f"caller{ord(each)}": f"first{ord(each)}{each}last{ord(each)}" for each in CHARACTERS}
NAMES = {"server": "IP:127.0.0.1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_certificates(tmp_path_factory.mktemp("guarded"), NAMES)
    (folder / "tokens").write_text("many:token-of-many\nfew:token-of-few\n" + "".join(f"{k}:{v}\n" for k, v in TOKENS.items()))
    return folder


@pytest.fixture(scope="module")
def guarded(endless: Path, folder: Path) -> Iterator[Server]:
    flags = (f"--tls-certificate={folder}/server.pem", f"--tls-key={folder}/server.key", f"--auth-tokens-file={folder}/tokens")
    with serving(endless / "alpha", "--num-threads", "1", "--max-waiting-requests", "64", *flags) as server:
        yield server
        server.wait_until_idle()
        assert server.problems() == [] and server.metric("dragoman_engine_restarts_total") == 0


@contextmanager
def secure(server: Server, *authorities: bytes) -> Iterator[grpc.Channel]:
    with grpc.secure_channel(server.address, grpc.ssl_channel_credentials(b"".join(authorities)), OPTIONS) as channel:
        yield channel


@pytest.fixture
def authority(folder: Path) -> bytes:
    return (folder / "ca.pem").read_bytes()


def test_a_token_is_accepted_whole_alone_and_never_logged(guarded: Server, authority: bytes) -> None:
    with secure(guarded, authority) as channel:

        def code(token: str) -> str:
            metadata = bearer(token)
            return str(GenerationStub(channel).ListModels.future(ListModelsRequest(), timeout=60, metadata=metadata).code().name)

        assert set(map(code, TOKENS.values())) == {"OK"}
        parts = [part.format(ord(each)) for each in CHARACTERS for part in ("first{}", "last{}")]
        assert set(map(code, parts)) == {"UNAUTHENTICATED"}
    log = str(guarded.events)
    assert not [part for part in parts if part in log]


def test_a_caller_that_fills_the_queue_is_refused_alone(guarded: Server, authority: bytes) -> None:
    codes = Counter[grpc.StatusCode]()

    def flood(is_over: threading.Event) -> None:
        code = generate(channel, 64, "token-of-many").code()
        codes[code] += 1
        if code is not grpc.StatusCode.OK:
            is_over.wait(0.1)

    with secure(guarded, authority) as channel, secure(guarded, authority) as other, meanwhile(200, flood):
        wait_until(lambda: codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 20, "the queue is full")
        few = [generate(other, 2, "token-of-few").code() for _ in range(20)]
    assert set(few) == {grpc.StatusCode.OK} and codes.keys() == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_certificates_and_tokens_change_under_load_and_no_call_fails(guarded: Server, folder: Path, authority: bytes) -> None:
    trusted, codes = [authority], Counter[grpc.StatusCode]()

    def ask(is_over: threading.Event) -> None:
        with secure(guarded, *trusted) as channel:
            codes.update(generate(channel, 2, "token-of-few").code() for _ in range(10))
        is_over.wait(0.1)

    with meanwhile(4, ask):
        for number in range(5 if LONG else 2):
            new = folder / f"new-{number}"
            new.mkdir()
            trusted.append((make_certificates(new, NAMES) / "ca.pem").read_bytes())
            time.sleep(1.0)  # connections that are being made have the trust of before
            for name in ("server.key", "server.pem"):
                (new / name).replace(folder / name)
            (folder / "next").write_text((folder / "tokens").read_text() + f"changing{number}:token-{number}\n")
            (folder / "next").replace(folder / "tokens")
            guarded.wait_for(Event.RELOADED, source="callers")

            def is_in_use(token: str = f"token-{number}", authority: bytes = trusted[-1]) -> bool:
                with secure(guarded, authority) as channel:
                    return bool(generate(channel, 2, token).code() is grpc.StatusCode.OK)

            wait_until(is_in_use, "the new certificate and the new token are in use", 30)
    assert codes.keys() == {grpc.StatusCode.OK} and codes.total() > 50
