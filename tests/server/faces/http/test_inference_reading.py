"""What a body of the Open Inference Protocol's REST is taken to mean, and what is refused, by name; nothing else is raised."""

import json
import os
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.faces.http.inference.reading import Posted, _read_generate, _read_infer
from dragoman.server.faces.oip.inference import INPUTS, MAX_TEXTS
from dragoman.server.faces.oip.outputs import OUTPUTS
from dragoman.server.faces.oip.reading import infer_reader
from tests.system.harness import openinference_messages as messages
from tests.system.harness.openinference_bodies import asking, listed, raw, tensor, with_tensors

MODEL = ("en-de", "")
NUM_EXAMPLES = 10_000 if os.environ.get("TEST_ALL_EXAMPLES") else 1_000
quick = settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
by_grpc = infer_reader(ModelInferRequest.FromString, lambda: 10**6)


def read(body: Any, said: str | None = None) -> Posted:
    return _read_infer(body if isinstance(body, bytes) else json.dumps(body).encode(), said, MODEL, None)


def generated(body: Any) -> Posted:
    return _read_generate(body if isinstance(body, bytes) else json.dumps(body).encode(), MODEL, None)


def refusal(read: Any, *arguments: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read(*arguments)
    return refused.value.message


TENSORS: list[list[tuple[str, Any, str]]] = [
    [],
    [("num_beams", [3], "UINT32"), ("length_penalty", [0.1], "FP32")],
    [("max_new_tokens", [5, 6], "INT8"), ("temperature", [0.25, 3.4e38], "FP64"), ("do_sample", [True, False], "BOOL")],
    [("seed", [2**64 - 1], "UINT64"), ("suppressed_tokens", [4, 5, 6], "INT64"), ("forced_prefix", ["Ein ä", "日本"], "BYTES")],
    [("sampling_parameters", ['{"top_p": 0.3}', '{"top_p": 0.1}'], "BYTES"), ("num_return_sequences", [2], "UINT8")],
    [("sampling_parameters", ['{"beam_width": 2}'], "BYTES"), ("priority", [-3], "INT16")],
]


@pytest.mark.parametrize("tensors", TENSORS)
def test_the_core_is_asked_for_the_same_as_by_grpc(tensors: list[tuple[str, Any, str]]) -> None:
    request = messages.asking("äöü 日本 🐕", "b", shape=[2, 1], id="mine")
    for name, values, datatype in tensors:
        messages.with_tensor(request, name, values, datatype)
    expected = by_grpc(request.SerializeToString())
    body, headers = with_tensors(request)
    for found in (read(listed(request)), read(body, headers["Inference-Header-Content-Length"])):
        assert found.inference.requests == expected.requests
        assert (found.request_id, found.inference.has_rows, len(found)) == ("mine", True, 2)


PARAMETERS: dict[str, Any] = {
    "num_beams": 3,
    "length_penalty": 0.1,
    "temperature": "0.5",
    "suppressed_tokens": [5, 6],
    "forced_prefix": "Ein",
    "priority": 4,
    "early_stopping": True,
}


def test_parameters_mean_what_they_do_over_grpc_and_in_the_shorter_form() -> None:
    plain = {name: value for name, value in PARAMETERS.items() if name != "suppressed_tokens"}
    request = messages.with_parameters(messages.asking("a"), **plain, suppressed_tokens="[5, 6]", timeout=5_000_000)
    expected = by_grpc(request.SerializeToString())
    told = PARAMETERS | {"timeout": 5_000_000}
    bodies: list[dict[str, Any]] = [
        {"text_input": "a", "parameters": told},
        {"text_input": "a", **told},
        {
            "text_input": ["a"],
            "parameters": {"timeout": 5_000_000},
            "sampling_parameters": json.dumps(PARAMETERS | {"temperature": 0.5}),
        },
        {"text_input": "a", "timeout": 5_000_000, "parameters": {"sampling_parameters": PARAMETERS | {"temperature": 0.5}}},
    ]
    for found in (read(asking("a", parameters=told)), *map(generated, bodies)):
        assert found.inference.requests == expected.requests
        assert found.inference.timeout_seconds == expected.timeout_seconds == 5


def test_fractions_have_the_bits_of_single_precision() -> None:
    for value in (0.1, 1e-45, 3.4028234663852886e38, 1 / 3):
        [wanted] = read(asking("a", inputs=[tensor("top_p", "FP32", [1], [value])])).inference.requests
        assert wanted.top_p == struct.unpack("<f", struct.pack("<f", value))[0]


def test_tensors_may_be_some_in_the_json_and_some_behind_it() -> None:
    body = asking("a", "b", inputs=[tensor("num_beams", "UINT32", [1], [2])])
    body["inputs"][0] = {"name": "text_input", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 10}}
    head = json.dumps(body).encode()
    [first, second] = read(head + raw("a", "b"), str(len(head))).inference.requests
    assert (first.text, second.text, first.num_beams) == ("a", "b", 2)


