"""Scores through both clients: what is asked, what comes back."""

import pytest

from dragoman.client.errors import CallError, Cancelled, InternalError, InvalidArgument
from dragoman.client.results import TokenLogProb
from dragoman.client.scoring import Alignment, Score, score_from_proto
from dragoman.client.sync import Client
from dragoman.v1 import generation_pb2


def test_score_is_plain_data(call) -> None:
    assert call("score", "abc", "xÜ", model="en-fr", request_id="r-1") == Score(
        log_prob=-4.5,
        score=-1.5,
        tokens=(TokenLogProb(120, b"x", -1.5), TokenLogProb(220, "Ü".encode(), -1.5), TokenLogProb(1, b"", -1.5)),
        alignment=None,
        word_alignment=None,
        source_tokens=4,
        model="en-fr",
        model_version="3",
        request_id="r-1",
    )


def test_everything_asked_for_arrives(call, service) -> None:
    call(
        "score",
        "a",
        "b",
        model="en-fr",
        model_version="4",
        source_language="en",
        target_language="fr",
        length_penalty=0.0,
        return_alignment=True,
        return_word_alignment=True,
        alignment_layer=0,
        priority=-4,
        request_id="r-1",
    )
    (request,) = service.requests
    assert (request.text, request.target, request.model, request.request_id, request.priority) == ("a", "b", "en-fr", "r-1", -4)
    assert (request.source_language, request.target_language, request.model_version) == ("en", "fr", "4")
    assert request.return_alignment and request.return_word_alignment
    assert request.HasField("length_penalty") and request.length_penalty == 0
    assert request.HasField("alignment_layer") and request.alignment_layer == 0


def test_what_is_not_asked_for_is_left_to_the_server(call, service) -> None:
    call("score", "a", "")
    (request,) = service.requests
    assert not (request.HasField("length_penalty") or request.HasField("alignment_layer"))
    assert not (request.return_alignment or request.return_word_alignment or request.priority or request.model)
    assert request.request_id


def test_alignment_comes_in_rows(call) -> None:
    score = call("score", "a", "bc", return_alignment=True)
    assert score.alignment == Alignment((b" \xe7", b""), ((0.25, 0.75),) * 3)
    assert score.word_alignment is None


def test_no_links_are_not_the_same_as_none_asked_for(call) -> None:
    assert call("score", "a", "b", return_word_alignment=True).word_alignment == "0-0 1-1"
    request = generation_pb2.ScoreRequest(return_word_alignment=True)
    assert score_from_proto(generation_pb2.ScoreResponse(), request).word_alignment == ""


def test_alignment_of_the_wrong_size_is_not_believed() -> None:
    request = generation_pb2.ScoreRequest(return_alignment=True)
    message = generation_pb2.ScoreResponse(request_id="r-1")
    message.alignment.num_source_tokens = message.alignment.num_target_tokens = 2
    message.alignment.weights.extend([1.0] * 3)
    with pytest.raises(InternalError, match="3 weights for 2 target and 2 source tokens"):
        score_from_proto(message, request)


@pytest.mark.parametrize("field", ["text", "target"])
def test_text_that_is_not_unicode_is_named(call, service, field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}: not Unicode"):
        call("score", **{"text": "a", "target": "b"} | {field: "\udcff"})
    assert service.requests == []


def test_number_out_of_range_is_named(call) -> None:
    with pytest.raises(InvalidArgument, match="alignment_layer: -1 is out of range"):
        call("score", "a", "b", return_alignment=True, alignment_layer=-1)


def test_failed_score_is_tried_again_with_the_same_id(call, service, failing) -> None:
    service.script.append(failing("UNAVAILABLE"))
    assert call("score", "a", "b").score == -1.5
    first, second = service.requests
    assert first.request_id == second.request_id


def test_refusal_is_an_error_with_the_request_id(call, service, failing) -> None:
    service.script.append(failing("INVALID_ARGUMENT", "target: too long"))
    with pytest.raises(CallError, match="target: too long") as caught:
        call("score", "a", "b", request_id="r-7")
    assert caught.value.request_id == "r-7"
    assert len(service.requests) == 1


def test_scope_that_has_ended_scores_nothing(client: Client, service) -> None:
    with client.scope() as scope:
        pass
    with pytest.raises(Cancelled):
        client.score("a", "b", scope=scope)
    assert service.requests == []
