"""What the blocking and the asyncio client both do."""

import dataclasses

import pytest

from dragoman.client import errors
from dragoman.client.model_info import Defaults, Language, ModelInfo, ModelVersion
from dragoman.client.request import Request
from dragoman.client.results import Answer, Piece, Result, Timings, TokenLogProb, Usage
from dragoman.client.retry import RetryPolicy
from dragoman.client.search import Search
from dragoman.v1 import generation_pb2

PLAIN = {"retry": RetryPolicy(jitter=0.0)}


def test_generate_returns_every_field_of_the_answer(call) -> None:
    result = call("generate", "ab", model="en-fr", request_id="r-7", truncate=True)
    assert result == Result(
        text="AB",
        tokens=(97, 98),
        finish_reason="eos",
        is_truncated=True,
        model="en-fr",
        model_version="3",
        request_id="r-7",
        usage=Usage(source_tokens=3, generated_tokens=3),
        timings=Timings(0.25, 0.5, 0.75, 1.0, 1.5),
        answers=(Answer("AB", (97, 98), "eos", -0.5),),
        seed=None,
    )


def test_all_answers_are_told_with_what_was_asked_of_them(call) -> None:
    search = Search(do_sample=True, num_return_sequences=3, seed=2**64 - 1, return_log_probs=True, top_log_probs=1)
    result = call("generate", "ab", search=search)
    told = TokenLogProb(5, b"\xe2\x96", -0.25, (TokenLogProb(7, b"\xc3", -0.5),))
    assert result.answers == (
        Answer("AB", (97, 98), "eos", -0.5, (told,)),
        Answer("AB!", (97, 98), "eos", -1.5),
        Answer("AB!!", (97, 98), "eos", -2.5),
    )
    assert result.seed == 2**64 - 1


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
def test_every_option_of_the_search_is_sent(call, service, method: str) -> None:
    values = {
        "num_beams": 4,
        "num_return_sequences": 3,
        "length_penalty": 0.5,
        "early_stopping": True,
        "do_sample": True,
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.75,
        "seed": 0,
        "min_new_tokens": 2,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3,
        "suppressed_tokens": [9, 8],
        "forced_prefix": "Ein Hünd",
        "return_alternatives": True,
        "return_log_probs": True,
        "top_log_probs": 6,
    }
    assert values.keys() == {field.name for field in dataclasses.fields(Search)}
    call(method, ["x"] if method == "generate_many" else "x", search=Search(**values), priority=-3)
    [request] = service.requests
    sent = {name: getattr(request, name) for name in values}
    assert {**sent, "suppressed_tokens": list(sent["suppressed_tokens"])} == values
    assert request.HasField("seed") and request.priority == -3


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
def test_options_of_the_search_are_keywords_too(call, service, method: str) -> None:
    texts = ["x"] if method == "generate_many" else "x"
    call(method, texts, num_beams=4, early_stopping=True, suppressed_tokens=[9, 8], forced_prefix="Ein")
    call(method, texts, search=Search(num_beams=4, top_k=3), num_beams=2, seed=7)
    first, second = service.requests
    assert (first.num_beams, first.early_stopping, [*first.suppressed_tokens], first.forced_prefix) == (4, True, [9, 8], "Ein")
    assert (second.num_beams, second.top_k, second.seed) == (2, 3, 7)


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
def test_keyword_that_there_is_not_is_a_type_error(call, service, method: str) -> None:
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'num_beam'; is 'num_beams' meant\?$"):
        call(method, ["x"] if method == "generate_many" else "x", num_beam=4)
    assert service.requests == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (["a", "b"], "not list; many texts go to generate_many"),
        (("a",), "not tuple; many texts go to generate_many"),
        ((text for text in "ab"), "not generator; many texts go to generate_many"),
        (b"a", "not bytes; decode it first"),
        (bytearray(b"a"), "not bytearray; decode it first"),
        (None, "not None$"),
        (5, "not int$"),
    ],
    ids=["list", "tuple", "generator", "bytes", "bytearray", "None", "int"],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_what_is_no_text_is_refused_with_what_to_call(call, service, method: str, text: object, told: str) -> None:
    with pytest.raises(TypeError, match=rf"^text: a str is wanted, {told}"):
        call(method, text)
    with pytest.raises(TypeError, match=rf"^text: a str is wanted, {told}"):
        Request(text)
    assert service.requests == []


