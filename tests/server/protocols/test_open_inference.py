"""Messages of the Open Inference Protocol over gRPC: the requests they become, and the field of every refusal; any bytes."""

import json
import random
import sys
from typing import Any

import msgspec
import pytest

from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.grpc.interceptors import to_status
from dragoman.server.protocols.grpc.reading import LARGE_BYTES, Refused, large_bytes_read
from dragoman.server.protocols.openinference.requests import FIELDS, MAX_TEXTS, SYNONYMS, Inference, to_inference
from dragoman.server.protocols.openinference.service import infer_parser, to_raw_request
from dragoman.server.service.requests import GenerateRequest, Term
from dragoman.v1.generation_pb2 import GenerateRequest as Native
from tests.system.harness.openinference import infer_request as asking
from tests.system.harness.openinference import raw_bytes, with_parameters, with_tensor

# A value of each field that differs from the default.
VALUES: dict[str, Any] = {"max_new_tokens": 7, "truncate": True, "priority": -3, "num_beams": 4, "num_return_sequences": 2}
VALUES |= {"length_penalty": 0.5, "early_stopping": True, "do_sample": True, "temperature": 0.75, "top_k": 5, "top_p": 0.25}
VALUES |= {"seed": 2**63 + 1, "min_new_tokens": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "top_log_probs": 6}
VALUES |= {"suppressed_tokens": (4, 5), "forced_prefix": "Ein Hund", "return_alternatives": True, "return_log_probs": True}
VALUES |= {"markup": "html", "keep_placeholders": True, "translate_attributes": True}
VALUES |= {"source_language": "en", "target_language": "de", "special_tokens_in_text": True, "split": "lines", "no_cache": True}
VALUES |= {"terms": (Term("dog", ("Hund", "Köter")), Term("Acme", case_sensitive=True)), "glossary": "house"}
OF_THE_MESSAGE = {"model", "model_version", "request_id", "text", "indexes"}


def read(request: ModelInferRequest) -> Inference:
    return to_inference(to_raw_request(request), request.ByteSize())


def only(request: ModelInferRequest) -> GenerateRequest:
    [wanted] = read(request).requests
    return wanted


def refusal(request: ModelInferRequest) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read(request)
    return refused.value.message


def message(*inputs: dict[str, Any], **fields: Any) -> ModelInferRequest:
    """Return a message of inputs that are one text each, but for what they have themselves."""
    return ModelInferRequest(inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [1]} | each for each in inputs], **fields)


def as_list(name: str) -> list[Any]:
    if name == "terms":
        return [in_json(VALUES[name])]
    return list(VALUES[name]) if isinstance(VALUES[name], tuple) else [VALUES[name]]


def in_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def test_every_field_of_a_request_has_a_name() -> None:
    names = {field.name for field in msgspec.structs.fields(GenerateRequest)}
    assert set(FIELDS) == set(VALUES) == names - OF_THE_MESSAGE - {"tag_rules"}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_means_the_same_as_tensor_parameter_and_json(name: str) -> None:
    expected = GenerateRequest(model="en-de", text="a", **{name: VALUES[name]})
    datatype = FIELDS[name].datatype
    assert only(with_tensor(asking("a"), name, as_list(name), datatype)) == expected
    document = in_json({name: VALUES[name]})
    assert only(with_tensor(asking("a"), "sampling_parameters", [document])) == expected
    assert only(with_parameters(asking("a"), sampling_parameters=document)) == expected
    value = VALUES[name] if isinstance(VALUES[name], str) else in_json(VALUES[name])
    assert only(with_parameters(asking("a"), **{name: value})) == expected, "some clients can send strings only"
    if name not in ("suppressed_tokens", "seed", "terms"):
        assert only(with_parameters(asking("a"), **{name: VALUES[name]})) == expected


def test_typed_contents_are_read_like_raw_ones() -> None:
    request = message(
        {"shape": [2, 1], "contents": {"bytes_contents": [b"a", b"b"]}},
        {"name": "num_beams", "datatype": "INT8", "contents": {"int_contents": [3]}},
        {"name": "seed", "datatype": "UINT64", "shape": [2], "contents": {"uint64_contents": [1, 2]}},
        {"name": "top_p", "datatype": "FP32", "shape": [2, 1], "contents": {"fp32_contents": [0.5, 0.25]}},
    )
    first, second = read(request).requests
    assert (first.text, first.num_beams, first.seed, first.top_p) == ("a", 3, 1, 0.5)
    assert (second.text, second.num_beams, second.seed, second.top_p) == ("b", 3, 2, 0.25)


