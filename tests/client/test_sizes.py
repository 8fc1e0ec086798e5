"""Messages that are larger than they may be, through both clients and the command line: refused at once, and alone."""

from io import BytesIO, StringIO
from pathlib import Path

import pytest

from dragoman.client import errors
from dragoman.client.request import Request
from dragoman.client.score_files import Pairs, ScoreOptions, score_pairs
from dragoman.client.sizes import DEFAULT_MAX_REQUEST_BYTES, SEND_OPTION
from dragoman.client.translate import TranslateOptions, translate_file, translate_lines, translate_texts
from dragoman.model.errors import InputError
from dragoman.server.config import ServerConfig

LARGE = "x" * 4_500_000
UNLIMITED = {"options": {SEND_OPTION: -1}}
REFUSED_HERE = r"text: 4500000 bytes make the request one of 45\d+; at most 4194304 are sent \(grpc.max_send_message_length\)"
# On a stream an answer, or a message, may have something around it.
REFUSED_ON_A_STREAM = REFUSED_HERE.replace("4194304", "4194240")
REFUSED_THERE = r"^request: 45\d+ bytes; the server takes 4194304 at the most$"


def test_the_limit_is_that_of_a_server_that_is_not_set_otherwise() -> None:
    assert ServerConfig.model_fields["max_message_bytes"].default == DEFAULT_MAX_REQUEST_BYTES


@pytest.mark.parametrize(("method", "arguments"), [("generate", (LARGE,)), ("stream", (LARGE,)), ("score", (LARGE, "b"))])
def test_what_is_too_large_is_not_sent(call, service, clock, method: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(errors.TooLarge, match=f"^{REFUSED_HERE}$") as caught:
        call(method, *arguments, request_id="mine")
    assert isinstance(caught.value, errors.InvalidArgument) and caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.request_id == "mine"
    assert service.requests == [] and clock.waits == []


@pytest.mark.parametrize("field", ["text", "target"])
def test_the_largest_field_is_named(call, field: str) -> None:
    texts = {"text": "a", "target": "b"} | {field: "é" * 3_000_000}
    with pytest.raises(errors.TooLarge, match=f"^{field}: 6000000 bytes make the request one of 60"):
        call("score", texts["text"], texts["target"])


@pytest.mark.parametrize("count", [DEFAULT_MAX_REQUEST_BYTES - 100, DEFAULT_MAX_REQUEST_BYTES])
def test_the_limit_is_exact(call, service, count: int) -> None:
    if count < DEFAULT_MAX_REQUEST_BYTES:
        call("score", "a" * count, "b", request_id="r")
        assert len(service.requests) == 1
    else:
        with pytest.raises(errors.TooLarge):
            call("score", "a" * count, "b", request_id="r")


@pytest.mark.parametrize(("method", "arguments"), [("generate", (LARGE,)), ("stream", (LARGE,)), ("score", (LARGE, "b"))])
def test_what_the_server_finds_too_large_is_not_tried_again(call, service, clock, method: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(errors.TooLarge, match=REFUSED_THERE) as caught:
        call(method, *arguments, options=UNLIMITED)
    assert caught.value.code == "RESOURCE_EXHAUSTED" and not caught.value.is_answer
    assert service.requests == [] and clock.waits == []


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_an_answer_that_this_client_does_not_take_is_not_asked_for_again(call, service, clock, method: str) -> None:
    with pytest.raises(
        errors.TooLarge, match=r"^request: its answer has \d+ bytes; this client takes 1000 at the most\."
    ) as caught:
        call(method, "x" * 2000, options={"options": {"grpc.max_receive_message_length": 1000}})
    assert caught.value.is_answer
    assert len(service.requests) == 1 and clock.waits == []


@pytest.mark.parametrize("message", ["rate limit exceeded", "queue: too many requests are waiting", "", "message queue is full"])
def test_what_does_not_speak_of_a_size_is_tried_again_even_without_a_time(call, service, failing, clock, message: str) -> None:
    """A proxy's quota has no RetryInfo, and goes by."""
    service.script.append(failing("RESOURCE_EXHAUSTED", message))
    assert call("generate", "a").text == "A"
    assert len(clock.waits) == 1


@pytest.mark.parametrize(
    "message", ["grpc: received message larger than max (5 vs. 4)", "gRPC message exceeds maximum size 4: 5", "message too large"]
)
def test_other_words_for_a_size_are_understood(call, service, failing, clock, message: str) -> None:
    service.script.append(lambda context: context.abort(errors.grpc.StatusCode.RESOURCE_EXHAUSTED, message))
    with pytest.raises(errors.TooLarge, match=r"^request: "):
        call("generate", "a")
    assert clock.waits == []


def codes(outcomes) -> list[str]:
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    return ["OK" if outcome.error is None else type(outcome.error).__name__ for outcome in ordered]


@pytest.mark.parametrize("options", [{}, UNLIMITED], ids=["refused here", "refused by the server"])
def test_in_a_batch_what_is_too_large_fails_alone(call, service, clock, options: dict) -> None:
    texts = ["late", "b", LARGE, "d", LARGE + "x", "f", "late too", "h"]
    outcomes = call("generate_batch", [Request(text, request_id=f"r-{i}") for i, text in enumerate(texts)], options=options)
    assert codes(outcomes) == ["OK", "OK", "TooLarge", "OK", "TooLarge", "OK", "OK", "OK"]
    large = sorted((outcome.error.request_id, outcome.error.message[:9]) for outcome in outcomes if outcome.error is not None)
    prefix = "text: 450" if not options else "request: "
    assert large == [("r-2", prefix), ("r-4", prefix)]
    assert not any(clock.waits)


def test_in_a_batch_an_answer_that_is_too_large_fails_alone(call, clock) -> None:
    texts = ["a", "b", "x" * 2000, "d", "e"]
    options = {"options": {"grpc.max_receive_message_length": 1000}}
    outcomes = call("generate_batch", [Request(text) for text in texts], concurrency=1, options=options)
    assert codes(outcomes) == ["OK", "OK", "TooLarge", "OK", "OK"]
    assert not any(clock.waits)


def test_a_line_that_is_too_large_is_named(client, service, tmp_path: Path) -> None:
    out, text = StringIO(), "text 2"
    with pytest.raises(InputError, match=f"^{text}: {REFUSED_HERE}$"):
        translate_texts(client, ["good", LARGE], out, TranslateOptions())
    with pytest.raises(InputError, match=f"^standard input, line 2: {REFUSED_HERE}$"):
        translate_lines(client, BytesIO(b"good\n" + LARGE.encode() + b"\n"), out, TranslateOptions(is_streamed=True))
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(f"good\n{LARGE}\n")
    target.write_text("a\nb\n")
    with pytest.raises(InputError, match=f", line 2: {REFUSED_ON_A_STREAM}"):
        translate_file(client, source, tmp_path / "translated", TranslateOptions())
    with pytest.raises(InputError, match=f"^line 2 of .*: {REFUSED_HERE}$"):
        score_pairs(client, Pairs(source, target), out, ScoreOptions())
    assert [request.text for request in service.requests] == ["good"] * 4
