"""What a message is taken to mean, and what is refused, by name."""

import json
import sys
from typing import Any

import msgspec
import pytest

from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.server.core.requests import GenerateRequest
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.grpc.reading import LARGE_BYTES, Refused, large_bytes_read
from dragoman.server.faces.oip.fields import FIELDS, SYNONYMS
from dragoman.server.faces.oip.inference import MAX_TEXTS, Inference, to_inference
from dragoman.server.faces.oip.reading import infer_reader, to_asked
from tests.system.harness.openinference_messages import asking, raw_bytes, with_parameters, with_tensor

# A value of each field that is not what a request without it has.
VALUES: dict[str, Any] = {
    "max_new_tokens": 7,
    "truncate": True,
    "priority": -3,
    "num_beams": 4,
    "num_return_sequences": 2,
    "length_penalty": 0.5,
    "early_stopping": True,
    "do_sample": True,
    "temperature": 0.75,
    "top_k": 5,
    "top_p": 0.25,
    "seed": 2**63 + 1,
    "min_new_tokens": 3,
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "suppressed_tokens": (4, 5),
    "forced_prefix": "Ein Hund",
    "return_alternatives": True,
    "return_log_probs": True,
    "top_log_probs": 6,
    "source_language": "en",
    "target_language": "de",
}
OF_THE_MESSAGE = {"model", "model_version", "request_id", "text"}


def read(request: ModelInferRequest) -> Inference:
    return to_inference(to_asked(request), request.ByteSize())


def only(request: ModelInferRequest) -> GenerateRequest:
    [wanted] = read(request).requests
    return wanted


def refusal(request: ModelInferRequest) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read(request)
    return refused.value.message


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def test_every_field_of_a_request_can_be_said() -> None:
    names = {field.name for field in msgspec.structs.fields(GenerateRequest)}
    assert set(FIELDS) == set(VALUES) == names - OF_THE_MESSAGE


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_means_the_same_as_tensor_parameter_and_json(name: str) -> None:
    expected = GenerateRequest(model="en-de", text="a", **{name: VALUES[name]})
    datatype = FIELDS[name].datatype
    assert only(with_tensor(asking("a"), name, as_list(VALUES[name]), datatype)) == expected
    document = json.dumps({name: VALUES[name]})
    assert only(with_tensor(asking("a"), "sampling_parameters", [document])) == expected
    assert only(with_parameters(asking("a"), sampling_parameters=document)) == expected
    value = VALUES[name] if isinstance(VALUES[name], str) else json.dumps(VALUES[name])
    assert only(with_parameters(asking("a"), **{name: value})) == expected, "some clients can send strings only"
    if name not in ("suppressed_tokens", "seed"):
        assert only(with_parameters(asking("a"), **{name: VALUES[name]})) == expected


def test_typed_contents_are_read_like_raw_ones() -> None:
    request = ModelInferRequest(model_name="en-de")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[2, 1]).contents.bytes_contents.extend([b"a", b"b"])
    request.inputs.add(name="num_beams", datatype="INT8", shape=[1]).contents.int_contents.append(3)
    request.inputs.add(name="seed", datatype="UINT64", shape=[2]).contents.uint64_contents.extend([1, 2])
    request.inputs.add(name="top_p", datatype="FP32", shape=[2, 1]).contents.fp32_contents.extend([0.5, 0.25])
    first, second = read(request).requests
    assert (first.text, first.num_beams, first.seed, first.top_p) == ("a", 3, 1, 0.5)
    assert (second.text, second.num_beams, second.seed, second.top_p) == ("b", 3, 2, 0.25)


@pytest.mark.parametrize("shape", [[3], [3, 1]])
def test_a_tensor_speaks_of_all_texts_or_of_each(shape: list[int]) -> None:
    request = with_tensor(asking("a", "b", "c", shape=shape), "max_new_tokens", [1, 2, 3], shape=shape)
    with_tensor(request, "truncate", [True], shape=[1, 1])
    with_tensor(request, "sampling_parameters", ['{"n": 2}', '{"n": 2, "num_beams": 2}', '{"n": 2}'])
    inference = read(request)
    assert [(x.max_new_tokens, x.truncate, x.num_beams) for x in inference.requests] == [
        (1, True, None),
        (2, True, 2),
        (3, True, None),
    ]
    assert inference.has_rows == (len(shape) == 2)