@pytest.mark.parametrize("shape", [[3], [3, 1]])
def test_a_tensor_is_for_all_texts_or_for_each(shape: list[int]) -> None:
    request = with_tensor(asking("a", "b", "c", shape=shape), "max_new_tokens", [1, 2, 3], shape=shape)
    with_tensor(request, "truncate", [True], shape=[1, 1])
    with_tensor(request, "sampling_parameters", ['{"n": 2}', '{"n": 2, "num_beams": 2}', '{"n": 2}'])
    inference = read(request)
    found = [(each.max_new_tokens, each.truncate, each.num_beams) for each in inference.requests]
    assert found == [(1, True, None), (2, True, 2), (3, True, None)]
    assert inference.has_rows == (len(shape) == 2)


def test_names_of_vllm_stand_for_the_same_fields() -> None:
    document = json.dumps({synonym: VALUES[name] for synonym, name in SYNONYMS.items()})
    wanted = only(with_parameters(asking("a"), sampling_parameters=document))
    assert wanted == GenerateRequest(model="en-de", text="a", **{name: VALUES[name] for name in SYNONYMS.values()})


def test_parameters_of_the_message_are_no_fields_of_requests() -> None:
    request = with_parameters(asking("a", id="mine"), timeout=1_500_000, exclude_input_in_output=True, stream=False)
    with_parameters(request, triton_enable_empty_final_response=True, binary_data_output=True)
    request.inputs[0].parameters["binary_data_size"].int64_param = 5
    inference = read(request)
    assert (inference.request_id, inference.timeout_seconds, inference.is_streamed) == ("mine", 1.5, False)
    assert only(with_parameters(asking("a"), timeout=0)) and read(with_parameters(asking("a"), timeout=0)).timeout_seconds is None
    assert inference.requests == [GenerateRequest(model="en-de", text="a")]
    in_single_precision = Native(temperature=0.7).temperature
    assert only(with_parameters(asking("a"), temperature=0.7)).temperature == in_single_precision != 0.7


def tensor(name: str, values: list[Any], datatype: str = "", shape: list[int] | None = None) -> ModelInferRequest:
    return with_tensor(asking("a", "b"), name, values, datatype, shape)


def lying(shape: list[int], *texts: bytes) -> ModelInferRequest:
    return asking(*(texts or (b"a", b"b")), shape=shape)


def raw(content: bytes, **changes: Any) -> ModelInferRequest:
    return message(changes, raw_input_contents=[content])


def document(text: str | bytes) -> ModelInferRequest:
    return with_tensor(asking("a"), "sampling_parameters", [text])


