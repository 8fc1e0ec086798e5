"""Bodies over HTTP: the Open Inference Protocol's REST, canonical JSON of the native API, and sentences for LibreTranslate."""

import asyncio
import json
import struct
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.model.generation import Language, Languages
from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.http.forms import read_multipart, read_urlencoded
from dragoman.server.protocols.http.native import parse
from dragoman.server.protocols.http.openinference import decode_generate, decode_infer
from dragoman.server.protocols.json_text import decode_json
from dragoman.server.protocols.libretranslate.languages import LibreLanguages, code_of, name_of
from dragoman.server.protocols.libretranslate.reading import to_asked
from dragoman.server.protocols.openinference.requests import MAX_TEXTS, Inference
from dragoman.server.protocols.openinference.service import infer_parser
from dragoman.v1.generation_pb2 import GenerateRequest
from tests.system.harness import openinference as messages
from tests.system.harness.openinference import binary_body as with_tensors
from tests.system.harness.openinference import infer_body as asking
from tests.system.harness.openinference import json_tensor as tensor
from tests.system.harness.openinference import listed_body as listed
from tests.system.harness.openinference import raw_bytes as raw

MODEL = ("en-de", "")
by_grpc = infer_parser(ModelInferRequest.FromString, lambda: 10**6)


def read(body: Any, said: str | None = None) -> Inference:
    return decode_infer(body if isinstance(body, bytes) else json.dumps(body).encode(), MODEL, None, said)


def generated(body: Any) -> Inference:
    return decode_generate(body if isinstance(body, bytes) else json.dumps(body).encode(), MODEL, None)


def by_message(value: Any) -> str:
    return value[:60] if isinstance(value, str) else ""


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
def test_tensors_become_the_requests_of_grpc(tensors: list[tuple[str, Any, str]]) -> None:
    request = messages.infer_request("äöü 日本 🐕", "b", shape=[2, 1], id="mine")
    for name, values, datatype in tensors:
        messages.with_tensor(request, name, values, datatype)
    expected = by_grpc(request.SerializeToString())
    body, headers = with_tensors(request)
    for found in (read(listed(request)), read(body, headers["Inference-Header-Content-Length"])):
        assert found.requests == expected.requests
        assert (found.request_id, found.has_rows, len(found)) == ("mine", True, 2)


PARAMETERS: dict[str, Any] = {"num_beams": 3, "length_penalty": 0.1, "temperature": "0.5", "suppressed_tokens": [5, 6]}
PARAMETERS |= {"forced_prefix": "Ein", "priority": 4, "early_stopping": True}


def test_parameters_mean_what_they_do_over_grpc_and_in_the_shorter_form() -> None:
    plain = {name: value for name, value in PARAMETERS.items() if name != "suppressed_tokens"}
    request = messages.with_parameters(messages.infer_request("a"), **plain, suppressed_tokens="[5, 6]", timeout=5_000_000)
    expected = by_grpc(request.SerializeToString())
    timeout = {"timeout": 5_000_000}
    told, as_json = PARAMETERS | timeout, PARAMETERS | {"temperature": 0.5}
    bodies: list[dict[str, Any]] = [
        {"text_input": "a", "parameters": told},
        {"text_input": "a", **told},
        {"text_input": "a", **{"beam_width" if name == "num_beams" else name: value for name, value in told.items()}},
        {"text_input": ["a"], "parameters": timeout, "sampling_parameters": json.dumps(as_json)},
        {"text_input": "a", **timeout, "parameters": {"sampling_parameters": as_json}},
    ]
    for found in (read(asking("a", parameters=told)), *map(generated, bodies)):
        assert found.requests == expected.requests
        assert found.timeout_seconds == expected.timeout_seconds == 5


def test_fractions_have_the_bits_of_single_precision() -> None:
    for value in (0.1, 1e-45, 3.4028234663852886e38, 1 / 3):
        [wanted] = read(asking("a", inputs=[tensor("top_p", "FP32", [1], [value])])).requests
        assert wanted.top_p == struct.unpack("<f", struct.pack("<f", value))[0]


def test_tensors_may_be_some_in_the_json_and_some_behind_it() -> None:
    body = asking("a", "b", inputs=[tensor("num_beams", "UINT32", [1], [2])])
    body["inputs"][0] = {"name": "text_input", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 10}}
    head = json.dumps(body).encode()
    [first, second] = read(head + raw("a", "b"), str(len(head))).requests
    assert (first.text, second.text, first.num_beams) == ("a", "b", 2)


def test_outputs_are_binary_where_the_request_wants_them_so() -> None:
    wanted = [{"name": "score", "parameters": {"binary_data": False}}, {"name": "text_output"}]
    found = read(asking("a", outputs=wanted, parameters={"binary_data_output": True}))
    assert found.binary_outputs == {"text_output"}
    assert found.outputs == ("score", "text_output")
    assert not read(asking("a")).binary_outputs


def sized(size: Any, rest: bytes, **more: Any) -> tuple[bytes, str]:
    given = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}} | more
    head = json.dumps({"inputs": [given]}).encode()
    return head + rest, str(len(head))


