"""What is sent again, what is given up, and under which id."""

import math

import pytest

from dragoman.client.batch import Batch, Outcome, Sending
from dragoman.client.errors import InternalError, InvalidArgument, Overloaded, Unavailable
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.v1 import generation_pb2

POLICY = RetryPolicy(max_attempts=3, initial_backoff_seconds=1.0, multiplier=2.0, jitter=0.0)


@pytest.fixture
def batch(clock) -> Batch:
    return Batch(POLICY, math.inf, clock)


def answer(sending: Sending, text: str = "ok") -> generation_pb2.GenerateBatchResponse:
    request_id = sending.message.request_id
    response = generation_pb2.GenerateResponse(request_id=request_id, text=text, finish_reason=generation_pb2.FINISH_REASON_EOS)
    return generation_pb2.GenerateBatchResponse(request_id=request_id, response=response)


def refuse(sending: Sending, error: generation_pb2.Error) -> generation_pb2.GenerateBatchResponse:
    return generation_pb2.GenerateBatchResponse(request_id=sending.message.request_id, error=error)


def test_outcome_knows_its_place_and_its_request(batch) -> None:
    requests = [Request("a"), Request("b", request_id="mine")]
    first, second = [batch.add(request) for request in requests]
    assert batch.num_open == 2
    late, early = batch.take(answer(second)), batch.take(answer(first))
    assert (late.index, late.request, late.result.request_id, late.error) == (1, requests[1], "mine", None)
    assert (early.index, early.request) == (0, requests[0])
    assert batch.num_open == 0


def test_refused_request_is_sent_again_when_the_server_says(batch, clock, refusing) -> None:
    first = batch.add(Request("a", request_id="mine", model="en-fr"))
    again = batch.take(refuse(first, refusing("RESOURCE_EXHAUSTED", retry_after=(7, 0))))
    assert again.not_before == clock.now + 7
    assert (again.message.text, again.message.model) == ("a", "en-fr")
    outcome = batch.take(answer(again))
    assert (outcome.index, outcome.result.text, outcome.result.request_id) == (0, "ok", "mine")


def test_id_is_used_once_on_a_stream_and_shows_whose_it_is(batch, refusing) -> None:
    sending, ids = batch.add(Request("a", request_id="x" * 128)), []
    for _ in range(2):
        ids.append(sending.message.request_id)
        sending = batch.take(refuse(sending, refusing("UNAVAILABLE")))
    ids.append(sending.message.request_id)
    assert len(set(ids)) == 3 and all(len(name) <= 128 and name.startswith("x" * 95) for name in ids)
    assert batch.take(answer(sending)).result.request_id == "x" * 128


def test_waits_grow_and_attempts_run_out(batch, clock, refusing) -> None:
    sending, waits = batch.add(Request("a", request_id="mine")), []
    for _ in range(2):
        sending = batch.take(refuse(sending, refusing("UNAVAILABLE")))
        waits.append(sending.not_before - clock.now)
    outcome = batch.take(refuse(sending, refusing("UNAVAILABLE", "draining")))
    assert waits == [1.0, 2.0]
    assert isinstance(outcome.error, Unavailable)
    assert (str(outcome.error), outcome.error.request_id, outcome.result) == ("draining", "mine", None)
    assert batch.num_open == 0


def test_final_failure_is_not_tried_again(batch, refusing) -> None:
    outcome = batch.take(refuse(batch.add(Request("a")), refusing("INVALID_ARGUMENT", "text: is blank", retry_after=(1, 0))))
    assert isinstance(outcome.error, InvalidArgument) and outcome.error.message == "text: is blank"


def test_wait_beyond_the_deadline_fails_at_once_with_the_servers_error(clock, refusing) -> None:
    batch = Batch(POLICY, clock.now + 10, clock)
    outcome = batch.take(refuse(batch.add(Request("a")), refusing("RESOURCE_EXHAUSTED", retry_after=(10, 0))))
    assert isinstance(outcome.error, Overloaded) and outcome.error.retry_after_seconds == 10


def test_request_that_cannot_be_sent_fails_alone(batch) -> None:
    outcome = batch.add(Request("a\udcff"))
    assert isinstance(outcome.error, InvalidArgument) and outcome.error.message.startswith("text: not Unicode")
    assert batch.num_open == 0
    assert isinstance(batch.add(Request("b")), Sending)


