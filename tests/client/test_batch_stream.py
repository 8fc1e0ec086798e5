"""A batch through both clients, and what is the blocking one's own."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dragoman.client import errors
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.search import Search
from dragoman.client.sync import Client

PATIENCE_SECONDS = 60
PLAIN = {"retry": RetryPolicy(jitter=0.0)}


@pytest.fixture(autouse=True)
def _old_server(service) -> None:
    """What a server does that knows GenerateBatch only: a request a message. The other kind is in `test_bulk.py`."""
    service.has_bulk = False


def asked(*texts: str) -> list[Request]:
    return [Request(text, request_id=f"r-{i}") for i, text in enumerate(texts)]


def by_place(outcomes) -> list[str]:
    """Texts of results and codes of errors, in the order of the input."""
    assert sorted(outcome.index for outcome in outcomes) == list(range(len(outcomes)))
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    return [outcome.result.text if outcome.error is None else outcome.error.code for outcome in ordered]


def test_every_request_has_one_outcome(call, service) -> None:
    texts = [f"text {n}" for n in range(300)]
    outcomes = call("generate_batch", asked(*texts), concurrency=16)
    assert by_place(outcomes) == [text.upper() for text in texts]
    assert [len(seen) for seen in service.batches] == [300]
    assert all(outcome.request.text == texts[outcome.index] for outcome in outcomes)
    assert all(outcome.result.request_id == f"r-{outcome.index}" for outcome in outcomes)


def test_outcomes_come_as_they_are_there(call) -> None:
    outcomes = call("generate_batch", asked("late", "b", "late too", "d"))
    assert [outcome.index for outcome in outcomes] == [1, 0, 3, 2]


def test_each_request_carries_what_is_asked_of_it(call, service) -> None:
    requests = [
        Request("x", model="en-fr", max_new_tokens=7, truncate=True, priority=4, search=Search(num_beams=2)),
        Request("y"),
    ]
    call("generate_batch", requests)
    first, second = service.batches[0]
    assert (first.text, first.model, first.max_new_tokens, first.truncate) == ("x", "en-fr", 7, True)
    assert (first.priority, first.num_beams) == (4, 2)
    assert {field.name for field, _ in second.ListFields()} == {"text", "request_id"}
    assert first.request_id != second.request_id


def test_batch_of_nothing_asks_nothing(call, service) -> None:
    assert call("generate_batch", []) == []
    assert service.batches == []


def test_batch_needs_a_place(call) -> None:
    with pytest.raises(ValueError, match=r"^concurrency: 0 is"):
        call("generate_batch", asked("a"), concurrency=0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_impossible_timeout_is_refused(call, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout_seconds: "):
        call("generate_batch", asked("a"), timeout_seconds=seconds)


def test_bad_request_fails_alone(call, service, refusing) -> None:
    service.refusals["bad"] = [refusing("INVALID_ARGUMENT", "text: too long")]
    outcomes = call("generate_batch", asked("a", "bad", "\udcff", "b"))
    assert by_place(outcomes) == ["A", "INVALID_ARGUMENT", "INVALID_ARGUMENT", "B"]
    [bad] = [outcome for outcome in outcomes if outcome.index == 1]
    assert isinstance(bad.error, errors.InvalidArgument)
    assert (bad.error.message, bad.error.request_id) == ("text: too long", "r-1")


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_passing_failure_of_one_request_is_tried_again_on_the_same_stream(call, service, refusing, clock, code: str) -> None:
    service.refusals["busy"] = [refusing(code), refusing(code, retry_after=(7, 0))]
    assert by_place(call("generate_batch", asked("a", "busy", "b"), options=PLAIN)) == ["A", "BUSY", "B"]
    [seen] = service.batches
    assert [request.text for request in seen].count("busy") == 3
    assert len({request.request_id for request in seen}) == 5
    assert clock.waits == [pytest.approx(0.1), pytest.approx(7.0)]


def test_attempts_of_one_request_run_out(call, service, refusing) -> None:
    service.refusals["busy"] = [refusing("RESOURCE_EXHAUSTED", f"queue: full {n}") for n in range(9)]
    [busy] = call("generate_batch", asked("busy"), options=PLAIN)
    assert isinstance(busy.error, errors.Overloaded) and busy.error.message == "queue: full 4"
    assert len(service.batches[0]) == 5


def test_broken_stream_is_opened_anew_for_what_is_unanswered(call, service, failing, clock) -> None:
    service.breaks.extend([(3, failing("UNAVAILABLE", retry_after=(2, 0))), (2, failing("UNAVAILABLE"))])
    texts = [f"text {n}" for n in range(10)]
    outcomes = call("generate_batch", asked(*texts), concurrency=4, options=PLAIN)
    assert by_place(outcomes) == [text.upper() for text in texts]
    assert len(service.batches) == 3
    assert clock.waits == [2.0, pytest.approx(0.1)]


def test_streams_that_keep_breaking_end_the_batch(call, service, failing, clock) -> None:
    service.breaks.extend([(0, failing("UNAVAILABLE", f"down {n}")) for n in range(9)])
    with pytest.raises(errors.Unavailable, match="down 4"):
        call("generate_batch", asked("a", "b"), options=PLAIN)
    assert len(service.batches) == 5
    assert clock.waits == [pytest.approx(wait) for wait in (0.1, 0.2, 0.4, 0.8)]


def test_server_that_is_gone_is_unavailable(call, server) -> None:
    server.stop()
    with pytest.raises(errors.Unavailable):
        call("generate_batch", asked("a"), options=PLAIN)


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "INTERNAL", "UNIMPLEMENTED"])
def test_final_failure_of_the_stream_ends_the_batch(call, service, failing, clock, code: str) -> None:
    service.breaks.append((0, failing(code)))
    with pytest.raises(errors.CallError) as caught:
        call("generate_batch", asked("a"))
    assert caught.value.code == code
    assert clock.waits == []


def test_stream_that_ends_too_early_is_an_error(call, service) -> None:
    service.breaks.append((1, lambda context: None))
    with pytest.raises(errors.InternalError, match="1 requests unanswered"):
        call("generate_batch", asked("a", "b"), concurrency=1)


def test_failure_after_the_last_answer_does_not_matter(call, service, failing) -> None:
    service.breaks.append((1, failing("UNAVAILABLE")))
    assert by_place(call("generate_batch", asked("a"))) == ["A"]
    assert len(service.batches) == 1


def test_time_of_the_batch_is_the_streams_deadline(call, service) -> None:
    call("generate_batch", asked("a"), timeout_seconds=1000.0)
    call("generate_batch", asked("a"))
    assert 900 < service.seconds_left[0] < 1100
    assert service.seconds_left[1] > 1e9, "none"


def test_batch_out_of_time_ends(call, service, held) -> None:
    service.behaviours["stuck"] = held()
    with pytest.raises(errors.DeadlineExceeded):
        call("generate_batch", asked("stuck"), timeout_seconds=0.2)


def test_token_is_sent_with_a_batch(call, service) -> None:
    call("generate_batch", asked("a"), options={"token": "s3cret"})
    assert service.metadata[0]["authorization"] == "Bearer s3cret"


def test_input_that_fails_is_told_after_what_came_before_it(call, service) -> None:
    taken = []

    def requests():
        for request in asked("a", "b"):
            taken.append(request)
            yield request
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        call("generate_batch", requests())
    assert [request.text for request in service.batches[0]] == ["a", "b"]


def test_input_is_read_as_outcomes_are_taken(client) -> None:
    read = []

    def requests():
        for number in range(1000):
            read.append(number)
            yield Request(str(number))

    outcomes = client.generate_batch(requests(), concurrency=4)
    assert read == []
    for taken in range(1, 21):
        next(outcomes)
        assert len(read) <= taken + 4
    outcomes.close()


def test_outcome_that_is_there_comes_before_the_next_request_is_read(client) -> None:
    is_answered = threading.Event()

    def requests():
        yield Request("a")
        assert is_answered.wait(PATIENCE_SECONDS)
        yield Request("b")

    with ThreadPoolExecutor() as threads:
        outcomes = client.generate_batch(requests(), concurrency=1)
        assert threads.submit(next, outcomes).result(PATIENCE_SECONDS).result.text == "A"
        is_answered.set()
        assert [outcome.result.text for outcome in outcomes] == ["B"]


@pytest.mark.parametrize("how", ["drop", "close", "scope", "client"])
def test_batch_that_is_left_is_cancelled(server, service, held, how: str) -> None:
    stuck = held()
    service.behaviours["stuck"] = stuck
    with Client(server.target) as client, client.scope() as scope:
        outcomes = client.generate_batch(asked("a", "stuck"), scope=scope)
        assert next(outcomes).result.text == "A"
        stuck.wait_until_began()
        if how == "drop":
            del outcomes
            gc.collect()
        elif how == "close":
            outcomes.close()
        else:
            end = scope.cancel if how == "scope" else client.close
            end()
            with pytest.raises(errors.Cancelled):
                next(outcomes)
        stuck.assert_cancelled()


def test_closed_client_refuses_a_batch(server) -> None:
    client = Client(server.target)
    client.close()
    with pytest.raises(errors.Cancelled):
        next(client.generate_batch(asked("a")))


def test_batch_leaves_no_threads_behind(client, service, failing, monkeypatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    service.breaks.append((1, failing("UNAVAILABLE")))
    assert len(list(client.generate_batch(asked("a", "b")))) == 2
    of_streams = [thread for thread in started if "batch" in thread.name or "consume" in thread.name]
    assert sum("batch" in thread.name for thread in of_streams) == 3  # the refused stream's, the broken one's and its successor's
    for thread in of_streams:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