REFUSED: list[tuple[Any, str]] = [
    (b"{", "body: cannot be read"),
    (b"[]", "body: cannot be read: Expected `object`, got `array`"),
    (json.dumps(asking("a")).encode()[:-1] + b', "parameters": {"seed": 1, "seed": 2}}', "seed: is given twice"),
    (b'{"inputs": "\xff"}', "body: cannot be read"),
    (b'{"inputs": [{"name": "a", "shape": [1], "datatype": "", "data": ' + b"[" * 10**5, "body: cannot be read"),
    ({}, "body: cannot be read: Object missing required field `inputs`"),
    (asking("a", beams=1), "body: cannot be read: Object contains unknown field `beams`"),
    (asking("a", model_name="x"), "model_name: 'x' is not that of the path"),
    (asking("a", id="ä"), "id: "),
    ({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]}, "text_input: has no content"),
    ({"inputs": [tensor("text_input", "BYTES", [2], ["a"])]}, "text_input: its content has 1 elements"),
    ({"inputs": [tensor("text_input", "BYTES", [2, 1], [["a", "b"]])]}, "text_input: its content has not the shape [2, 1]"),
    ({"inputs": [tensor("text_input", "BYTES", [2, 1], [["a"], "b"])]}, "text_input: its content has not the shape"),
    ({"inputs": [tensor("text_input", "BYTES", [1, 1], [[["a"]]])]}, "text_input[0]: is not a text"),
    (b'{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["\\ud800"]}]}', ""),
    (b'{"inputs": [{"name": "a", "datatype": "", "shape": [' + b"9" * 5000 + b"]}]}", "body: cannot be read"),
    ({"inputs": [tensor("a", "", [1], [])] * 10**4}, "inputs: 10000; there are"),
    (asking("a", parameters={"num_beams": None}), "num_beams: is not an integer"),
    (asking("a", parameters={"suppressed_tokens": 5}), "suppressed_tokens: is not a list of integers"),
    (asking("a", inputs=[tensor("top_p", "FP32", [1], [{}])]), "top_p: an element is no FP32"),
    (asking("a", parameters={"binary_data_output": 1}), "binary_data_output: is not true or false"),
    (sized(5, b""), "inputs[0]: binary_data_size is a number of bytes; 0 are left"),
    (sized(True, b"abcde"), "inputs[0]: binary_data_size"),
    (sized(5, raw("a") + b"x"), "body: has 1 bytes behind the JSON that are of no input"),
    (sized(5, b"\xff\xff\xff\xffa"), "text_input: element 0 ends behind its raw content"),
    (sized(5, raw("a"), data=["a"]), "inputs[0]: its content is in data and behind the JSON"),
    ((b"{}", "0"), "Inference-Header-Content-Length: "),
    ((b"{}", "²"), "Inference-Header-Content-Length: "),
    ((b"{}", "1" * 5000), "Inference-Header-Content-Length: "),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=by_message)
def test_invalid_bodies_are_refused_by_field(given: Any, message: str) -> None:
    found = refusal(read, *(given if isinstance(given, tuple) else (given,)))
    assert found.startswith(message) and len(found) < 2000


REFUSED_SHORT: list[tuple[Any, str]] = [
    (b"[]", "body: cannot be read"),
    (b'{"text_input": "a", "seed": 1, "seed": 1}', "seed: is given twice"),
    ({}, "text_input: is missing"),
    ({"text_input": 3}, "text_input[0]: is not a text"),
    ({"text_input": ["a"] * (MAX_TEXTS + 1)}, "text_input: its shape [1025] has 1025 elements"),
    ({"text_input": "a", "id": 3}, "id: is not a text"),
    ({"text_input": "a", "parameters": [1]}, "parameters: is no JSON object"),
    ({"text_input": "a", "num_beams": 2, "parameters": {"num_beams": 2}}, "parameters: 'num_beams' is given twice"),
    ({"text_input": "a", "num_beams": 2, "beam_width": 2}, "num_beams: is given twice"),
    ({"text_input": "a", "max_tokens": 2, "parameters": {"max_new_tokens": 2}}, "max_new_tokens: is given twice"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED_SHORT, ids=by_message)
def test_invalid_short_bodies_are_refused_by_field(body: Any, message: str) -> None:
    assert refusal(generated, body).startswith(message)


# Canonical JSON


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *[(body, "body") for body in (b"", b"{", b"[]", b"null", b'"text"', b'{"text": "\xff"}', b'{"text": 1}', b'{"text": NaN}')],
        *[(body, "body") for body in (b'{"nothing": 1}', b'{"text": "a\\ud800"}')],
        *[
            (body, "body")
            for body in (
                b'{"temperature": 1' + b"0" * 400 + b"}",
                b'{"maxNewTokens": -1}',
                b'{"maxNewTokens": 1e400}',
                b'{"seed": "-1"}',
                b'{"doSample": "yes"}',
            )
        ],
        *[(body, "body") for body in (b'{"seed": ' + b"9" * 10_000 + b"}", b"[" * 100_000, b'{"text": ' + b'{"a":' * 60_000)],
        (b'{"text": "a", "text": 7}', "text"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "\\ud800"),
        (b'{"suppressedTokens": [' + b"1," * 2000 + b"1]}", "suppressedTokens"),
    ],
    ids=lambda value: value[:32].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_bodies_that_are_no_message_are_refused(body: bytes, field: str) -> None:
    message = refusal(parse, body, GenerateRequest())
    assert message.startswith(f"{field}: ") and len(message) < 400 and "\n" not in message