def test_names_of_vllm_stand_for_the_same_fields() -> None:
    document = json.dumps({synonym: VALUES[name] for synonym, name in SYNONYMS.items()})
    wanted = only(with_parameters(asking("a"), sampling_parameters=document))
    assert wanted == GenerateRequest(model="en-de", text="a", **{name: VALUES[name] for name in SYNONYMS.values()})


def test_numbers_are_of_single_precision_as_in_the_native_service() -> None:
    from dragoman.v1.generation_pb2 import GenerateRequest as Native

    assert only(with_parameters(asking("a"), temperature=0.7)).temperature == Native(temperature=0.7).temperature


def test_what_concerns_the_message_is_said_of_no_request() -> None:
    request = with_parameters(asking("a", id="mine"), timeout=1_500_000, exclude_input_in_output=True, stream=False)
    with_parameters(request, triton_enable_empty_final_response=True)
    inference = read(request)
    assert (inference.request_id, inference.timeout_seconds, inference.is_streamed) == ("mine", 1.5, False)
    assert only(with_parameters(asking("a"), timeout=0)) and read(with_parameters(asking("a"), timeout=0)).timeout_seconds is None
    assert inference.requests == [GenerateRequest(model="en-de", text="a")]


def tensor(name: str, values: list[Any], datatype: str = "", shape: list[int] | None = None) -> ModelInferRequest:
    return with_tensor(asking("a", "b"), name, values, datatype, shape)


def lying(shape: list[int], *texts: bytes) -> ModelInferRequest:
    return asking(*(texts or (b"a", b"b")), shape=shape)


def raw(content: bytes, shape: list[int] | None = None) -> ModelInferRequest:
    request = asking("a", shape=shape)
    request.raw_input_contents[0] = content
    return request


def mixed() -> ModelInferRequest:
    request = asking("a")
    request.inputs[0].contents.bytes_contents.append(b"a")
    return request


def shared_memory() -> ModelInferRequest:
    request = asking("a")
    request.inputs[0].parameters["shared_memory_region"].string_param = "x"
    return request


def typed(datatype: str, field: str, values: list[Any]) -> ModelInferRequest:
    request = ModelInferRequest()
    getattr(request.inputs.add(name="text_input", datatype=datatype, shape=[len(values)]).contents, field).extend(values)
    return request


def typed_number(datatype: str, field: str, value: Any) -> ModelInferRequest:
    request = typed("BYTES", "bytes_contents", [b"a"])
    getattr(request.inputs.add(name="num_beams", datatype=datatype, shape=[1]).contents, field).append(value)
    return request


def document(text: str | bytes) -> ModelInferRequest:
    return with_tensor(asking("a"), "sampling_parameters", [text])


def wanting(*names: str) -> ModelInferRequest:
    request = asking("a")
    for name in names:
        request.outputs.add(name=name)
    return request