@pytest.mark.parametrize(("text", "target", "name"), [(["a"], "b", "text"), ("a", ["b"], "target"), ("a", None, "target")])
def test_pair_that_is_none_is_refused_with_what_to_do(call, service, text: object, target: object, name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: a str is wanted, not (list; call score once for each pair|None)$"):
        call("score", text, target)
    assert service.requests == []


@pytest.mark.parametrize("texts", ["abc", b"abc"])
def test_one_text_is_not_taken_for_many(call, service, texts: object) -> None:
    with pytest.raises(TypeError, match=r"^texts: many are wanted, not one (str|bytes); one text goes to generate$"):
        call("generate_many", texts)
    assert service.requests == []


@pytest.mark.parametrize("method", ["generate_many", "generate_batch"])
def test_what_cannot_be_iterated_is_a_type_error(call, method: str) -> None:
    with pytest.raises(TypeError, match="not iterable"):
        call(method, None)


def test_item_that_is_no_text_ends_the_answers_after_those_before(call) -> None:
    with pytest.raises(TypeError, match=r"^text: a str is wanted, not bytes; decode it first$"):
        call("generate_many", ["a", b"b"])


def test_item_of_a_batch_that_is_no_request_is_refused_with_what_it_should_be(call) -> None:
    with pytest.raises(TypeError, match=r"^requests: a Request is wanted for each, as in Request\(text\), not str$"):
        call("generate_batch", ["a", "b"])


def test_value_of_a_wrong_type_is_named(call, service) -> None:
    for values in ({"num_beams": "4"}, {"temperature": "hot"}, {"suppressed_tokens": "abc"}, {"suppressed_tokens": 5}):
        [name] = values
        with pytest.raises(errors.InvalidArgument, match=f"^{name}: .* is of the wrong type"):
            call("generate", "x", **values)
    assert service.requests == []


@pytest.mark.parametrize("blank", ["", " ", "\t\n", "\u2003"])
def test_blank_text_among_many_has_a_blank_result_in_its_place(call, service, blank: str) -> None:
    results = call("generate_many", ["a", blank, "b", blank], model="en-fr", num_beams=2)
    assert [result.text for result in results] == ["A", "", "B", ""]
    assert results[1] == Result(
        text="",
        tokens=(),
        finish_reason="eos",
        is_truncated=False,
        model="en-fr",
        model_version="",
        request_id="",
        usage=Usage(0, 0),
        timings=Timings(0.0, 0.0, 0.0, 0.0, 0.0),
        answers=(Answer("", (), "eos", 0.0),),
    )
    assert sorted(request.text for request in service.requests) == ["a", "b"]


def test_blank_texts_alone_ask_nobody(call, server, service) -> None:
    server.stop()
    assert [result.text for result in call("generate_many", [""] * 100, concurrency=2)] == [""] * 100
    assert service.requests == []


def test_blank_text_alone_is_the_servers_to_refuse(call, service, failing) -> None:
    service.script.append(failing("INVALID_ARGUMENT", "text: is blank"))
    with pytest.raises(errors.InvalidArgument, match="text: is blank"):
        call("generate", " ")
    assert len(service.requests) == 1


def test_options_denied_are_not_options_left_to_the_model(call, service) -> None:
    denied = {"early_stopping": False, "do_sample": False, "top_k": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0}
    call("generate", "x", **denied)
    call("generate", "x", num_beams=2)
    told, left = service.requests
    assert {name: getattr(told, name) for name in denied if told.HasField(name)} == denied
    assert [name for name in denied if left.HasField(name)] == []


def test_languages_are_sent_by_every_method(call, service) -> None:
    languages = {"source_language": "en", "target_language": "de-DE"}
    call("generate", "x", **languages)
    call("stream", "x", **languages)
    call("generate_many", ["x"], **languages)
    call("score", "x", "y", **languages)
    call("generate_batch", [Request("x", **languages)])
    assert [(request.source_language, request.target_language) for request in service.requests] == [("en", "de-DE")] * 5


def test_a_version_is_named_by_every_method(call, service) -> None:
    call("generate", "x", model_version="canary")
    call("stream", "x", model_version="canary")
    call("generate_many", ["x"], model_version="canary")
    call("score", "x", "y", model_version="canary")
    call("generate_batch", [Request("x", model_version="canary")])
    assert [request.model_version for request in service.requests] == ["canary"] * 5
    service.requests.clear()
    call("model", "en-de", "canary")
    call("model", "en-de")
    assert [(request.model, request.model_version) for request in service.requests] == [("en-de", "canary"), ("en-de", "")]


def test_language_that_is_no_text_is_named(call, service) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"^target_language: 5 is of the wrong type \(int\)$"):
        call("generate", "x", target_language=5)
    assert service.requests == []


