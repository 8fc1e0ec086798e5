"""Calls of both clients: arguments on the wire, results, metadata, and values that are refused before they are sent."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from dragoman.client import errors
from dragoman.client.model_info import Defaults
from dragoman.client.repository import RepositoryClient
from dragoman.client.request import Request
from dragoman.client.results import Alignment, Piece
from dragoman.client.retry import RetryPolicy
from dragoman.client.search import AS_THE_MODEL_DOES, Search, SearchOptions, Term, with_options
from dragoman.v1 import generation_pb2, repository_pb2
from tests.client.fake_server import EOS, AdminService, FakeServer, failing, filled, plain

GIVEN = {"text": "x", "request_id": "r-1"}
# Fields of a request and of its search, each with a value of its own.
VALUES = {field.name: value for field, value in filled(generation_pb2.GenerateRequest).ListFields() if field.name not in GIVEN}
SEARCH = {field.name: VALUES[field.name] for field in dataclasses.fields(Search)}
OPTIONS = {name: value for name, value in VALUES.items() if name not in SEARCH}
# A value that is denied is not left to the model.
ZEROS = {
    "num_beams": 0,
    "early_stopping": False,
    "do_sample": False,
    "top_k": 0,
    "seed": 0,
    "min_new_tokens": 0,
    "temperature": 0.0,
}
METHODS = {
    "generate": lambda text, **options: ((text,), options),
    "stream": lambda text, **options: ((text,), options),
    "generate_many": lambda text, **options: (([text],), options),
    "generate_batch": lambda text, search=AS_THE_MODEL_DOES, **options: (([Request(text, search=search, **options)],), {}),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "search"), [({}, {}), (OPTIONS, SEARCH), ({"max_new_tokens": 0}, ZEROS)], ids=["none", "all", "zeros"]
)
def test_a_request_carries_the_given_options_and_no_others(call, service, method: str, options: dict, search: dict) -> None:
    for _ in range(2):
        sent = search.get("terms", ())
        terms = {"terms": [Term(each.source, each.targets, each.case_sensitive) for each in sent]}
        arguments, keywords = METHODS[method]("x", **options, **({"search": Search(**search | terms)} if search else {}))
        call(method, *arguments, **keywords)
    first, second = service.requests
    for request in (first, second):
        assert request == generation_pb2.GenerateRequest(text="x", request_id=request.request_id, **options, **search)
    assert first.request_id and second.request_id and first.request_id != second.request_id


def test_options_of_the_search_are_keywords_too(call, service) -> None:
    for method in ("generate", "stream", "generate_many"):
        arguments, _ = METHODS[method]("x")
        call(method, *arguments, search=Search(num_beams=4, top_k=3), num_beams=2, seed=7)
        request = service.requests.pop()
        assert (request.num_beams, request.top_k, request.seed) == (2, 3, 7)
        with pytest.raises(TypeError, match=r"^unexpected keyword argument 'num_beam'; is 'num_beams' meant\?$"):
            call(method, *arguments, num_beam=4)
    assert service.requests == []
    assert get_type_hints(SearchOptions) == get_type_hints(Search)
    assert SearchOptions.__required_keys__ == frozenset()
    beams = Search(num_beams=4, length_penalty=0.5)
    assert with_options(beams, num_beams=None, top_k=7) == Search(length_penalty=0.5, top_k=7)
    assert with_options(AS_THE_MODEL_DOES) is AS_THE_MODEL_DOES
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'scope_'$"):
        with_options(beams, scope_=1)
    for wrong in (None, {"num_beams": 4}, Search):
        with pytest.raises(TypeError, match=r"^search: a Search is wanted"):
            with_options(wrong)


def test_a_result_has_every_field_of_the_answer(call, service) -> None:
    full = filled(generation_pb2.GenerateResponse)
    full.answers[0].log_probs[0].top.add(token=7, piece=b"\xc3", log_prob=-0.5)
    for message in (full, generation_pb2.GenerateResponse(finish_reason=generation_pb2.FINISH_REASON_LENGTH)):
        service.script.append(lambda _, message=message: message)
        result = call("generate", "ab")
        usage = generation_pb2.Usage(), generation_pb2.Timings()
        parts = {} if message.text else dict(zip(("usage", "timings"), map(plain, usage), strict=True))
        assert dataclasses.asdict(result) == plain(message) | parts
    pieces = call("stream", "abcd", request_id="r-1", num_return_sequences=2, return_log_probs=True)
    assert pieces[0] == Piece("AB", (97, 98))
    whole = call("generate", "abcd", request_id="r-1", num_return_sequences=2, return_log_probs=True)
    assert (pieces[1:], len(whole.answers)) == ([Piece("CD", (99, 100), whole)], 2)


def test_a_text_arrives_unchanged_and_may_be_large(call, service) -> None:
    for text in ("犬が雪の中を走る", "🐕‍🦺❄️", "a\x00b\n\tc", "e\u0301", " "):
        assert call("generate", text).text == "".join(piece.text for piece in call("stream", text)) == text.upper()
    service.script.append(lambda _: generation_pb2.GenerateResponse(text="x" * (5 << 20), finish_reason=EOS))
    assert len(call("generate", "x").text) == 5 << 20, "larger than gRPC's own limit"
    service.script.append(lambda _: generation_pb2.GenerateResponse(request_id="r-4", finish_reason=77))
    with pytest.raises(errors.InternalError, match="finish_reason 77") as caught:
        call("generate", "x")
    assert caught.value.request_id == "r-4"


def test_a_score_request_carries_the_given_options_and_no_others(call, service) -> None:
    zeros = {"length_penalty": 0.0, "alignment_layer": 0}
    given = filled(generation_pb2.ScoreRequest)
    for values in (plain(given), {"text": "a", "target": "b", **zeros}, {"text": "a", "target": "b"}):
        call("score", **values)
        sent = service.requests.pop()
        assert sent == generation_pb2.ScoreRequest(**{"request_id": sent.request_id, **values})
        assert sent.request_id


def test_a_score_has_every_field_of_the_answer(call, service) -> None:
    alignment = generation_pb2.Alignment(num_source_tokens=3, num_target_tokens=2, weights=range(6), source_pieces=[b" \xe7", b""])
    message = filled(generation_pb2.ScoreResponse, alignment=alignment)
    for token in message.tokens:
        token.ClearField("top")
    service.script.extend([lambda _: message] * 2)
    wanted = plain(message) | {"source_tokens": message.usage.source_tokens, "alignment": None}
    del wanted["usage"]
    score = call("score", "a", "b", return_alignment=True, return_word_alignment=True)
    assert score.alignment == Alignment((b" \xe7", b""), ((0.0, 1.0, 2.0), (3.0, 4.0, 5.0)))
    assert dataclasses.asdict(dataclasses.replace(score, alignment=None)) == wanted
    assert dataclasses.replace(score, alignment=None, word_alignment=None) == call("score", "a", "b")
    assert call("score", "a", "b").word_alignment is None
    message.alignment.num_source_tokens = 4
    service.script.append(lambda _: message)
    with pytest.raises(errors.InternalError, match="6 weights for 2 target and 4 source tokens") as caught:
        call("score", "a", "b", return_alignment=True)
    assert caught.value.request_id == "request_id"


def test_models_are_described_with_every_field(call, service) -> None:
    service.models = [filled(generation_pb2.Model, name="nllb"), generation_pb2.Model(name="en-fr")]
    described, bare = call("models")
    assert dataclasses.asdict(described) == plain(service.models[0])
    assert dataclasses.asdict(bare) == plain(service.models[1]) | {"defaults": dataclasses.asdict(Defaults())}
    service.models[1].defaults.CopyFrom(generation_pb2.Defaults(early_stopping=False, do_sample=False, top_k=0, min_new_tokens=0))
    assert call("models")[1].defaults == Defaults(early_stopping=False, do_sample=False, top_k=0, min_new_tokens=0)
    service.requests.clear()
    assert call("model", "nllb", "canary") == call("model", "nllb") == described
    assert [request.model_version for request in service.requests] == ["canary", ""]
    with pytest.raises(errors.ModelNotFound, match="'en-xx' is not loaded"):
        call("model", "en-xx")


def test_readiness_is_asked_once(call, server, clock) -> None:
    server.set_health("", False)
    server.set_health("en-de", True)
    assert (call("is_ready"), call("is_ready", "en-de")) == (False, True)
    with pytest.raises(errors.ModelNotFound):
        call("is_ready", "en-xx")
    server.set_health("", True)
    assert call("is_ready") is True
    server.stop()
    assert call("is_ready") is False
    assert clock.waits == []


TEXT = "text: a str is wanted, not "
MANY = "; many texts go to generate_many, or .*"
PAIR = "; call score once for each pair"
OUT_OF_RANGE = {"max_new_tokens": 2**32, "seed": 2**64, "suppressed_tokens": [3, -1]}
WRONG_TYPES = {"num_beams": "4", "suppressed_tokens": 5, "target_language": 5}


def test_an_argument_of_a_wrong_kind_is_refused_with_advice(call, service) -> None:
    for method, arguments, message in (
        ("generate", (["a", "b"],), f"{TEXT}list{MANY}"),
        ("generate", ((text for text in "ab"),), f"{TEXT}generator{MANY}"),
        ("stream", (b"a",), f"{TEXT}bytes; decode it first"),
        ("generate", (bytearray(b"a"),), f"{TEXT}bytearray; decode it first"),
        ("stream", (None,), f"{TEXT}None"),
        ("generate", (5,), f"{TEXT}int"),
        ("score", ("a", ["b"]), f"target: a str is wanted, not list{PAIR}"),
        ("score", (None, "a"), f"{TEXT}None"),
        ("generate_many", ("abc",), "texts: many are wanted, not one str; one text goes to generate"),
        ("generate_many", ([b"b"],), f"{TEXT}bytes; decode it first"),
        ("generate_many", (None,), ".* not iterable"),
        ("generate_batch", (None,), ".* not iterable"),
        ("generate_batch", (["a", "b"],), r"requests: a Request is wanted for each, as in Request\(text\), not str"),
    ):
        with pytest.raises(TypeError, match=f"^{message}$"):
            call(method, *arguments)
    for method in ("generate", "stream", "generate_batch"):
        with pytest.raises(ValueError, match=r"^timeout_seconds: "):
            call(method, *METHODS[method]("x")[0], timeout_seconds=0.0)
    assert service.requests == []


def test_a_value_that_cannot_be_sent_is_named(call, service) -> None:
    for options, message in (
        ({"text": "a\ud800"}, "text: not Unicode text: .* at character 1"),
        ({"model": "\udcff"}, "model: not Unicode"),
        ({"forced_prefix": "\udcff"}, "forced_prefix: not Unicode"),
        *(({name: value}, f"{name}: .* is out of range") for name, value in OUT_OF_RANGE.items()),
        *(({name: value}, rf"{name}: .* is of the wrong type \({type(value).__name__}\)") for name, value in WRONG_TYPES.items()),
    ):
        for method in ("generate", "stream"):
            with pytest.raises(errors.InvalidArgument, match=f"^{message}") as caught:
                call(method, **{"text": "a", "request_id": "r-1"} | options)
            assert caught.value.request_id == "r-1"
    for options in ({"text": "\udcff"}, {"target": "\udcff"}, {"alignment_layer": -1}):
        with pytest.raises(errors.InvalidArgument, match=f"^{next(iter(options))}: "):
            call("score", **{"text": "a", "target": "b"} | options)
    assert service.requests == []


def call_all(client: Any) -> None:
    for method, arguments in METHODS.items():
        answers = getattr(client, method)(*arguments("ab")[0])
        assert answers if method == "generate" else list(answers)
    client.score("a", "b")
    client.models()
    client.model("en-de")


@pytest.mark.parametrize("has_bulk", [True, False])
def test_every_call_sends_the_token_and_the_active_span(connect: Callable[..., Any], service, has_bulk: bool) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra `tracing`")
    context = trace.SpanContext(0xA, 0xB, False, trace.TraceFlags(trace.TraceFlags.SAMPLED), trace.TraceState([("vendor", "7")]))
    service.has_bulk = has_bulk
    with trace.use_span(trace.NonRecordingSpan(context)):
        call_all(connect(token="s3cret"))
    traced, service.metadata = service.metadata, []
    call_all(connect())
    methods = {"Generate", "GenerateStream", "Score", "ListModels", "GetModel", "GenerateBulk"}
    assert {method for method, _ in traced} == methods | (set() if has_bulk else {"GenerateBatch"})
    sent = {tuple(metadata.get(key) for key in ("authorization", "traceparent", "tracestate")) for _, metadata in traced}
    assert sent == {("Bearer s3cret", f"00-{0xA:032x}-{0xB:016x}-01", "vendor=7")}
    assert not any({"authorization", "traceparent"} & metadata.keys() for _, metadata in service.metadata)


def test_without_opentelemetry_no_span_is_sent(call, service, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra `tracing`")
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(0xA, 0xB, False))):
        call("generate", "x", options={"retry": RetryPolicy(max_attempts=1)})
    assert "traceparent" not in service.metadata[0][1]


def test_the_client_of_the_admin_service_converts_each_answer_and_tries_nothing_again() -> None:
    admin = AdminService()
    requested = filled(repository_pb2.Requested, labels={"a": "3", "x": ""})
    admin.model, admin.problem = filled(repository_pb2.RepositoryModel, requested=requested), "no such folder"
    admin.model.versions[1].state = 99
    with FakeServer(admin=admin) as server, RepositoryClient(server.target, token="s", timeout_seconds=60) as client:
        [status], problem = client.models("en-de")
        assert (dataclasses.asdict(status), problem) == (plain(admin.model), "no such folder")
        assert client.refresh() == ([status], problem)
        assert client.load("en-de", "3") == client.unload("en-de", "3") == client.reload("en-de") == status
        assert client.rollback("en-de", "3") == client.set_label("en-de", "canary", "3") == status
        assert client.put_glossary("en-de", "house", b"a\xff") == client.delete_glossary("en-de", "house") == status
        assert set(admin.tokens) == {"Bearer s"}
        with pytest.raises(errors.InvalidArgument, match=r"^version: 3 is of the wrong type"):
            client.load("en-de", 3)
        for code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            admin.requests.clear()
            admin.failures["en-de"] = failing(code)
            with pytest.raises(errors.CallError, match="no") as caught:
                client.rollback("en-de")
            assert caught.value.code == code and len(admin.requests) == 1
    with pytest.raises(errors.Cancelled, match=r"^the client is closed$"):
        client.models()