# LibreTranslate's forms and texts

PARTS = "multipart/form-data; boundary=a"


def read_json(body: bytes) -> Any:
    return to_asked(decode_json(body, dict[str, Any]))


def parts_of(body: bytes, content_type: str) -> list[tuple[str, str]]:
    return asyncio.run(read_multipart(body, content_type))


HEAD = st.text(st.sampled_from("form-data;name*0='q\"\\= ,\0ä\r\n"), max_size=40)
DISPOSITION = st.one_of(HEAD, HEAD.map("form-data; name=q{}".format), HEAD.map("Form-Data; {}".format))


@given(DISPOSITION, st.text(max_size=20))
def test_no_parser_warns_of_what_it_reads(head: str, text: str) -> None:
    """Python keeps every text that it has warned of; here a warning is an error of its own."""
    part = f"--a\r\nContent-Disposition: {head}\r\n\r\n{text}\r\n--a--"
    body = json.dumps({head: text, text: [head]})
    readers = [partial(parts_of, content_type=each) for each in (PARTS, head, f"a/b;{text}")]
    for reader in (*readers, read_urlencoded, read_json, read, generated, lambda body: parse(body, GenerateRequest())):
        for each in (part, body, body[:-1], head, text):
            with suppress(InvalidRequest):
                reader(each.encode())


@pytest.mark.parametrize(
    ("head", "is_read"),
    [
        *[(f"form-data{more}", True) for more in ('; name="q"', ";name=q", ' ; Name = "q" ; x="a;\\"b"', "; name=q; x=1")],
        *[(f"form-data{more}", False) for more in ("", '; name="q', "; name=q=", '; name="q"; name="q"', "; name=q;;", "; q")],
        ('form-data; name="q"; filename="f"', False),
    ],
)
def test_a_part_of_a_form_has_a_name(head: str, is_read: bool) -> None:
    body = f"--a\r\nContent-Disposition: {head}\r\n\r\nx\r\n--a--".encode()
    if is_read:
        assert parts_of(body, PARTS) == [("q", "x")]
    else:
        assert refusal(parts_of, body, PARTS).startswith("body: ")


def test_a_form_begins_with_its_boundary() -> None:
    """The reader of aiohttp would look for it in every line, for seconds in a large body."""
    assert refusal(parts_of, b"\r\n" * 2**21 + b"--a--", PARTS) == "body: does not begin with its boundary"
    assert refusal(parts_of, b"--a--", "multipart/form-data; boundary=\udcff") == "body: does not begin with its boundary"


@pytest.mark.parametrize(
    ("code", "names", "expected"),
    [
        ("en", ["eng", "english"], ("en", "English")),
        ("deu_Latn", ["de_latn", "ger_latn", "de", "deu", "german"], ("de", "German")),
        ("zho_Hant", ["zh_hant", "chi_hant", "chinese_traditional", "zh_tw"], ("zh-Hant", "Chinese Traditional")),
        ("pt_BR", ["por_br", "portuguese_brazil"], ("pt-BR", "Portuguese Brazil")),
        ("ast_Latn", ["ast", "asturian"], ("ast", "Asturian")),
        ("xx-strange", [], ("xx-STRANGE", "xx-STRANGE")),
    ],
)
def test_a_language_has_the_code_and_name_of_libretranslate(code: str, names: list[str], expected: tuple[str, str]) -> None:
    language = Language(code=code, names=names)
    assert (code_of(language), name_of(language)) == expected


def test_languages_of_several_models_are_listed_together(make_model: Any) -> None:
    names = {"en": ["english"], "de": ["german"], "fr": ["french"], "zho_Hant": ["zh_hant", "zh_tw", "chinese_traditional"]}

    def model(name: str, *sides: str) -> Any:
        source, target = ([Language(code=code, names=names[code], source_prefix=[340]) for code in side.split()] for side in sides)
        return make_model(name, languages=Languages(source=source, target=target))

    models = [
        make_model("captions"),
        model("en-de", "en", "de"),
        model("en-fr", "en", "fr"),
        model("many", "de fr", "fr de zho_Hant"),
    ]
    languages = LibreLanguages()
    assert languages.all(models) == [
        ("de", "German", ["fr", "zh-Hant"]),
        ("en", "English", ["de", "fr"]),
        ("fr", "French", ["de", "zh-Hant"]),
        ("zh-Hant", "Chinese Traditional", []),
    ]
    assert [languages.sources_of(models, target) for target in ("fr", "zh_tw", "en")] == [["de", "en"], ["de", "fr"], []]
    assert [languages.find(models, asked) for asked in ("english", "ZH_TW", "de-AT", "tlh")] == ["en", "zh-Hant", "de", ""]