TYPED = {"contents": {"bytes_contents": [b"a"]}}
REFUSED = [
    (ModelInferRequest(), "text_input: is missing"),
    (raw(b"", shape=[0]), "text_input: has no text"),
    (lying([]), "text_input: its shape has 0 dimensions, and may have 1 to 2"),
    (lying([-2]), "text_input: its shape [-2] has a negative dimension"),
    (lying([2**32, 2**32]), f"text_input: its shape [4294967296, 4294967296] has {2**64} elements"),
    (lying([1, 2]), "text_input: its shape is [1, 2]; it has to be [N] or [N, 1]"),
    (lying([3]), "text_input: its raw content ends before element 2 of 3"),
    (lying([1]), "text_input: its raw content has 5 bytes more than 1 elements"),
    (lying([MAX_TEXTS + 1]), f"at most {MAX_TEXTS} are allowed"),
    (raw(b"\xff\xff\xff\xff"), "text_input: element 0 ends behind its raw content"),
    (raw(b"\x01\x00"), "text_input: its raw content ends before element 0 of 1"),
    (asking(b"a", b"\xff"), "text_input[1]: is not UTF-8"),
    (with_tensor(ModelInferRequest(), "text_input", [1]), "text_input: datatype INT64; it has to be BYTES"),
    (with_tensor(asking("a"), "text_input", ["b"]), "text_input: is given twice"),
    (raw(raw_bytes("a"), **TYPED), "text_input: its content is in raw_input_contents and in contents"),
    (message({}, raw_input_contents=[b"", b""]), "raw_input_contents: 2 for 1 inputs"),
    (message({"contents": {"int_contents": [1]}}), "its content is in int_contents; that of BYTES is bytes_contents"),
    (message({"datatype": "FP16", "contents": {"fp32_contents": [1.0]}}), "FP16 has no typed content"),
    (
        message(TYPED, {"name": "num_beams", "datatype": "INT8", "contents": {"int_contents": [300]}}),
        "num_beams: an element is no INT8",
    ),
    (message({"datatype": "BF16", "contents": {"fp32_contents": [1.0]}}), "datatype 'BF16' is not known"),
    (raw(raw_bytes("a"), parameters={"shared_memory_region": {"string_param": "x"}}), "text_input: shared memory is not offered"),
    (with_tensor(asking("a"), "num_beam", [1]), "inputs: 'num_beam' is not known; there are text_input"),
    (with_tensor(asking("a"), "x" * 10**6, [1]), f"inputs: '{'x' * 64}...' is not known"),
    (ModelInferRequest(inputs=[{"name": str(i)} for i in range(10**4)]), "inputs: 10000; there are"),
    (with_parameters(asking("a"), **{f"p{i}": 1 for i in range(10**4)}), "parameters: 10000; there are"),
    (with_parameters(asking("a"), sequence_id=3), "parameters: 'sequence_id' is not known"),
    (asking("a", parameters={"seed": {}}), "parameters: 'seed' has no value that is known"),
    (tensor("seed", [1, 2, 3]), "seed: its shape is [3]; it has to be [1], [N], [1, 1] or [N, 1], where N is 2"),
    (tensor("suppressed_tokens", [1, 2], shape=[2, 1]), "suppressed_tokens: its shape is [2, 1]"),
    (tensor("suppressed_tokens", [1] * 257), "suppressed_tokens: 257 tokens; at most 256"),
    (with_parameters(asking("a"), num_beams=True), "num_beams: is not an integer"),
    (document('{"truncate": 1}'), "sampling_parameters: truncate: is not true or false"),
    (document('{"top_p": "x"}'), "sampling_parameters: top_p: is not a number"),
    (document("[1]"), "sampling_parameters: is not a JSON object"),
    (raw(raw_bytes("a"), parameters={"a": {"bool_param": True}}), "text_input: parameter 'a' of an input is not known"),
    (with_parameters(asking("a"), top_p=float("nan")), "top_p: is not a finite number"),
    (with_tensor(asking("a"), "temperature", [float("inf")]), "temperature: is not a finite number"),
    (
        with_parameters(with_tensor(asking("a"), "num_beams", [2]), num_beams=2),
        "num_beams: is given twice, as a parameter and as a tensor",
    ),
    (
        with_parameters(with_tensor(asking("a"), "sampling_parameters", ['{"num_beams": 2}']), num_beams=2),
        "num_beams: is given twice, as a parameter and in sampling_parameters",
    ),
    (
        with_parameters(with_tensor(asking("a"), "sampling_parameters", ['{"n": 2}']), sampling_parameters='{"n": 2}'),
        "num_return_sequences: is given twice, in sampling_parameters",
    ),
    (document('{"n": 2, "num_return_sequences": 2}'), "num_return_sequences: is given twice in sampling_parameters"),
    (document("{"), "sampling_parameters: cannot be read"),
    (document(b'{"n": "\xff"}'), "sampling_parameters: is not UTF-8"),
    (document('{"n": 1, "n": 2}'), "n: is given twice"),
    (document('{"best_of": 2}'), "sampling_parameters: 'best_of' is not known; there are max_new_tokens"),
    (document('{"n":' + "[" * 30_000 + "]" * 30_000 + "}"), "sampling_parameters: "),
    (document('{"n":' + " " * 70_000 + "1}"), "characters of JSON; at most 65536 are allowed"),
    (document('{"top_p": NaN}'), "sampling_parameters: cannot be read"),
    (document('{"top_p": 1e999}'), "sampling_parameters: top_p: is not a finite number"),
    (document('{"top_p": 1' + "0" * 400 + "}"), "sampling_parameters: top_p: is not a finite number"),
    (document('{"seed": ' + "9" * 4000 + "}"), "sampling_parameters: seed: is an integer of more than 64 bits"),
    (document('{"n": true}'), "sampling_parameters: n: is not an integer"),
    (document('{"forced_prefix": "\\ud800"}'), "sampling_parameters: cannot be read"),
    (document('{"text": "b"}'), "'text' is not known"),
    (with_tensor(asking("a", "b"), "num_return_sequences", [1, 2]), "num_return_sequences: has to be the same for all texts"),
    (with_parameters(asking("a"), timeout=-1), "timeout: -1 microseconds"),
    (with_parameters(asking("a"), exclude_input_in_output=False), "exclude_input_in_output: false;"),
    (with_tensor(asking("a", "b"), "stream", [True, False]), "stream: has to be the same for all texts"),
    (asking("a", outputs=[{"name": "text"}]), "outputs: 'text' is not known; there are text_output, score"),
    (asking("a", outputs=[{"name": "score"}] * 2), "outputs: score is asked for twice"),
    (
        asking("a", outputs=[{"name": "score", "parameters": {"classification": {"int64_param": 3}}}]),
        "score: parameter 'classification' of an output is not known",
    ),
    (asking("a", outputs=[{"name": "score"}] * 10**4), "outputs: 10000; there are"),
    (asking("a", model="x" * 129), "model: 129 characters"),
]


