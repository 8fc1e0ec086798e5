"""Batches: many requests on one stream, in messages of one or of several, with retries, expiry, order and read-ahead."""

import asyncio
import math
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.client import errors
from dragoman.client.batch import MAX_BYTES, MAX_REQUESTS, Batch, Grouping, Outcome, Sending, apart
from dragoman.client.errors import InternalError, InvalidArgument, Overloaded, TooLarge, Unavailable, Unimplemented
from dragoman.client.request import Request
from dragoman.client.results import Answer, Result, Timings, Usage
from dragoman.client.retry import RetryPolicy
from dragoman.v1 import generation_pb2
from tests.client.fake_server import EOS, PATIENCE_SECONDS, Held, failing, in_turn, make_status

PLAIN = {"retry": RetryPolicy(jitter=0.0)}
POLICY = RetryPolicy(max_attempts=3, initial_backoff_seconds=1.0, multiplier=2.0, jitter=0.0)


@pytest.fixture(params=[True, False], ids=["bulk", "single"])
def has_bulk(request, service) -> bool:
    """Whether the server takes several requests in a message."""
    service.has_bulk = request.param
    return request.param


def asked(*texts: str) -> list[Request]:
    return [Request(text, request_id=f"r-{i}") for i, text in enumerate(texts)]