def test_outputs_say_how_they_are_wanted() -> None:
    wanted = [{"name": "score", "parameters": {"binary_data": False}}, {"name": "text_output"}]
    found = read(asking("a", outputs=wanted, parameters={"binary_data_output": True}))
    assert (found.is_binary("score"), found.is_binary("text_output")) == (False, True)
    assert found.inference.outputs == ("score", "text_output")
    assert not read(asking("a")).is_binary("score")


def sized(size: Any, rest: bytes, **more: Any) -> tuple[bytes, str]:
    given = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}} | more
    head = json.dumps({"inputs": [given]}).encode()
    return head + rest, str(len(head))


REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "body: cannot be read"),
    "no object": (b"[]", "body: cannot be read: Expected `object`, got `array`"),
    "no UTF-8": (b'{"inputs": "\xff"}', "body: cannot be read"),
    "brackets": (b'{"inputs": [{"name": "a", "shape": [1], "datatype": "", "data": ' + b"[" * 10**5, "body: cannot be read"),
    "no inputs": ({}, "body: cannot be read: Object missing required field `inputs`"),
    "an unknown key": (asking("a", beams=1), "body: cannot be read: Object contains unknown field `beams`"),
    "no text": ({"inputs": []}, "text_input: is missing"),
    "another model": (asking("a", model_name="x"), "model_name: 'x' is not that of the path"),
    "an id that is not one": (asking("a", id="ä"), "id: "),
    "an unknown input": (asking("a", inputs=[tensor("beams", "INT8", [1], [1])]), "inputs: 'beams' is not known"),
    "twice": (asking("a", inputs=[tensor("text_input", "BYTES", [1], ["a"])]), "text_input: is given twice"),
    "no content": ({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]}, "text_input: has no content"),
    "other elements": ({"inputs": [tensor("text_input", "BYTES", [2], ["a"])]}, "text_input: its content has 1 elements"),
    "other rows": (
        {"inputs": [tensor("text_input", "BYTES", [2, 1], [["a", "b"]])]},
        "text_input: its content has not the shape [2, 1]",
    ),
    "rows and none": (
        {"inputs": [tensor("text_input", "BYTES", [2, 1], [["a"], "b"])]},
        "text_input: its content has not the shape",
    ),
    "rows in rows": ({"inputs": [tensor("text_input", "BYTES", [1, 1], [[["a"]]])]}, "text_input[0]: is not a text"),
    "a number as a text": (asking(3), "text_input[0]: is not a text"),  # type: ignore[arg-type]
    "half a character": (b'{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["\\ud800"]}]}', ""),
    "a negative shape": ({"inputs": [tensor("text_input", "BYTES", [-1], [])]}, "text_input: its shape [-1] has a negative"),
    "a shape of a million": ({"inputs": [tensor("text_input", "BYTES", [10**6], [])]}, "text_input: its shape [1000000] has"),
    "an endless dimension": (
        b'{"inputs": [{"name": "a", "datatype": "", "shape": [' + b"9" * 5000 + b"]}]}",
        "body: cannot be read",
    ),
    "many inputs": ({"inputs": [tensor("a", "", [1], [])] * 10**4}, "inputs: 10000; there are"),
    "many outputs": (asking("a", outputs=[{"name": "score"}] * 10**4), "outputs: 10000; there are"),
    "many parameters": (asking("a", parameters={f"p{i}": 1 for i in range(10**4)}), "parameters: 10000; there are"),
    "an unknown parameter": (asking("a", parameters={"beams": 1}), "parameters: 'beams' is not known"),
    "a parameter of nothing": (asking("a", parameters={"num_beams": None}), "num_beams: is not an integer"),
    "an endless parameter": (b'{"inputs": [], "parameters": {"seed": ' + b"9" * 5000 + b"}}", ""),
    "a large fraction": (asking("a", inputs=[tensor("top_p", "FP32", [1], [1e300])]), "top_p: an element is no FP32"),
    "an object as a number": (asking("a", inputs=[tensor("top_p", "FP32", [1], [{}])]), "top_p: an element is no FP32"),
    "half precision": (asking("a", inputs=[tensor("top_p", "FP16", [1], [0.5])]), "top_p: FP16 has no typed content; send it raw"),
    "a flag that is none": (asking("a", inputs=[tensor("do_sample", "BOOL", [1], ["no"])]), "do_sample: is not true or false"),
    "JSON that is a number": (
        asking("a", inputs=[tensor("sampling_parameters", "BYTES", [1], [1])]),
        "sampling_parameters: is not a JSON object",
    ),
    "shared memory": (
        {"inputs": [tensor("text_input", "BYTES", [1], []) | {"parameters": {"shared_memory_region": "x"}}]},
        "text_input: shared memory is not offered",
    ),
    "classes": (
        asking("a", outputs=[{"name": "score", "parameters": {"classification": 3}}]),
        "score: parameter 'classification' of an output is not known",
    ),
    "bytes that may be": (asking("a", parameters={"binary_data_output": 1}), "binary_data_output: is not true or false"),
    "a size without bytes": (sized(5, b""), "inputs[0]: binary_data_size is a number of bytes; 0 are left"),
    "a negative size": (sized(-1, b"abcde"), "inputs[0]: binary_data_size"),
    "a size that is true": (sized(True, b"abcde"), "inputs[0]: binary_data_size"),
    "bytes of no input": (sized(5, raw("a") + b"x"), "body: has 1 bytes behind the JSON that are of no input"),
    "bytes that lie": (sized(5, b"\xff\xff\xff\xffa"), "text_input: element 0 ends behind its raw content"),
    "both": (sized(5, raw("a"), data=["a"]), "inputs[0]: its content is in data and behind the JSON"),
    "a length of nothing": ((b"{}", "0"), "Inference-Header-Content-Length: "),
    "a length too long": ((b"{}", "3"), "Inference-Header-Content-Length: "),
    "a length that is none": ((b"{}", "²"), "Inference-Header-Content-Length: "),
    "a length of many digits": ((b"{}", "1" * 5000), "Inference-Header-Content-Length: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_understood_is_refused_by_name(name: str) -> None:
    given, message = REFUSED[name]
    found = refusal(read, *(given if isinstance(given, tuple) else (given,)))
    assert found.startswith(message) and len(found) < 2000


REFUSED_SHORT: dict[str, tuple[Any, str]] = {
    "no object": (b"[]", "body: cannot be read"),
    "no text": ({}, "text_input: is missing"),
    "a number": ({"text_input": 3}, "text_input[0]: is not a text"),
    "lists in a list": ({"text_input": [["a"]]}, "text_input[0]: is not a text"),
    "none": ({"text_input": []}, "text_input: has no text"),
    "too many": ({"text_input": ["a"] * (MAX_TEXTS + 1)}, "text_input: its shape [1025] has 1025 elements"),
    "an id that is none": ({"text_input": "a", "id": 3}, "id: is not a text"),
    "parameters that are none": ({"text_input": "a", "parameters": [1]}, "parameters: is no JSON object"),
    "twice": ({"text_input": "a", "num_beams": 2, "parameters": {"num_beams": 2}}, "parameters: 'num_beams' is given twice"),
    "an unknown name": ({"text_input": "a", "best_of": 2}, "parameters: 'best_of' is not known"),
    "an unknown name within": (
        {"text_input": "a", "sampling_parameters": {"best_of": 2}},
        "sampling_parameters: 'best_of' is not known",
    ),
    "many": ({"text_input": "a", **{f"p{i}": 1 for i in range(10**4)}}, "parameters: 10000; there are"),
}


@pytest.mark.parametrize("name", REFUSED_SHORT)
def test_a_shorter_form_that_cannot_be_understood_is_refused_by_name(name: str) -> None:
    body, message = REFUSED_SHORT[name]
    assert refusal(generated, body).startswith(message)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*INPUTS, "n", "?"]), inner, max_size=3),
    max_leaves=6,
)
sizes = st.fixed_dictionaries({"binary_data_size": st.integers(-1, 12)})
tensors = st.fixed_dictionaries(
    {
        "name": st.sampled_from(INPUTS) | st.text(max_size=4),
        "shape": st.lists(st.integers(-1, 3), max_size=3) | json_like,
        "datatype": st.sampled_from(["BYTES", "INT32", "FP32", "BOOL", "FP16", "?"]),
    },
    optional={"data": json_like | st.lists(json_like, max_size=3), "parameters": sizes | json_like},
)
bodies = st.fixed_dictionaries(
    {"inputs": st.lists(tensors, max_size=4) | json_like},
    optional={
        "id": json_like,
        "parameters": st.dictionaries(st.sampled_from([*INPUTS, "timeout", "binary_data_output"]), json_like, max_size=4)
        | json_like,
        "outputs": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from([*OUTPUTS, "?"])}, optional={"parameters": json_like}), max_size=3
        ),
    },
)
short = st.dictionaries(st.sampled_from([*INPUTS, "id", "parameters", "timeout", "?"]), json_like, max_size=5)


def check(read: Any, *arguments: Any) -> None:
    try:
        assert len(read(*arguments)) >= 1
    except ServiceError as error:
        assert error.code == "INVALID_ARGUMENT" and ": " in error.message


@quick
@given(bodies, st.binary(max_size=24))
def test_whatever_comes_is_understood_or_refused(body: Any, rest: bytes) -> None:
    head = json.dumps(body).encode()
    check(read, head + rest, str(len(head)))
    check(read, asking("a") | {name: value for name, value in body.items() if name != "inputs"})


@quick
@given(short, st.none() | st.text(max_size=3))
def test_whatever_comes_in_the_shorter_form_is_understood_or_refused(body: Any, text: str | None) -> None:
    check(generated, body | ({"text_input": text} if text is not None else {}))
    check(generated, json.dumps(body).encode()[:-1])