def test_result_tells_what_it_was_chosen_from(call, service) -> None:
    def behave(context) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse(finish_reason=generation_pb2.FINISH_REASON_EOS, shortlist_tokens=8192)

    service.script.append(behave)
    assert call("generate", "x").shortlist_tokens == 8192
    assert call("generate", "x").shortlist_tokens == 0


def test_options_not_given_are_not_sent(call, service) -> None:
    call("generate", "x", search=Search(return_log_probs=True))
    names = {field.name for field, _ in service.requests[0].ListFields()}
    assert names == {"text", "request_id", "return_log_probs"}


def test_request_carries_what_was_asked(call, service) -> None:
    call("generate", "x", model="en-fr", max_new_tokens=7, truncate=True, request_id="r-1")
    call("stream", "xy", model="en-fr", max_new_tokens=0, request_id="r-2")
    plain, streamed = service.requests
    assert (plain.text, plain.model, plain.max_new_tokens, plain.truncate, plain.request_id) == ("x", "en-fr", 7, True, "r-1")
    assert (streamed.text, streamed.model, streamed.truncate, streamed.request_id) == ("xy", "en-fr", False, "r-2")
    assert streamed.HasField("max_new_tokens") and streamed.max_new_tokens == 0


def test_unset_fields_are_left_to_the_server(call, service) -> None:
    call("generate", "x")
    assert not service.requests[0].HasField("max_new_tokens")
    assert service.requests[0].model == ""


def test_request_without_an_id_gets_one_of_its_own(call, service) -> None:
    call("generate", "x")
    call("generate", "x")
    first, second = (request.request_id for request in service.requests)
    assert first and second and first != second


@pytest.mark.parametrize("text", ["Ein Hund läuft durch den Schnee.", "犬が雪の中を走る", "🐕‍🦺❄️", "a\x00b\n\tc", "e\u0301"])
def test_text_arrives_as_it_is(call, service, text: str) -> None:
    assert call("generate", text).text == text.upper()
    assert "".join(piece.text for piece in call("stream", text)) == text.upper()
    assert [request.text for request in service.requests] == [text, text]


def test_stream_yields_pieces_in_order_and_the_result_last(call) -> None:
    pieces = call("stream", "abcd", request_id="r-1")
    assert pieces[0] == Piece("AB", (97, 98), None)
    assert (pieces[1].text, pieces[1].tokens) == ("CD", (99, 100))
    assert pieces[1].result == call("generate", "abcd", request_id="r-1")
    assert len(pieces) == 2


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", errors.InvalidArgument),
        ("NOT_FOUND", errors.ModelNotFound),
        ("RESOURCE_EXHAUSTED", errors.Overloaded),
        ("UNAVAILABLE", errors.Unavailable),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceeded),
        ("CANCELLED", errors.Cancelled),
        ("UNAUTHENTICATED", errors.Unauthenticated),
        ("PERMISSION_DENIED", errors.PermissionDenied),
        ("UNIMPLEMENTED", errors.Unimplemented),
        ("INTERNAL", errors.InternalError),
        ("UNKNOWN", errors.CallError),
        ("DATA_LOSS", errors.CallError),
        ("ABORTED", errors.CallError),
        ("FAILED_PRECONDITION", errors.CallError),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_each_status_has_its_error(call, service, failing, method: str, code: str, kind: type) -> None:
    service.script.append(failing(code, "text: ist länger als 256"))
    with pytest.raises(errors.CallError) as caught:
        call(method, "x", request_id="r-9", options={"retry": RetryPolicy(max_attempts=1)})
    error = caught.value
    assert type(error) is kind
    assert (str(error), error.message, error.code) == ("text: ist länger als 256", "text: ist länger als 256", code)
    assert (error.request_id, error.retry_after_seconds) == ("r-9", None)


