"""Several requests in a message: how they are put together, and servers that do not take them so."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from dragoman.client import errors
from dragoman.client.aio import AsyncClient
from dragoman.client.batch import Batch, Sending
from dragoman.client.errors import DeadlineExceeded, TooLarge, Unavailable, Unimplemented
from dragoman.client.grouping import MAX_BYTES, MAX_REQUESTS, Grouping, apart, together
from dragoman.client.many import InOrder
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client
from dragoman.v1 import generation_pb2

PLAIN = {"retry": RetryPolicy(jitter=0.0)}


def asked(*texts: str) -> list[Request]:
    return [Request(text, request_id=f"r-{i}") for i, text in enumerate(texts)]


def by_place(outcomes) -> list[str]:
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    return [outcome.result.text if outcome.error is None else outcome.error.code for outcome in ordered]


def test_requests_that_wait_go_together(call, service) -> None:
    texts = [f"text {i}" for i in range(300)]
    assert by_place(call("generate_batch", asked(*texts), concurrency=200)) == [text.upper() for text in texts]
    [sizes] = service.messages
    assert sum(sizes) == 300 and max(sizes) <= MAX_REQUESTS and len(sizes) < 300
    assert [request.text for request in service.batches[0]] == texts


def test_a_large_request_goes_alone(call, service) -> None:
    large = "x" * (MAX_BYTES + 1)
    assert by_place(call("generate_batch", asked("a", large, "b"))) == ["A", large.upper(), "B"]
    [sizes] = service.messages
    assert sum(sizes) == 3 and len(sizes) >= 2


def test_each_request_fails_alone(call, service, failing) -> None:
    service.behaviours = {"bad": failing("INVALID_ARGUMENT", "text: blank")}
    assert by_place(call("generate_batch", asked("a", "bad", "b"))) == ["A", "INVALID_ARGUMENT", "B"]
    assert len(service.batches) == 1


def test_refused_request_is_tried_again_on_the_same_stream(call, service, refusing, clock) -> None:
    service.refusals["busy"] = [refusing("UNAVAILABLE"), refusing("RESOURCE_EXHAUSTED", retry_after=(7, 0))]
    assert by_place(call("generate_batch", asked("a", "busy", "b"), options=PLAIN)) == ["A", "BUSY", "B"]
    assert len(service.batches) == 1 and clock.waits == [pytest.approx(0.1), pytest.approx(7.0)]


def test_what_a_broken_stream_left_goes_on_the_next(call, service, failing) -> None:
    service.breaks.append((2, failing("UNAVAILABLE")))
    texts = [f"t{i}" for i in range(20)]
    assert by_place(call("generate_batch", asked(*texts), options=PLAIN)) == [text.upper() for text in texts]
    assert len(service.batches) == 2


def test_an_old_server_gets_one_request_a_message_and_is_asked_once(server, service) -> None:
    service.has_bulk = False
    with Client(server.target, retry=RetryPolicy(max_attempts=1)) as client:
        for _ in range(2):
            assert by_place(client.generate_batch(asked("a", "b"))) == ["A", "B"]
        assert [result.text for result in client.generate_many(["a", "", "b"])] == ["A", "", "B"]
    assert service.messages == [] and [len(seen) for seen in service.batches] == [2, 2, 2]


def test_an_old_server_is_asked_once_by_tasks_too(server, service, running_async) -> None:
    service.has_bulk = False

    async def main() -> None:
        async with AsyncClient(server.target, retry=RetryPolicy(max_attempts=1)) as client:
            for _ in range(2):
                assert by_place([outcome async for outcome in client.generate_batch(asked("a", "b"))]) == ["A", "B"]

    running_async(main)
    assert service.messages == [] and len(service.batches) == 2


def test_a_server_with_neither_kind_of_stream_is_an_error(server, service, monkeypatch) -> None:
    service.has_bulk = False
    monkeypatch.setattr(service, "GenerateBatch", lambda _, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "no"))
    server.stop()
    server.start()
    with Client(server.target) as client, pytest.raises(Unimplemented):
        list(client.generate_batch(asked("a")))


def test_a_client_that_takes_small_messages_only_asks_for_single_ones(call, service) -> None:
    options = {"options": {"grpc.max_receive_message_length": 4096}}
    assert by_place(call("generate_batch", asked("a", "b"), options=options)) == ["A", "B"]
    assert service.messages == [] and len(service.batches) == 1


def test_a_text_that_is_not_answered_in_its_time_ends_the_many(server, service, held, running_async) -> None:
    stuck = held()
    service.behaviours = {"stuck": stuck}
    with Client(server.target, timeout_seconds=0.2) as client:
        answers = client.generate_many(["a", "stuck", "b"])
        assert next(answers).text == "A"
        with pytest.raises(DeadlineExceeded, match=r"^not answered within 0.2 s$"):
            next(answers)
    stuck.assert_cancelled()

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            with pytest.raises(DeadlineExceeded):
                [result async for result in client.generate_many(["stuck"], timeout_seconds=0.2)]

    service.behaviours = {"stuck": held()}
    running_async(main)


def test_many_are_sent_on_one_stream(call, service) -> None:
    texts = [f"text {i}" for i in range(100)]
    assert [result.text for result in call("generate_many", texts, concurrency=50)] == [text.upper() for text in texts]
    [sizes] = service.messages
    assert sum(sizes) == 100


def test_many_threads_share_what_was_learnt(server, service) -> None:
    service.has_bulk = False
    with Client(server.target) as client, ThreadPoolExecutor(8) as threads:
        for outcomes in threads.map(lambda _: list(client.generate_batch(asked("a"))), range(16)):
            assert by_place(outcomes) == ["A"]


class TestGrouping:
    def test_an_old_server_is_learnt_once(self) -> None:
        grouping = Grouping()
        used = replace(grouping)
        assert grouping.learn(Unimplemented("no"), 10, used) and not grouping.is_bulk
        assert grouping.learn(Unimplemented("no"), 10, used), "a stream that began before that was learnt"
        assert not grouping.learn(Unimplemented("no"), 10, replace(grouping))

    def test_other_failures_teach_nothing(self) -> None:
        grouping = Grouping()
        assert not grouping.learn(Unavailable("no"), 10, replace(grouping))
        assert not grouping.learn(TooLarge("no", is_answer=True, max_bytes=100), 10, replace(grouping))
        assert grouping == Grouping()

    def test_a_server_that_takes_less_gets_smaller_messages(self) -> None:
        grouping = Grouping()
        assert grouping.learn(TooLarge("no", max_bytes=1000), 900, replace(grouping))
        assert grouping.is_bulk and grouping.takes(2, 1000) and not grouping.takes(2, 1001) and grouping.takes(1, 10**9)

    def test_a_request_that_is_too_large_by_itself_is_not_cured(self) -> None:
        grouping = Grouping()
        assert not grouping.learn(TooLarge("no", max_bytes=1000), 1001, replace(grouping))
        assert not grouping.takes(2, 1001)

    def test_a_request_that_just_fits_goes_without_what_would_be_around_it(self) -> None:
        grouping = Grouping()
        assert grouping.learn(TooLarge("no", max_bytes=1000), 999, replace(grouping)) and not grouping.is_bulk

    def test_where_nobody_says_the_limit_each_goes_alone_then_none_is_cured(self) -> None:
        grouping = Grouping()
        assert grouping.learn(TooLarge("no"), 10, replace(grouping))
        assert grouping.is_bulk and not grouping.takes(2, 2)
        assert not grouping.learn(TooLarge("no"), 10, replace(grouping))

    def test_messages_of_one_are_of_the_single_kind(self) -> None:
        request = generation_pb2.GenerateRequest(text="a")
        assert together([request], is_bulk=False) is request
        bulk = together([request, request], is_bulk=True)
        assert isinstance(bulk, generation_pb2.GenerateBulkRequest) and len(bulk.requests) == 2
        answer = generation_pb2.GenerateBatchResponse(index=3)
        assert list(apart(answer)) == list(apart(generation_pb2.GenerateBulkResponse(answers=[answer]))) == [answer]


def test_what_was_refused_for_its_company_is_sent_again_under_the_same_ids(clock) -> None:
    batch = Batch(RetryPolicy(max_attempts=1), math.inf, clock, grouping=Grouping())
    first = [batch.add(request) for request in asked("a", "b")]
    batch.begin_stream()
    wait, again = batch.interrupt(TooLarge("no", max_bytes=100))
    assert wait == 0 and all(isinstance(step, Sending) for step in again)
    assert [step.message.request_id for step in again] == [step.message.request_id for step in first]


def test_requests_have_their_own_time(clock) -> None:
    batch = Batch(PLAIN["retry"], math.inf, clock, request_seconds=10.0)
    batch.add(Request("a"))
    clock.now += 6
    batch.add(Request("b"))
    assert batch.seconds_until_expiry == 4 and batch.expire() == []
    clock.now += 4
    [late] = batch.expire()
    assert (late.index, late.error.code) == (0, "DEADLINE_EXCEEDED") and batch.seconds_until_expiry == 6


def test_what_was_answered_does_not_expire(clock) -> None:
    batch = Batch(PLAIN["retry"], math.inf, clock, request_seconds=10.0)
    message = batch.add(Request("a")).message
    clock.now += 6
    batch.add(Request("b"))
    response = generation_pb2.GenerateResponse(finish_reason=generation_pb2.FINISH_REASON_EOS)
    batch.take(generation_pb2.GenerateBatchResponse(request_id=message.request_id, response=response))
    clock.now += 4
    assert batch.expire() == [] and batch.seconds_until_expiry == 6
    clock.now += 6
    assert [outcome.index for outcome in batch.expire()] == [1] and batch.seconds_until_expiry == math.inf


def test_results_wait_for_those_before_them(clock) -> None:
    batch, order = Batch(PLAIN["retry"], math.inf, clock, is_blank_answered=True), InOrder(2)
    outcomes = [batch.add(Request(" ")) for _ in range(4)]
    order.num_read = 4
    assert not order.has_room
    assert [len(list(order.put(outcomes[i]))) for i in (1, 0, 3, 2)] == [0, 2, 0, 2]
    assert order.has_room


def test_first_failure_in_order_ends_the_results(call, service, failing) -> None:
    service.behaviours = {"bad": failing("NOT_FOUND")}
    with pytest.raises(errors.ModelNotFound):
        call("generate_many", ["a", "bad", "c"])