def by_place(outcomes: list[Outcome]) -> list[str]:
    """Return texts of results and codes of errors, in the order of the input."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    assert [outcome.index for outcome in ordered] == list(range(len(ordered)))
    return [outcome.result.text if outcome.error is None else outcome.error.code for outcome in ordered]


def test_each_request_has_one_outcome_on_one_stream(call, service, has_bulk: bool) -> None:
    texts = [f"text {n}" for n in range(300)]
    outcomes = call("generate_batch", asked(*texts), concurrency=200)
    assert by_place(outcomes) == [text.upper() for text in texts]
    assert all(outcome.request.text == texts[outcome.index] for outcome in outcomes)
    assert all(outcome.result.request_id == f"r-{outcome.index}" for outcome in outcomes)
    assert [[request.text for request in seen] for seen in service.batches] == [texts]
    assert [result.text for result in call("generate_many", texts, concurrency=8)] == [text.upper() for text in texts]
    assert service.max_running <= 200 and len(service.batches) == 2
    if has_bulk:
        sizes = service.messages[0]
        assert sum(sizes) == 300 and max(sizes) <= MAX_REQUESTS and len(sizes) < 300


def test_no_requests_open_no_stream(call, service) -> None:
    assert call("generate_batch", []) == call("generate_many", []) == []
    assert [result.text for result in call("generate_many", [""] * 100, concurrency=2)] == [""] * 100
    assert service.batches == []
    for method in ("generate_batch", "generate_many"):
        with pytest.raises(ValueError, match=r"^concurrency: 0 is"):
            call(method, [], concurrency=0)


def test_messages_have_as_many_requests_as_server_and_client_take(client, call, service) -> None:
    large = "x" * (MAX_BYTES + 1)
    assert by_place(list(client.generate_batch(asked("a", large, "b")))) == ["A", large.upper(), "B"]
    assert len(service.messages[0]) >= 2, "a large request is a message of its own"
    for limit, is_bulk in ((-1, True), (128 * 1024, True), (128 * 1024 - 1, False)):
        service.messages.clear()
        call("generate_batch", asked("a", "b"), options={"options": {"grpc.max_receive_message_length": limit}})
        assert bool(service.messages) == is_bulk
    service.has_bulk = False
    service.messages.clear()
    service.metadata.clear()
    for _ in range(2):
        assert by_place(list(client.generate_batch(asked("a", "b")))) == ["A", "B"]
    assert [result.text for result in client.generate_many(["a", "", "b"])] == ["A", "", "B"]
    assert service.messages == [] and [len(seen) for seen in service.batches[-3:]] == [2, 2, 2]
    assert [method for method, _ in service.metadata].count("GenerateBulk") == 1, "an older server is asked once"


def test_a_blank_text_among_many_is_answered_without_the_server(call, service) -> None:
    results = call("generate_many", ["a", "", "b", "\t\n", "\u2003"], model="en-fr")
    assert [result.text for result in results] == ["A", "", "B", "", ""]
    nothing = Usage(0, 0), Timings(0.0, 0.0, 0.0, 0.0, 0.0), (Answer("", (), "eos", 0.0),)
    assert results[1] == results[3] == results[4] == Result("", (), "eos", False, "en-fr", "", "", *nothing)
    assert sorted(request.text for request in service.requests) == ["a", "b"]


def test_outcomes_come_as_they_are_finished_and_many_in_order(client, service, has_bulk: bool) -> None:
    for method in ("generate_batch", "generate_many"):
        service.behaviours = {text: Held() for text in "abcde"}
        with ThreadPoolExecutor() as threads:
            items = asked(*"abcdefgh") if method == "generate_batch" else list("abcdefgh")
            answers = threads.submit(list, getattr(client, method)(items, concurrency=4))
            for text in "abcd":
                service.behaviours[text].wait_until_began()
            service.behaviours["d"].release()
            service.behaviours["e"].wait_until_began()
            for text in "ecba":
                service.behaviours[text].release()
            outcomes = answers.result(PATIENCE_SECONDS)
        if method == "generate_batch":
            assert outcomes[0].index == 3 and by_place(outcomes) == list("ABCDEFGH")
        else:
            assert [outcome.text for outcome in outcomes] == list("ABCDEFGH")
    assert service.max_running == 4


def test_a_request_fails_alone_or_is_tried_again_on_the_same_stream(call, service, clock, has_bulk: bool) -> None:
    service.behaviours["bad"] = failing("INVALID_ARGUMENT", "text: too long")
    service.behaviours["busy"] = in_turn(failing("UNAVAILABLE"), failing("RESOURCE_EXHAUSTED", retry_after=(7, 0)))
    outcomes = call("generate_batch", asked("a", "bad", "\udcff", "busy"), options=PLAIN)
    assert by_place(outcomes) == ["A", "INVALID_ARGUMENT", "INVALID_ARGUMENT", "BUSY"]
    [bad] = [outcome for outcome in outcomes if outcome.index == 1]
    assert isinstance(bad.error, InvalidArgument)
    assert (bad.error.message, bad.error.request_id) == ("text: too long", "r-1")
    [seen] = service.batches
    assert [request.text for request in seen].count("busy") == 3 and len({request.request_id for request in seen}) == 5
    assert clock.waits == [pytest.approx(0.1), pytest.approx(7.0)]
    service.behaviours["busy"] = in_turn(*(failing("RESOURCE_EXHAUSTED", f"full {n}") for n in range(9)))
    [busy] = call("generate_batch", asked("busy"), options=PLAIN)
    assert isinstance(busy.error, Overloaded) and busy.error.message == "full 4"
    assert len(service.batches[1]) == 5


def test_a_broken_stream_is_opened_again_for_unanswered_requests(call, service, clock, has_bulk: bool) -> None:
    service.breaks.extend([(3, failing("UNAVAILABLE", retry_after=(2, 0))), (2, failing("UNAVAILABLE"))])
    texts = [f"text {n}" for n in range(10)]
    assert by_place(call("generate_batch", asked(*texts), concurrency=4, options=PLAIN)) == [text.upper() for text in texts]
    assert len(service.batches) == 3 and clock.waits == [2.0, pytest.approx(0.1)]
    service.breaks.append((1, failing("UNAVAILABLE")))
    assert by_place(call("generate_batch", asked("a"), options=PLAIN)) == ["A"], "a failure after the last answer"
    assert len(service.batches) == 4 and len(clock.waits) == 2
    service.breaks.extend([(0, failing("UNAVAILABLE", f"down {n}")) for n in range(5)])
    with pytest.raises(Unavailable, match="down 4"):
        call("generate_batch", asked("a", "b"), options=PLAIN)
    assert len(service.batches) == 9
    assert clock.waits[2:] == [pytest.approx(wait) for wait in (0.1, 0.2, 0.4, 0.8)]
    for code in ("UNAUTHENTICATED", "INTERNAL", *([] if has_bulk else ["UNIMPLEMENTED"])):
        service.breaks.append((0, failing(code)))
        with pytest.raises(errors.CallError) as caught:
            call("generate_batch", asked("a"))
        assert (caught.value.code, len(clock.waits)) == (code, 6)
    service.breaks.append((1, str))
    with pytest.raises(InternalError, match="1 requests unanswered"):
        call("generate_batch", asked("a", "b"), concurrency=1)


def test_a_batch_has_a_deadline_if_it_is_given_one_and_a_text_among_many_expires_alone(connect, service, has_bulk: bool) -> None:
    client = connect(is_real=True, timeout_seconds=1.5)
    list(client.generate_batch(asked("a"), timeout_seconds=1000.0))
    list(client.generate_batch(asked("a")))
    assert 900 < service.seconds_left[0] < 1100 and service.seconds_left[1] > 1e9
    service.behaviours["stuck"] = Held()
    with pytest.raises(errors.DeadlineExceeded):
        list(client.generate_batch(asked("stuck"), timeout_seconds=0.2))
    for seconds, options in ((1.5, {}), (1.2, {"timeout_seconds": 1.2})):
        service.behaviours["stuck"] = held = Held()
        answers = client.generate_many(["a", "stuck", "b"], **options)
        assert next(answers).text == "A"
        with pytest.raises(errors.DeadlineExceeded, match=rf"^not answered within {seconds} s$"):
            next(answers)
        held.assert_cancelled()


def test_the_first_failure_in_order_ends_many_and_cancels_the_rest(client, service, has_bulk: bool) -> None:
    stuck = Held()

    def fail(context: Any) -> None:
        stuck.wait_until_began()
        failing("NOT_FOUND", "model: none")(context)

    service.behaviours = {"bad": fail, "stuck": stuck}
    answers = client.generate_many(["good", "bad", "stuck"], concurrency=3)
    assert next(answers).text == "GOOD"
    with pytest.raises(errors.ModelNotFound, match="model: none"):
        next(answers)
    stuck.assert_cancelled()


def test_an_input_that_fails_ends_the_batch_after_the_items_before_it(client, has_bulk: bool) -> None:
    def items(kind: Any) -> Any:
        yield from map(kind, "ab")
        raise OSError("disk")

    for method, kind in (("generate_batch", Request), ("generate_many", str)):
        answers = getattr(client, method)(items(kind), concurrency=1)
        assert next(answers) and next(answers)
        with pytest.raises(OSError, match="disk"):
            next(answers)


@pytest.mark.parametrize(("method", "num_ahead"), [("generate_batch", 4), ("generate_many", 8)])
def test_the_input_is_read_as_outcomes_are_taken(client, method: str, num_ahead: int, has_bulk: bool) -> None:
    read = []

    def items() -> Any:
        for number in range(1000):
            read.append(number)
            yield Request(str(number)) if method == "generate_batch" else str(number)

    answers = getattr(client, method)(items(), concurrency=4)
    assert read == []
    for num_taken in range(1, 21):
        answer = next(answers)
        assert len(read) <= num_taken + num_ahead
        assert method == "generate_batch" or answer.text == str(num_taken - 1)
    answers.close()


def test_an_outcome_is_yielded_before_a_slow_input_goes_on(connect, kind: str, has_bulk: bool) -> None:
    is_answered = threading.Event()

    def requests() -> Any:
        yield Request("a")
        assert is_answered.wait(PATIENCE_SECONDS)
        yield Request("b")

    async def async_requests() -> Any:
        yield Request("a")
        await asyncio.to_thread(is_answered.wait, PATIENCE_SECONDS)
        yield Request("b")

    with ThreadPoolExecutor() as threads:
        outcomes = connect().generate_batch(requests() if kind == "sync" else async_requests(), concurrency=1)
        assert threads.submit(next, outcomes).result(PATIENCE_SECONDS).result.text == "A"
        is_answered.set()
        assert [outcome.result.text for outcome in outcomes] == ["B"]


def test_a_batch_leaves_no_threads_behind(service, sync_client) -> None:
    service.breaks.extend([(0, failing("UNAVAILABLE"))] * 2)
    before = {*threading.enumerate()}
    assert len(list(sync_client.generate_batch(asked("a", "b")))) == 2
    for thread in {*threading.enumerate()} - before:
        if thread.name == "client-batch":
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def batch(clock) -> Batch:
    return Batch(POLICY, math.inf, clock)


def answer(sending: Sending, **fields: Any) -> generation_pb2.GenerateBatchResponse:
    response = generation_pb2.GenerateResponse(request_id=sending.message.request_id, **{"finish_reason": EOS, **fields})
    return generation_pb2.GenerateBatchResponse(request_id=sending.message.request_id, response=response)


def refuse(sending: Sending, *status: Any, **arguments: Any) -> generation_pb2.GenerateBatchResponse:
    return generation_pb2.GenerateBatchResponse(request_id=sending.message.request_id, error=make_status(*status, **arguments))


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["add", "answer", "refuse", "break"]), max_size=40), st.randoms(use_true_random=False))
def test_each_request_of_a_batch_has_one_outcome_after_at_most_its_attempts(steps: list[str], random: Any) -> None:
    batch, wire, outcomes, sent = Batch(POLICY, math.inf, lambda: 0.0), [], [], {}
    num_added = num_failures = 0

    def take(step: Sending | Outcome) -> None:
        if isinstance(step, Outcome):
            outcomes.append(step)
            return
        assert step.message.request_id not in {sending.message.request_id for sending in wire}
        sent[step.message.text] = sent.get(step.message.text, 0) + 1
        wire.append(step)

    for step in [*steps, *["answer"] * 40]:
        if step == "add":
            take(batch.add(Request(str(num_added), request_id=f"r-{num_added}")))
            num_added += 1
        elif step == "break" and num_failures < 2:
            num_failures += 1
            wire.clear()
            for again in batch.interrupt(Unavailable("gone"))[1]:
                take(again)
        elif step in ("answer", "refuse") and wire:
            num_failures = 0
            sending = wire.pop(random.randrange(len(wire)))
            take(batch.take(answer(sending) if step == "answer" else refuse(sending, "UNAVAILABLE")))
        assert batch.num_open == len(wire) == num_added - len(outcomes)
    assert sorted(outcome.index for outcome in outcomes) == list(range(num_added))
    for outcome in outcomes:
        assert outcome.request.text == str(outcome.index) and sent[outcome.request.text] <= 3
        assert (outcome.result or outcome.error).request_id in (f"r-{outcome.index}", "")


def test_a_refused_request_is_sent_again_under_an_id_of_its_own(batch, clock) -> None:
    sending, ids, waits = batch.add(Request("a", request_id="x" * 128, model="en-fr")), [], []
    for retry_after in (None, (7, 0)):
        ids.append(sending.message.request_id)
        sending = batch.take(refuse(sending, "UNAVAILABLE", retry_after=retry_after))
        waits.append(sending.not_before - clock.now)
    assert waits == [1.0, 7.0] and (sending.message.text, sending.message.model) == ("a", "en-fr")
    assert len({*ids, sending.message.request_id}) == 3
    assert len(sending.message.request_id) == 128 and sending.message.request_id.startswith("x" * 95)
    outcome = batch.take(refuse(sending, "UNAVAILABLE", "draining"))
    assert (type(outcome.error), outcome.error.message, outcome.error.request_id) == (Unavailable, "draining", "x" * 128)
    assert (outcome.index, outcome.result, batch.num_open) == (0, None, 0)
    with pytest.raises(InternalError, match="not asked"):
        batch.take(answer(sending))


def test_a_wait_that_reaches_the_deadline_or_the_expiry_is_not_begun(clock) -> None:
    for late in (Batch(POLICY, clock.now + 10, clock), Batch(POLICY, math.inf, clock, request_seconds=10)):
        for seconds, is_sent in ((9, True), (10, False)):
            step = late.take(refuse(late.add(Request("a")), "RESOURCE_EXHAUSTED", retry_after=(seconds, 0)))
            assert isinstance(step, Sending) == is_sent
        assert isinstance(step.error, Overloaded) and step.error.retry_after_seconds == 10
    for deadline, error in ((1.0, Unavailable("gone")), (math.inf, InternalError("broken"))):
        late = Batch(POLICY, clock.now + deadline, clock)
        late.add(Request("a"))
        with pytest.raises(type(error)) as caught:
            late.interrupt(error)
        assert caught.value is error


def test_a_request_that_cannot_be_sent_or_read_fails_alone(batch) -> None:
    first = batch.add(Request("a", request_id="mine"))
    for request, message in ((Request("a\udcff"), "text: not Unicode"), (Request("b", request_id="mine"), "request_id: another")):
        outcome = batch.add(request)
        assert isinstance(outcome.error, InvalidArgument) and outcome.error.message.startswith(message)
    assert outcome.index == 2 and batch.num_open == 1
    outcome = batch.take(answer(first, finish_reason=77))
    assert isinstance(outcome.error, InternalError) and "77" in outcome.error.message


def test_a_broken_stream_sends_unanswered_requests_again_under_their_ids(batch) -> None:
    for text in "abc":
        sending = batch.add(Request(text, request_id=text))
        if text == "b":
            batch.take(answer(sending))
    assert batch.take(refuse(sending, "UNAVAILABLE")).message.request_id != "c"
    wait, again = batch.interrupt(Unavailable("gone"))
    assert (wait, [(step.message.request_id, step.not_before) for step in again]) == (1.0, [("a", 0.0), ("c", 0.0)])
    no = make_status("INVALID_ARGUMENT")
    first, second = (generation_pb2.GenerateBatchResponse(index=index, error=no) for index in (0, 1))
    assert batch.take(first).request.request_id == "a", "places are counted on each stream"
    for response in (first, generation_pb2.GenerateBatchResponse(request_id="unknown", index=1, error=no)):
        with pytest.raises(InternalError, match="not asked"):
            batch.take(response)
    assert batch.take(second).error.request_id == "c"


def test_breaks_without_an_answer_between_them_and_requests_on_each_broken_stream_are_given_up(batch) -> None:
    for number in range(4):  # each answer shows that the server is there
        sending = batch.add(Request("a"))
        assert batch.interrupt(Unavailable("gone"))[0] == 1.0
        assert batch.take(answer(sending)).index == number
    batch.add(Request("poison", request_id="poison"))
    steps = []
    for _ in range(3):
        batch.take(answer(batch.add(Request("good"))))
        steps += batch.interrupt(Unavailable("crashed"))[1]
    assert [(step.index, step.error.message) for step in steps if isinstance(step, Outcome)] == [(4, "crashed")]
    assert batch.num_open == 0
    batch.take(answer(batch.add(Request("a"))))
    batch.add(Request("a"))
    assert [batch.interrupt(Unavailable("gone"))[0] for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(Unavailable, match="for good"):
        batch.interrupt(Unavailable("for good"))


def test_requests_expire_each_at_its_time(clock) -> None:
    batch = Batch(POLICY, math.inf, clock, request_seconds=10.0)
    assert batch.seconds_until_expiry == math.inf
    answered = batch.add(Request("a"))
    batch.add(Request("b"))
    batch.take(answer(answered))
    clock.now += 6
    batch.add(Request("c"))
    assert batch.seconds_until_expiry == 4 and batch.expire() == []
    clock.now += 4
    [late] = batch.expire()
    assert (late.index, late.error.code, late.error.request_id != "") == (1, "DEADLINE_EXCEEDED", True)
    assert batch.seconds_until_expiry == 6 and batch.num_open == 1
    clock.now += 6
    assert [outcome.index for outcome in batch.expire()] == [2] and batch.seconds_until_expiry == math.inf


def test_a_refused_message_teaches_how_to_put_requests_together() -> None:
    too_large = TooLarge("no", max_bytes=1000)
    for largest, error, is_cured, is_bulk, max_bytes in (
        (10, Unimplemented("no"), True, False, MAX_BYTES),
        (10, Unavailable("no"), False, True, MAX_BYTES),
        (10, TooLarge("no", is_answer=True, max_bytes=100), False, True, MAX_BYTES),
        (10, too_large, True, True, 1000),
        (984, too_large, True, True, 1000),
        (985, too_large, True, False, MAX_BYTES),  # fits only without a message around it
        (1000, too_large, True, False, MAX_BYTES),
        (1001, too_large, False, True, 1000),
        (10, TooLarge("no", max_bytes=MAX_BYTES), False, True, MAX_BYTES),
        (10, TooLarge("no"), True, True, 0),
    ):
        grouping = Grouping()
        assert grouping.learn(error, largest, replace(grouping)) == is_cured
        assert grouping == Grouping(is_bulk, max_bytes)
        assert grouping.learn(error, largest, Grouping()) == is_cured, "a stream that began before"
        if is_cured and max_bytes in (0, MAX_BYTES):
            assert not grouping.learn(error, largest, replace(grouping))


def test_several_requests_go_in_a_message_up_to_a_count_and_a_size() -> None:
    request = generation_pb2.GenerateRequest(text="a")
    now, later = Sending(request), Sending(request, not_before=9.0)
    assert Grouping(is_bulk=False).message(now, waiting := deque([now]), 0.0) is request and len(waiting) == 1
    size = request.ByteSize()
    for following, max_bytes, num_sent in (
        ([now, later, now], MAX_BYTES, 2),
        ([now, None, now], MAX_BYTES, 2),
        ([now, now], 2 * size, 2),
        ([now, now], 2 * size - 1, 1),
        ([now, now], size - 1, 1),
        ([now] * 100, MAX_BYTES, MAX_REQUESTS),
        ([], MAX_BYTES, 1),
    ):
        message = Grouping(max_bytes=max_bytes).message(now, waiting := deque(following), 0.0)
        assert message == generation_pb2.GenerateBulkRequest(requests=[request] * num_sent)
        assert len(waiting) == len(following) + 1 - num_sent
    single = generation_pb2.GenerateBatchResponse(index=3)
    assert list(apart(single)) == list(apart(generation_pb2.GenerateBulkResponse(answers=[single]))) == [single]
    # Those in a message that is too large are sent again under the same ids.
    batch = Batch(RetryPolicy(max_attempts=1), math.inf, lambda: 0.0, grouping=Grouping())
    first = [batch.add(request) for request in asked("a", "b")]
    batch.begin_stream()
    wait, again = batch.interrupt(TooLarge("no", max_bytes=100))
    assert (wait, again) == (0, first)