def test_failure_without_a_message_says_so(call, service, failing) -> None:
    service.script.append(failing("INTERNAL", ""))
    with pytest.raises(errors.InternalError, match="gave no reason"):
        call("generate", "x")


def test_error_tells_when_to_try_again(call, service, failing) -> None:
    service.script.append(failing("RESOURCE_EXHAUSTED", "queue: full", retry_after=(1, 250_000_000)))
    with pytest.raises(errors.Overloaded) as caught:
        call("generate", "x", options={"retry": RetryPolicy(max_attempts=1)})
    assert caught.value.retry_after_seconds == 1.25


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
@pytest.mark.parametrize("method", ["generate", "stream", "models"])
def test_passing_failure_is_tried_again(call, service, failing, clock, method: str, code: str) -> None:
    service.script.extend([failing(code), failing(code)])
    assert call(method, *([] if method == "models" else ["x"]), options=PLAIN)
    assert clock.waits == [pytest.approx(0.1), pytest.approx(0.2)]
    assert len(service.requests) == 3


def test_attempts_share_one_request_id(call, service, failing) -> None:
    service.script.extend([failing("UNAVAILABLE"), failing("UNAVAILABLE")])
    result = call("generate", "x")
    assert {request.request_id for request in service.requests} == {result.request_id}


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_client_never_comes_back_before_the_server_asked(call, service, failing, clock, method: str) -> None:
    service.script.extend([failing("UNAVAILABLE", retry_after=(7, 500_000_000)), failing("UNAVAILABLE", retry_after=(0, 1))])
    assert call(method, "x", options=PLAIN)
    assert clock.waits == [7.5, pytest.approx(0.2)]


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_attempts_run_out(call, service, failing, method: str) -> None:
    service.script.extend([failing("UNAVAILABLE", f"draining {n}") for n in range(9)])
    with pytest.raises(errors.Unavailable, match="draining 4"):
        call(method, "x")
    assert len(service.requests) == 5