@pytest.mark.parametrize(("request_", "reason"), REFUSED, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_invalid_messages_are_refused_by_field(request_: ModelInferRequest, reason: str) -> None:
    message = refusal(request_)
    assert reason in message and len(message) < 2000


def test_an_unfit_message_or_id_is_refused_and_not_repeated() -> None:
    reads = infer_parser(ModelInferRequest.FromString, lambda: sys.maxsize)
    refused = reads(b"\xff\xff")
    assert isinstance(refused, Refused) and refused.error.message == "request: cannot be parsed; is every string UTF-8?"
    refused = reads(asking("a", id="x" * 2**20).SerializeToString())
    assert isinstance(refused, Refused) and refused.request_id == ""
    assert refused.error.message == f"id: {2**20} characters; at most 128 are allowed"
    refused = reads(asking("\ud800".encode(errors="surrogatepass"), id="mine").SerializeToString())
    assert isinstance(refused, Refused) and (refused.request_id, refused.error.message) == ("mine", "text_input[0]: is not UTF-8")


def test_of_a_large_message_only_what_a_model_could_use_is_kept() -> None:
    reads = infer_parser(ModelInferRequest.FromString, lambda: 100)
    request = with_parameters(asking("ä" * LARGE_BYTES + "z" * 100, "b"), forced_prefix="c" * 1000, source_language="en")
    inference = reads(request.SerializeToString())
    assert isinstance(inference, Inference)
    assert [x.text for x in inference.requests] == ["ä" * 100 + "z" * 100, "b"], "both ends"
    assert {(x.forced_prefix, x.source_language) for x in inference.requests} == {("c" * 200, "en")}
    assert large_bytes_read.get() == request.ByteSize()
    large_bytes_read.set(0)


# Any bytes

reads = infer_parser(ModelInferRequest.FromString, lambda: 100)


def check(data: bytes) -> Inference | Refused:
    outcome = reads(data)
    if isinstance(outcome, Refused):
        assert outcome.error.code == "INVALID_ARGUMENT"
        field, colon, reason = outcome.error.message.partition(": ")
        assert field and colon and reason
        assert to_status(outcome.error, outcome.request_id).details
    else:
        assert len(outcome) >= 1
    return outcome


def test_a_message_with_a_few_bytes_changed_is_read_or_refused() -> None:
    chosen = random.Random(0)
    good = with_parameters(asking("a dog", "runs", shape=[2, 1], id="mine"), num_beams=2, timeout=5, sampling_parameters='{"n": 2}')
    with_tensor(with_tensor(good, "seed", [1, 2], "UINT64"), "forced_prefix", ["Ein", "Der"], shape=[2, 1])
    data = good.SerializeToString()
    kinds = set()
    for _ in range(5000):
        changed = bytearray(data)
        for _ in range(chosen.randint(1, 4)):
            position = chosen.randrange(len(changed))
            match chosen.randrange(3):
                case 0:
                    changed[position] = chosen.randrange(256)
                case 1:
                    del changed[position : position + chosen.randint(1, 8)]
                case _:
                    changed[position:position] = chosen.randbytes(chosen.randint(1, 4))
        kinds.add(type(check(bytes(changed))))
    assert kinds == {Inference, Refused}