def test_id_of_an_unanswered_request_cannot_be_used_again(batch) -> None:
    first = batch.add(Request("a", request_id="mine"))
    second = batch.add(Request("b", request_id="mine"))
    assert (second.index, second.error.message) == (1, "request_id: another request of the batch has it")
    assert batch.take(answer(first)).index == 0


def test_unknown_finish_reason_fails_the_request_alone(batch) -> None:
    response = answer(batch.add(Request("a")))
    response.response.finish_reason = 77
    outcome = batch.take(response)
    assert isinstance(outcome.error, InternalError) and "77" in outcome.error.message


def test_answer_to_nothing_is_an_error(batch) -> None:
    sending = batch.add(Request("a"))
    batch.take(answer(sending))
    with pytest.raises(InternalError, match="not asked"):
        batch.take(answer(sending))


def test_broken_stream_sends_what_is_unanswered_again_under_its_own_id(batch, refusing) -> None:
    kept, answered, refused = (batch.add(Request(text, request_id=text)) for text in "abc")
    batch.take(answer(answered))
    assert batch.take(refuse(refused, refusing("UNAVAILABLE"))).message.request_id != "c"
    wait, again = batch.interrupt(Unavailable("gone"))
    assert wait == 1.0
    assert [(sending.message.text, sending.message.request_id, sending.not_before) for sending in again] == [
        ("a", "a", 0.0),
        ("c", "c", 0.0),
    ]
    assert kept.message.text == "a" and batch.num_open == 2


def test_streams_that_break_without_an_answer_between_end_the_batch(batch) -> None:
    batch.add(Request("a"))
    assert batch.interrupt(Unavailable("gone"))[0] == 1.0
    assert batch.interrupt(Unavailable("gone"))[0] == 2.0
    with pytest.raises(Unavailable, match="gone for good"):
        batch.interrupt(Unavailable("gone for good"))


def test_answer_shows_that_the_server_is_there(batch) -> None:
    for _ in range(9):
        sending = batch.add(Request("a"))
        assert batch.interrupt(Unavailable("gone"))[0] == 1.0
        assert isinstance(batch.take(answer(sending)), Outcome)


def test_request_on_every_broken_stream_is_given_up(batch) -> None:
    batch.add(Request("poison", request_id="poison"))
    outcomes = []
    for number in range(3):
        other = batch.add(Request("good", request_id=f"good {number}"))
        batch.take(answer(other))
        _, steps = batch.interrupt(Unavailable("crashed"))
        outcomes += [step for step in steps if isinstance(step, Outcome)]
    assert [(outcome.index, outcome.error.message) for outcome in outcomes] == [(0, "crashed")]
    assert batch.num_open == 0


@pytest.mark.parametrize("deadline", [0.5, math.inf])
def test_failure_that_is_final_or_too_late_to_mend_ends_the_batch(clock, deadline: float) -> None:
    error = InternalError("broken") if deadline == math.inf else Unavailable("gone")
    batch = Batch(POLICY, clock.now + deadline, clock)
    batch.add(Request("a"))
    with pytest.raises(type(error)) as caught:
        batch.interrupt(error)
    assert caught.value is error


def test_answer_without_an_id_is_for_the_request_in_its_place(batch, refusing) -> None:
    """A server sends back no id that it refuses, and says which message of the stream it speaks of."""
    first, second = (batch.add(Request(text, request_id=name)) for text, name in (("a", "good"), ("b", "y" * 200)))
    error = refusing("INVALID_ARGUMENT", "request_id: 200 characters; at most 128 are allowed")
    outcome = batch.take(generation_pb2.GenerateBatchResponse(index=1, error=error))
    assert (outcome.index, outcome.error.request_id) == (1, "y" * 200)
    assert batch.take(answer(first)).index == 0
    with pytest.raises(InternalError, match="not asked"):
        batch.take(generation_pb2.GenerateBatchResponse(index=1, error=error))
    assert isinstance(second, Sending)


def test_places_are_counted_anew_on_each_stream(batch, refusing) -> None:
    sendings = [batch.add(Request(text, request_id=text)) for text in "abc"]
    batch.take(answer(sendings[0]))
    _, steps = batch.interrupt(Unavailable("gone"))
    assert [step.message.request_id for step in steps] == ["b", "c"]
    outcome = batch.take(generation_pb2.GenerateBatchResponse(index=0, error=refusing("INVALID_ARGUMENT", "no")))
    assert outcome.request.request_id == "b"