@pytest.mark.parametrize("code", ["INTERNAL", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED", "NOT_FOUND", "UNKNOWN"])
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_other_failures_are_final(call, service, failing, clock, method: str, code: str) -> None:
    service.script.append(failing(code, retry_after=(1, 0)))
    with pytest.raises(errors.CallError):
        call(method, "x")
    assert len(service.requests) == 1
    assert clock.waits == []


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_waits_shorten_the_time_of_later_attempts(call, service, failing, method: str) -> None:
    service.script.extend([failing("UNAVAILABLE", retry_after=(100, 0)), failing("UNAVAILABLE", retry_after=(250, 0))])
    assert call(method, "x", timeout_seconds=1000.0, options=PLAIN)
    limits = [1000, 900, 650]
    assert all(abs(limit - left) < 40 for limit, left in zip(limits, service.seconds_left, strict=True))


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_wait_beyond_the_deadline_fails_at_once_with_the_servers_error(call, service, failing, clock, method: str) -> None:
    service.script.append(failing("RESOURCE_EXHAUSTED", "queue: full", retry_after=(60, 0)))
    with pytest.raises(errors.Overloaded, match="queue: full"):
        call(method, "x", options={**PLAIN, "timeout_seconds": 60.0})
    assert clock.waits == []


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_calls_own_timeout_ends_it(call, service, held, method: str) -> None:
    service.script.append(held())
    with pytest.raises(errors.DeadlineExceeded) as caught:
        call(method, "x", timeout_seconds=0.2, request_id="r-3")
    assert caught.value.request_id == "r-3"


def test_stream_is_not_tried_again_after_its_first_piece(call, service, failing, clock) -> None:
    service.script.append(failing("UNAVAILABLE", "engine died", place="middle"))
    with pytest.raises(errors.Unavailable, match="engine died"):
        call("stream", "abcd")
    assert len(service.requests) == 1
    assert clock.waits == []


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_timeout_is_refused(call, service, method: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout_seconds: "):
        call(method, "x", timeout_seconds=seconds)
    assert service.requests == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"text": "a\ud800"}, "text"),
        ({"text": "a", "model": "\udcff"}, "model"),
        ({"text": "a", "max_new_tokens": -1}, "max_new_tokens"),
        ({"text": "a", "max_new_tokens": 2**32}, "max_new_tokens"),
        ({"text": "a", "search": Search(num_beams=-1)}, "num_beams"),
        ({"text": "a", "search": Search(seed=2**64)}, "seed"),
        ({"text": "a", "search": Search(suppressed_tokens=[3, -1])}, "suppressed_tokens"),
        ({"text": "a", "search": Search(forced_prefix="\udcff")}, "forced_prefix"),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_value_that_cannot_be_sent_is_named(call, service, method: str, arguments: dict, field: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"^{field}: "):
        call(method, **arguments)
    assert service.requests == []


def test_generate_many_keeps_the_order(call, service) -> None:
    texts = [f"text {n}" for n in range(100)]
    assert [result.text for result in call("generate_many", texts, concurrency=8)] == [text.upper() for text in texts]
    assert service.max_running <= 8


def test_generate_many_passes_its_options_on(call, service) -> None:
    call("generate_many", ["a", "b"], model="en-fr", max_new_tokens=3, truncate=True, timeout_seconds=1000.0)
    assert {(request.model, request.max_new_tokens, request.truncate) for request in service.requests} == {("en-fr", 3, True)}


def test_generate_many_of_nothing_is_nothing(call) -> None:
    assert call("generate_many", []) == []


def test_generate_many_needs_a_place(call) -> None:
    with pytest.raises(ValueError, match=r"^concurrency: 0 is"):
        call("generate_many", ["a"], concurrency=0)


def test_models_are_listed_with_all_they_say(call) -> None:
    first, second = call("models")
    assert first == ModelInfo(
        name="en-de",
        version="3",
        is_ready=True,
        precision="fp32",
        device="cpu",
        max_source_tokens=256,
        max_target_tokens=200,
        default_max_new_tokens=128,
        max_slots=64,
        max_slots_per_request=16,
        source_vocab_size=6000,
        target_vocab_size=7000,
        domain="captions of photographs",
        target_languages=(Language("de", ("deu", "german")),),
        defaults=Defaults(num_beams=4),
    )
    assert second.domain == ""
    assert (second.name, second.is_ready) == ("en-fr", False)
    assert (second.source_languages, second.defaults, second.shortlist_tokens) == ((), Defaults(), 0)


def test_models_tell_their_languages_and_defaults(call, service) -> None:
    german = generation_pb2.Language(code="deu_Latn", names=["de", "de_de"])
    values = {
        "num_beams": 5,
        "num_return_sequences": 2,
        "length_penalty": 0.5,
        "early_stopping": False,
        "do_sample": False,
        "temperature": 0.75,
        "top_k": 0,
        "top_p": 0.25,
        "repetition_penalty": 1.5,
        "min_new_tokens": 0,
        "max_new_tokens": 60,
        "no_repeat_ngram_size": 3,
        "is_end_forced": True,
    }
    assert values.keys() | {"suppressed_tokens"} == {field.name for field in dataclasses.fields(Defaults)}
    service.models[0] = generation_pb2.Model(
        name="nllb",
        source_languages=[generation_pb2.Language(code="eng_Latn"), german],
        target_languages=[german],
        default_source_language="eng_Latn",
        default_target_language="deu_Latn",
        defaults=generation_pb2.Defaults(suppressed_tokens=[3, 4], **values),
        shortlist_tokens=8192,
        weight_bits=7,
        cache_precision="int8",
        versions=[generation_pb2.ModelVersion(name="4", version="0123456789ab", labels=["canary"], share=0.25, is_default=True)],
        architecture="decoder",
    )
    told = call("models")[0]
    assert told.source_languages == (Language("eng_Latn"), Language("deu_Latn", ("de", "de_de")))
    assert told.target_languages == (Language("deu_Latn", ("de", "de_de")),)
    assert (told.default_source_language, told.default_target_language) == ("eng_Latn", "deu_Latn")
    assert told.defaults == Defaults(suppressed_tokens=(3, 4), **values)
    assert told.shortlist_tokens == 8192
    assert (told.weight_bits, told.cache_precision, told.architecture) == (7, "int8", "decoder")
    assert told.versions == (ModelVersion("4", "0123456789ab", ("canary",), 0.25, True),)
    assert call("model", "nllb") == told


def test_what_is_told_of_a_model_is_all_that_the_contract_has() -> None:
    messages = generation_pb2.Model, generation_pb2.Defaults, generation_pb2.ModelVersion
    for kind, message in zip((ModelInfo, Defaults, ModelVersion), messages, strict=True):
        assert {field.name for field in dataclasses.fields(kind)} == {field.name for field in message.DESCRIPTOR.fields}


def test_model_is_described(call) -> None:
    assert call("model", "en-fr").name == "en-fr"


def test_unknown_model_lists_what_is_loaded(call) -> None:
    with pytest.raises(errors.ModelNotFound, match="loaded: en-de, en-fr"):
        call("model", "en-xx")


def test_readiness_follows_the_servers_health(call, server) -> None:
    server.set_health("", False)
    server.set_health("en-de", True)
    assert call("is_ready") is False
    assert call("is_ready", "en-de") is True
    server.set_health("", True)
    assert call("is_ready") is True


def test_readiness_of_an_unknown_model_is_an_error(call) -> None:
    with pytest.raises(errors.ModelNotFound):
        call("is_ready", "en-xx")


def test_server_that_is_gone_is_not_ready(call, server, clock) -> None:
    server.stop()
    assert call("is_ready") is False
    assert clock.waits == []


def test_server_that_is_gone_is_unavailable(call, server, clock) -> None:
    server.stop()
    for method in ("generate", "stream"):
        with pytest.raises(errors.Unavailable):
            call(method, "x", options=PLAIN)
    assert clock.waits == [pytest.approx(wait) for wait in (0.1, 0.2, 0.4, 0.8)] * 2


def test_token_is_sent_with_every_call(call, server, service) -> None:
    options = {"token": "s3cret"}
    call("generate", "x", options=options)
    call("stream", "x", options=options)
    call("models", options=options)
    call("model", "en-de", options=options)
    assert [metadata["authorization"] for metadata in service.metadata] == ["Bearer s3cret"] * 4


def test_without_a_token_none_is_sent(call, service) -> None:
    call("generate", "x")
    assert "authorization" not in service.metadata[0]


def test_answer_over_grpcs_own_limit_arrives(call, service) -> None:
    large = generation_pb2.GenerateResponse(text="x" * (5 << 20), finish_reason=generation_pb2.FINISH_REASON_LENGTH)
    service.script.append(lambda context: large)
    result = call("generate", "x")
    assert (len(result.text), result.finish_reason) == (5 << 20, "length")


def test_finish_reason_of_a_newer_server_is_an_error(call, service) -> None:
    service.script.append(lambda context: generation_pb2.GenerateResponse(request_id="r-4", finish_reason=77))
    with pytest.raises(errors.InternalError, match="finish_reason 77") as caught:
        call("generate", "x")
    assert caught.value.request_id == "r-4"


def test_failure_after_the_result_does_not_take_it_back(call, service, failing) -> None:
    service.script.append(failing("UNAVAILABLE", place="end"))
    assert call("stream", "abcd")[-1].result.text == "ABCD"
    assert len(service.requests) == 1


def test_stream_without_a_result_is_an_error(call, service) -> None:
    service.is_cut_short = True
    with pytest.raises(errors.InternalError, match="without its result") as caught:
        call("stream", "a", request_id="r-5")
    assert caught.value.request_id == "r-5"


def test_callers_channel_options_win(call) -> None:
    options = {"options": {"grpc.max_receive_message_length": 1000}, "retry": RetryPolicy(max_attempts=1)}
    with pytest.raises(errors.TooLarge, match="its answer has 8127 bytes; this client takes 1000 at the most"):
        call("generate", "x" * 2000, options=options)