REFUSED = {
    "no input": (ModelInferRequest(), "text_input: is missing"),
    "no text": (lying([0], b""), "text_input: its raw content has 4 bytes more than 0 elements"),
    "empty": (raw(b"", [0]), "text_input: has no text"),
    "empty rows": (raw(b"", [0, 1]), "text_input: has no text"),
    "a scalar": (lying([]), "text_input: its shape has 0 dimensions, and may have 1 to 2"),
    "a cube": (lying([1, 1, 2]), "text_input: its shape has 3 dimensions"),
    "many dimensions": (lying([1] * 100_000), "text_input: its shape has 100000 dimensions"),
    "negative": (lying([-2]), "text_input: its shape [-2] has a negative dimension"),
    "two negatives": (lying([-2, -1]), "text_input: its shape [-2, -1] has a negative dimension"),
    "overflow": (lying([2**32, 2**32]), f"text_input: its shape [4294967296, 4294967296] has {2**64} elements"),
    "a column too many": (lying([1, 2]), "text_input: its shape is [1, 2]; it has to be [N] or [N, 1]"),
    "more than there are": (lying([3]), "text_input: its raw content ends before element 2 of 3"),
    "fewer than there are": (lying([1]), "text_input: its raw content has 5 bytes more than 1 elements"),
    "too many texts": (lying([MAX_TEXTS + 1]), f"at most {MAX_TEXTS} are allowed"),
    "a million texts": (asking(*[b""] * 10**6), "has 1000000 elements; at most 1024 are allowed"),
    "a length beyond": (raw(b"\xff\xff\xff\xff"), "text_input: element 0 ends behind its raw content"),
    "half a length": (raw(b"\x01\x00"), "text_input: its raw content ends before element 0 of 1"),
    "no UTF-8": (asking(b"a", b"\xff"), "text_input[1]: is not UTF-8"),
    "texts as numbers": (with_tensor(ModelInferRequest(), "text_input", [1]), "text_input: datatype INT64; it has to be BYTES"),
    "twice": (with_tensor(asking("a"), "text_input", ["b"]), "text_input: is given twice"),
    "raw and typed": (mixed(), "text_input: its content is in raw_input_contents and in contents"),
    "a raw content too many": (
        ModelInferRequest(inputs=asking("a").inputs, raw_input_contents=[b"", b""]),
        "raw_input_contents: 2 for 1 inputs",
    ),
    "typed content of another": (
        typed("BYTES", "int_contents", [1]),
        "its content is in int_contents; that of BYTES is bytes_contents",
    ),
    "typed content of none": (typed("FP16", "fp32_contents", [1.0]), "FP16 has no typed content"),
    "typed beyond its type": (typed_number("INT8", "int_contents", 300), "num_beams: an element is no INT8"),
    "BF16": (typed("BF16", "fp32_contents", [1.0]), "datatype 'BF16' is not known"),
    "shared memory": (shared_memory(), "text_input: shared memory is not offered"),
    "an unknown input": (with_tensor(asking("a"), "num_beam", [1]), "inputs: 'num_beam' is not known; there are text_input"),
    "a long name": (with_tensor(asking("a"), "x" * 10**6, [1]), f"inputs: '{'x' * 64}...' is not known"),
    "many inputs": (
        ModelInferRequest(inputs=[{"name": str(i)} for i in range(10**4)]),
        "inputs: 10000; there are",
    ),
    "many parameters": (with_parameters(asking("a"), **{f"p{i}": 1 for i in range(10**4)}), "parameters: 10000; there are"),
    "an unknown parameter": (with_parameters(asking("a"), sequence_id=3), "parameters: 'sequence_id' is not known"),
    "a parameter without value": (
        ModelInferRequest(inputs=asking("a").inputs, raw_input_contents=[raw_bytes("a")], parameters={"seed": {}}),
        "parameters: 'seed' has no value that is known",
    ),
    "two shapes": (tensor("seed", [1, 2, 3]), "seed: its shape is [3]; it has to be [1], [N], [1, 1] or [N, 1], where N is 2"),
    "a row": (tensor("seed", [1, 2], shape=[1, 2]), "seed: its shape is [1, 2]"),
    "tokens for each": (tensor("suppressed_tokens", [1, 2], shape=[2, 1]), "suppressed_tokens: its shape is [2, 1]"),
    "too many tokens": (tensor("suppressed_tokens", [1] * 257), "suppressed_tokens: 257 tokens; at most 256"),
    "a flag as a number": (tensor("do_sample", [1]), "do_sample: datatype INT64; it has to be BOOL"),
    "a number as a flag": (tensor("num_beams", [True]), "num_beams: datatype BOOL"),
    "a parameter of another type": (with_parameters(asking("a"), num_beams=True), "num_beams: is not an integer"),
    "a fraction": (with_parameters(asking("a"), num_beams=2.0), "num_beams: is not an integer"),
    "not a number": (with_parameters(asking("a"), top_p=float("nan")), "top_p: is not a finite number"),
    "infinite": (with_tensor(asking("a"), "temperature", [float("inf")]), "temperature: is not a finite number"),
    "beyond single precision": (with_parameters(asking("a"), temperature=1e300), "temperature: is not a finite number"),
    "both ways": (
        with_parameters(with_tensor(asking("a"), "num_beams", [2]), num_beams=2),
        "num_beams: is given twice, as a parameter and as a tensor",
    ),
    "in JSON, too": (
        with_parameters(with_tensor(asking("a"), "sampling_parameters", ['{"num_beams": 2}']), num_beams=2),
        "num_beams: is given twice, as a parameter and in sampling_parameters",
    ),
    "JSON twice": (
        with_parameters(with_tensor(asking("a"), "sampling_parameters", ['{"n": 2}']), sampling_parameters='{"n": 2}'),
        "num_return_sequences: is given twice, in sampling_parameters",
    ),
    "with its synonym": (
        document('{"n": 2, "num_return_sequences": 2}'),
        "num_return_sequences: is given twice in sampling_parameters",
    ),
    "no JSON": (document("{"), "sampling_parameters: is not JSON"),
    "no object": (document("[1]"), "sampling_parameters: is not a JSON object"),
    "no UTF-8 in JSON": (document(b'{"n": "\xff"}'), "sampling_parameters: is not JSON"),
    "a key twice": (document('{"n": 1, "n": 2}'), "has a key twice"),
    "an unknown key": (document('{"best_of": 2}'), "sampling_parameters: 'best_of' is not known; there are max_new_tokens"),
    "deep": (document('{"n":' + "[" * 30_000 + "]" * 30_000 + "}"), "sampling_parameters: "),
    "long": (document('{"n":' + " " * 70_000 + "1}"), "characters of JSON; at most 65536 are allowed"),
    "NaN": (document('{"top_p": NaN}'), "sampling_parameters: is not JSON"),
    "Infinity": (document('{"top_p": -Infinity}'), "sampling_parameters: is not JSON"),
    "a large exponent": (document('{"top_p": 1e999}'), "sampling_parameters: top_p: is not a finite number"),
    "a long integer": (document('{"seed": ' + "9" * 4000 + "}"), "sampling_parameters: seed: is an integer of more than 64 bits"),
    "a longer integer": (document('{"seed": ' + "9" * 9000 + "}"), "sampling_parameters: is not JSON"),
    "true as a number": (document('{"n": true}'), "sampling_parameters: n: is not an integer"),
    "null": (document('{"n": null}'), "sampling_parameters: n: is not an integer"),
    "half a pair": (document('{"forced_prefix": "\\ud800"}'), "sampling_parameters: forced_prefix: is not UTF-8"),
    "a message's own": (document('{"text": "b"}'), "'text' is not known"),
    "numbers of answers": (
        with_tensor(asking("a", "b"), "num_return_sequences", [1, 2]),
        "num_return_sequences: has to be the same for all texts",
    ),
    "a negative timeout": (with_parameters(asking("a"), timeout=-1), "timeout: -1 microseconds"),
    "the input in the output": (with_parameters(asking("a"), exclude_input_in_output=False), "exclude_input_in_output: false;"),
    "two streams": (with_tensor(asking("a", "b"), "stream", [True, False]), "stream: has to be the same for all texts"),
    "an unknown output": (wanting("text"), "outputs: 'text' is not known; there are text_output, score"),
    "an output twice": (wanting("score", "score"), "outputs: score is asked for twice"),
    "many outputs": (wanting(*["score"] * 10**4), "outputs: 10000; there are"),
    "a long model": (asking("a", model="x" * 129), "model: 129 characters"),
    "a long version": (asking("a", model_version="x" * 129), "model_version: 129 characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_understood_is_refused_by_name(case: str) -> None:
    request, reason = REFUSED[case]
    message = refusal(request)
    assert reason in message
    assert len(message) < 2000


def test_parameters_of_an_output_are_refused() -> None:
    request = wanting("score")
    request.outputs[0].parameters["classification"].int64_param = 3
    assert refusal(request) == "score: parameter 'classification' of an output is not known"


def test_an_unfit_id_is_refused_and_not_repeated() -> None:
    reads = infer_reader(ModelInferRequest.FromString, lambda: sys.maxsize)
    refused = reads(asking("a", id="x" * 2**20).SerializeToString())
    assert isinstance(refused, Refused) and refused.request_id == ""
    assert refused.error.message == f"id: {2**20} characters; at most 128 are allowed"
    refused = reads(asking("\ud800".encode(errors="surrogatepass"), id="mine").SerializeToString())
    assert isinstance(refused, Refused) and (refused.request_id, refused.error.message) == ("mine", "text_input[0]: is not UTF-8")


def test_of_a_large_message_only_what_a_model_could_use_is_kept() -> None:
    reads = infer_reader(ModelInferRequest.FromString, lambda: 100)
    request = with_parameters(asking("ä" * LARGE_BYTES + "z" * 100, "b"), forced_prefix="c" * 1000, source_language="en")
    inference = reads(request.SerializeToString())
    assert isinstance(inference, Inference)
    assert [x.text for x in inference.requests] == ["ä" * 100 + "z" * 100, "b"], "both ends"
    assert {(x.forced_prefix, x.source_language) for x in inference.requests} == {("c" * 200, "en")}
    assert large_bytes_read.get() == request.ByteSize()
    large_bytes_read.set(0)


def test_what_is_no_message_is_refused() -> None:
    refused = infer_reader(ModelInferRequest.FromString, lambda: 100)(b"\xff\xff")
    assert isinstance(refused, Refused) and refused.error.message == "request: cannot be parsed; is every string UTF-8?"
