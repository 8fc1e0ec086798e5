"""Streams of requests: GenerateBatch, GenerateBulk and ModelStreamInfer: each request for itself, windows, ends, slow readers."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.client.request import Request
from dragoman.client.sync import Client
from dragoman.inference.inference_pb2 import ModelInferRequest, ModelStreamInferResponse
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.v1.generation_pb2 import (
    GenerateBatchResponse,
    GenerateBulkRequest,
    GenerateBulkResponse,
    GenerateRequest,
    ScoreRequest,
)
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.callers import NO_RETRY, PATIENT, connection
from tests.system.harness.grpc_client import CODES, failure
from tests.system.harness.http2 import Http2
from tests.system.harness.openinference import grpc_outputs, infer_request, with_parameters, with_tensor
from tests.system.harness.server import Event, Server, kill, serving, stopped, wait_until

pytestmark = pytest.mark.e2e

SLOTS = 4
BATCH, BULK = "/dragoman.v1.Generation/GenerateBatch", "/dragoman.v1.Generation/GenerateBulk"
INVALID = "INVALID_ARGUMENT"
MAX_MESSAGE_BYTES = 32 * 2**10


@pytest.fixture(scope="module")
def server(translators: Path) -> Iterator[Server]:
    flags = ("--max-slots", str(SLOTS), "--max-waiting-requests", "40", "--max-message-bytes", str(MAX_MESSAGE_BYTES))
    with serving(translators, *flags) as started:
        yield started
        started.wait_until_idle()


def request(request_id: str, text: str = "a dog runs", **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"request_id": request_id, "text": text, "model": "alpha"} | fields)


def raw(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def batch(channel: grpc.Channel, messages: Iterable[GenerateRequest | bytes], **options: Any) -> list[GenerateBatchResponse]:
    call = channel.stream_stream(BATCH, response_deserializer=GenerateBatchResponse.FromString)
    return list(call(iter(list(map(raw, messages))), **options))


def bulk(channel: grpc.Channel, messages: Iterable[GenerateRequest | bytes], **options: Any) -> list[GenerateBatchResponse]:
    return raw_bulk(channel, [b"".join(b"\x0a" + varint(len(part)) + part for part in map(raw, messages))], **options)


def raw_bulk(channel: grpc.Channel, messages: list[bytes], **options: Any) -> list[GenerateBatchResponse]:
    call = channel.stream_stream(BULK, response_deserializer=GenerateBulkResponse.FromString)
    return [answer for response in call(iter(messages), **options) for answer in response.answers]


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 | 128]) + varint(number // 128)


each_stream = pytest.mark.parametrize("send", [batch, bulk], ids=["GenerateBatch", "GenerateBulk"])


def outcomes(answers: Iterable[GenerateBatchResponse]) -> list[tuple[int, str, str]]:
    return sorted((a.index, a.request_id, CODES[a.error.code] if a.HasField("error") else "OK") for a in answers)


@each_stream
def test_each_request_is_answered_or_refused_for_itself(server: Server, channel: grpc.Channel, stub: Any, send: Any) -> None:
    """An id is used up by a refused request, and free on another stream. A huge id, sent back, once ended the stream."""
    good = [request(f"good {i}", model=("alpha", "beta")[i % 2], max_new_tokens=1 + i, num_beams=1 + i % 3) for i in range(30)]
    bad: list[tuple[Any, str, str, str]] = [
        (request("blank", " "), "blank", INVALID, "text: is blank"),
        (request("lost", model="gamma"), "lost", "NOT_FOUND", "model: 'gamma' is not loaded; loaded: alpha, beta"),
        (request("wide", num_beams=1000), "wide", INVALID, "num_beams: 1000 is not in 1 to 4"),
        (request(""), "", INVALID, "request_id: is missing; each request of a batch needs one"),
        (request("bad\nid"), "", INVALID, "request_id: only printable ASCII characters are allowed"),
        (request("good 7"), "good 7", INVALID, "request_id: was used on this stream before"),
        (request("blank"), "blank", INVALID, "request_id: was used on this stream before"),
        (b"\x12\x02\xff\xfe", "", INVALID, "request: cannot be parsed; is every string UTF-8?"),
        *[(request(text), "", INVALID, "request_id: ") for text in ("x" * 129, "é" * 100, "\x1b[2J", "x" * 20_000)],
    ]
    names, batch_id = ("dragoman_request_success_total", "dragoman_requests_failed_total"), f"stream-{send.__name__}"
    before = list(map(server.metric, names))
    answers = send(channel, [*good, *(each for each, *_ in bad)], metadata=(("x-request-id", batch_id),))
    expected = [(i, f"good {i}", "OK") for i in range(30)]
    assert outcomes(answers) == expected + [(30 + i, request_id, code) for i, (_, request_id, code, _) in enumerate(bad)]
    by_index = {answer.index: answer for answer in answers}
    for i, (_, _, _, message) in enumerate(bad):
        assert by_index[30 + i].error.message.startswith(message) and by_index[30 + i].ByteSize() < 400
    for i in (0, 29):
        alone, same = stub.Generate(good[i]), by_index[i].response
        for response in (alone, same):
            response.ClearField("timings")
        assert alone == same
    assert list(map(server.metric, names)) == [before[0] + 32, before[1] + len(bad)]
    items = [line for line in server.logged(Event.ITEM) if line["batch_id"] == batch_id]
    [line] = [line for line in server.logged(Event.CALL) if line["request_id"] == batch_id]
    assert len(items) == 30 + len(bad) and {line["method"] for line in (line, *items)} == {line["method"]}
    assert line["generated_tokens"] == sum(item["generated_tokens"] for item in items) and line["code"] == "OK"
    assert outcomes(send(channel, [request("good 7")])) == [(0, "good 7", "OK")] and send(channel, []) == []
    answers = send(channel, [request("long", max_new_tokens=600), *(request(f"short {i}", max_new_tokens=1) for i in range(6))])
    assert answers[-1].request_id == "long", "a straggler holds up none of the others"


def test_a_full_queue_refuses_requests_one_by_one_and_patient_clients_get_through(endless: Path) -> None:
    requests = [Request("a dog runs", max_new_tokens=60) for _ in range(16)]
    with (
        serving(endless / "alpha", "--max-slots", "4", "--max-waiting-requests", "2") as server,
        Client(server.address, retry=NO_RETRY) as hasty,
        Client(server.address, retry=PATIENT) as patient,
    ):
        errors = [outcome.error for outcome in hasty.generate_batch(requests) if outcome.error is not None]
        assert errors and {error.code for error in errors} == {"RESOURCE_EXHAUSTED"}
        assert all(error.retry_after_seconds > 0 for error in errors)
        with ThreadPoolExecutor(1) as pool:
            longer = [replace(one, max_new_tokens=300) for one in requests]  # than a reading of the metrics takes
            answered = pool.submit(lambda: list(patient.generate_batch(longer)))
            wait_until(lambda: server.metric("dragoman_num_requests_running") > 0, "the engine is busy")
            kill(*server.engines())
            outcomes = answered.result()
        assert sorted(outcome.index for outcome in outcomes) == list(range(16))
        assert [outcome.result.usage.generated_tokens for outcome in outcomes if outcome.result is not None] == [300] * 16
        assert server.metric("dragoman_engine_restarts_total") == 1
        draining_answers_what_was_read(server)
        assert server.wait() == 0


def draining_answers_what_was_read(server: Server) -> None:
    """A client that has not sent everything gets the answers to what was read, and that the rest was not."""
    is_over = threading.Event()

    def requests() -> Iterator[GenerateRequest]:
        yield from (request(f"r{i}", max_new_tokens=300) for i in range(4))
        is_over.wait(60)

    before = server.metric("dragoman_requests_admitted_total")
    with connection(server) as channel:
        complete = GenerationStub(channel).GenerateBatch(iter([request("all", max_new_tokens=300)]))
        call = GenerationStub(channel).GenerateBatch(requests())
        wait_until(lambda: server.metric("dragoman_requests_admitted_total") >= before + 4, "slots are full")
        server.wait_for_metric(1, "dragoman_num_requests_waiting")
        server.process.terminate()
        received = []

        def read() -> None:
            for response in call:
                received.append(response.response.usage.generated_tokens)

        assert failure(read) == ("UNAVAILABLE", "the server is shutting down")
        is_over.set()
        assert received == [300] * 4
        assert [answer.response.usage.generated_tokens for answer in complete] == [300], "a complete stream ends as ever"


LARGE: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "top_log_probs": 20, "max_new_tokens": 200}


def test_answers_larger_than_a_message_are_refused_before_any_work(server: Server, channel: grpc.Channel, stub: Any) -> None:
    before = server.metric("dragoman_requests_admitted_total")
    many = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 999}
    pair = ScoreRequest(model="alpha", text="x" * 60, target="y" * 900, return_alignment=True)
    for send, message, reason in (
        (stub.Generate, request("l", **LARGE), "top_log_probs: 20 with num_return_sequences of 4 and max_new_tokens of 200"),
        (stub.GenerateStream, request("l", return_log_probs=True, **many), "return_log_probs: with num_return_sequences of 4"),
        (stub.Generate, request("l", **many), "num_return_sequences: 4 with max_new_tokens of 999"),
        (stub.Score, pair, "return_alignment: the scores of "),
    ):
        code, details = failure(lambda send=send, message=message: send(message))
        assert code == INVALID and details.startswith(reason), details
        assert f"max_message_bytes of the server is {MAX_MESSAGE_BYTES}" in details
    assert server.metric("dragoman_requests_admitted_total") == before
    for send in (batch, bulk):
        assert outcomes(send(channel, [request("large", **LARGE), request("small")])) == [(0, "large", INVALID), (1, "small", "OK")]


@pytest.mark.parametrize("path", [BATCH, BULK])
def test_a_reader_that_takes_nothing_holds_back_its_own_stream_alone(server: Server, stub: Any, path: str) -> None:
    def num_answered() -> float:
        return server.metric("dragoman_request_success_total") - before

    before = server.metric("dragoman_request_success_total")
    with Http2(server.port, window=0) as connection:
        stream = connection.call(path, None, is_last=False)
        for i in range(30):
            message = request(f"r{i}")
            connection.send(stream, (message if path == BATCH else GenerateBulkRequest(requests=[message])).SerializeToString())
        wait_until(lambda: num_answered() == 2 * SLOTS, "the window is answered")
        assert stub.Generate(request("beside")).model == "alpha" and num_answered() == 2 * SLOTS + 1
        connection.send(stream, b"", is_last=True)  # a request without an id, or a message without requests
        for number in (0, stream):
            connection.open_window(number, 2**20)
        assert connection.wait_for_status(stream) == 0
    assert num_answered() == 30 + 1


@pytest.fixture
def inference(channel: grpc.Channel) -> Any:
    return GRPCInferenceServiceStub(channel)


def infer(inference: Any, *messages: ModelInferRequest) -> list[ModelStreamInferResponse]:
    return list(inference.ModelStreamInfer(iter(messages)))


def asking(*texts: str, request_id: str = "", outputs: Any = (), shape: Any = None, **parameters: Any) -> ModelInferRequest:
    return with_parameters(infer_request(*texts, model="alpha", id=request_id, outputs=outputs, shape=shape), **parameters)


def is_final(response: ModelStreamInferResponse) -> bool:
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)


def test_a_text_is_streamed_in_pieces_and_others_in_whole_answers(inference: Any) -> None:
    pieces = infer(inference, asking("a dog runs", request_id="mine", triton_enable_empty_final_response=True))
    assert [is_final(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True] and len(pieces) > 1
    assert {(piece.infer_response.id, piece.infer_response.model_name) for piece in pieces} == {("mine", "alpha")}
    for message, shape in (
        (asking("a", shape=[1, 1], stream=False), [1, 1]),
        (asking("a", num_beams=2, num_return_sequences=2), [1, 2]),
        (asking("a", "b", "c", outputs=[{"name": "text_output"}]), [3]),
    ):
        [whole] = infer(inference, message)
        assert is_final(whole) and grpc_outputs(whole.infer_response)["text_output"][0] == shape
    assert list(grpc_outputs(whole.infer_response)) == ["text_output"]


def test_a_message_that_fails_leaves_the_stream_open(inference: Any) -> None:
    two = {"num_beams": 2, "num_return_sequences": 2}
    messages = {
        "a": (asking(" ", request_id="a"), "text: is blank"),
        "b": (asking("a", " ", request_id="b"), "text_input[1]: text: is blank"),
        "c": (asking("a", request_id="c", num_beam=2), "parameters: 'num_beam' is not known"),
        "": (asking("a", request_id="x" * 1000), "id: 1000 characters"),
        "d": (asking("a", "b", request_id="d", stream=True), "stream: goes with one text only, and there are 2"),
        "e": (asking("a", request_id="e", stream=True, **two), "stream: goes with one answer only"),
        "f": (asking("a", request_id="f", stream=False), ""),
    }
    found = {response.infer_response.id: response for response in infer(inference, *(message for message, _ in messages.values()))}
    assert set(found) == set(messages) and all(map(is_final, found.values()))
    for name, (_, reason) in messages.items():
        assert found[name].error_message.startswith(f"{INVALID}: {reason}" if reason else "")
        assert bool(reason) == bool(found[name].error_message)


def test_an_id_may_come_again_when_its_message_is_answered(server: Server, inference: Any) -> None:
    gate = threading.Event()

    def messages() -> Iterator[ModelInferRequest]:
        yield from [asking("a", request_id="mine", stream=False)] * 2
        gate.wait(60)
        yield asking("a", request_id="mine", stream=False)
        yield asking(*["a"] * 40, request_id="several")

    with stopped(*server.engines("alpha")):
        call = inference.ModelStreamInfer(messages())
        assert next(call).error_message.startswith(f"{INVALID}: id: is that of another request")
    assert not next(call).error_message
    gate.set()
    assert {response.infer_response.id for response in call if not response.error_message} == {"mine", "several"}


def test_texts_of_a_message_join_the_batch_with_records_of_their_own_and_fail_together(server: Server, inference: Any) -> None:
    before = server.metric("dragoman_request_success_total", model="alpha")
    message = with_tensor(asking(*map(str, range(30)), request_id="texts"), "max_new_tokens", list(range(1, 31)))
    found = grpc_outputs(inference.ModelInfer(message))
    assert found["text_output"][0] == [30] and found["num_output_tokens"][1] == list(range(1, 31))
    assert server.metric("dragoman_request_success_total", model="alpha") == before + 30
    wait_until(lambda: any(line["request_id"] == "texts" for line in server.logged(Event.CALL)), "the call is logged")
    items = [line for line in server.logged(Event.ITEM) if line["batch_id"] == "texts"]
    assert sorted(line["request_id"] for line in items) == sorted(f"texts#{number}" for number in range(30))
    labels = {"model": "alpha", "code": "CANCELLED"}
    failed = server.metric("dragoman_requests_failed_total", **labels)
    with stopped(*server.engines("alpha")):
        message = asking("a", "b", "c", " ")
        assert failure(lambda: inference.ModelInfer(message)) == (INVALID, "text_input[3]: text: is blank")
    server.wait_for_metric(failed + 3, "dragoman_requests_failed_total", **labels)
    for message, reason in (
        (asking("a", stream=True), "stream: goes with ModelStreamInfer only"),
        (asking("a", "b", top_log_probs=20, max_new_tokens=200), "max_message_bytes of the server is"),
        (asking(*["a"] * 1000), "request: its answer takes"),
        (asking("a", timeout=1), "the deadline passed"),
    ):
        assert reason in failure(lambda message=message: inference.ModelInfer(message))[1]
    assert inference.ModelInfer(asking("a", timeout=2**63 - 1)).model_name == "alpha"
