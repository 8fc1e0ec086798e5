import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dragoman.client.errors import CallError, Cancelled, InvalidArgument, Unavailable
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client

PATIENCE_SECONDS = 60


def test_scope_cancels_a_call_of_another_thread(client, service, held) -> None:
    behaviour = held()
    service.script.append(behaviour)
    with ThreadPoolExecutor() as threads, client.scope() as scope:
        call = threads.submit(client.generate, "x", request_id="r-1", scope=scope)
        behaviour.wait_until_began()
        scope.cancel()
        with pytest.raises(Cancelled) as caught:
            call.result(PATIENCE_SECONDS)
    assert caught.value.request_id == "r-1"
    behaviour.assert_cancelled()


def test_scope_that_has_ended_starts_nothing(client, service) -> None:
    with client.scope() as scope:
        client.generate("x", scope=scope)
    with pytest.raises(Cancelled):
        client.generate("y", scope=scope)
    with pytest.raises(Cancelled):
        client.stream("y", scope=scope)
    assert [request.text for request in service.requests] == ["x"]


def test_scope_leaves_other_calls_alone(client, service, held) -> None:
    behaviour = held()
    service.script.append(behaviour)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.generate, "x")
        behaviour.wait_until_began()
        client.scope().cancel()
        behaviour.let_go()
        assert call.result(PATIENCE_SECONDS).text == "X"


def test_close_cancels_what_runs(server, service, held) -> None:
    unary, streamed = held(), held("middle")
    service.script.extend([unary, streamed])
    client = Client(server.target)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.generate, "x")
        unary.wait_until_began()
        stream = client.stream("abcd")
        assert next(stream).text == "AB"
        streamed.wait_until_began()
        client.close()
        with pytest.raises(Cancelled):
            call.result(PATIENCE_SECONDS)
        with pytest.raises(Cancelled):
            next(stream)
    unary.assert_cancelled()
    streamed.assert_cancelled()


def test_closed_client_refuses_calls(server) -> None:
    client = Client(server.target)
    client.close()
    client.close()
    for call in (client.models, client.is_ready, lambda: client.generate("x"), lambda: client.stream("x")):
        with pytest.raises(Cancelled):
            call()


def test_close_ends_the_wait_for_another_attempt(server, service, failing) -> None:
    service.script.append(failing("UNAVAILABLE", retry_after=(50_000, 0)))
    is_waiting = threading.Event()

    def wait(event: threading.Event, seconds: float) -> None:
        is_waiting.set()
        assert event.wait(PATIENCE_SECONDS)

    client = Client(server.target, timeout_seconds=1e6, wait=wait)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.generate, "x")
        assert is_waiting.wait(PATIENCE_SECONDS)
        client.close()
        with pytest.raises(Cancelled):
            call.result(PATIENCE_SECONDS)
    assert len(service.requests) == 1


def test_interrupt_cancels_the_call(client, service, held, monkeypatch) -> None:
    behaviour = held()
    service.script.append(behaviour)
    real = client._stub.Generate.future

    class Interrupted:
        """A call whose waiter gets Ctrl-C."""

        def __init__(self, *args, **arguments) -> None:
            self.call = real(*args, **arguments)
            self.cancel = self.call.cancel

        def result(self) -> None:
            behaviour.wait_until_began()
            raise KeyboardInterrupt

    monkeypatch.setattr(client._stub.Generate, "future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.generate("x")
    behaviour.assert_cancelled()


def test_client_recovers_when_the_server_comes_back_on_its_port(server) -> None:
    policy = RetryPolicy(max_attempts=10_000, initial_backoff_seconds=0.02, multiplier=1, jitter=0)
    with Client(server.target, retry=RetryPolicy(max_attempts=1)) as hasty, Client(server.target, retry=policy) as patient:
        assert hasty.generate("one").text == "ONE"
        assert patient.generate("one").text == "ONE"
        server.stop()
        with pytest.raises(Unavailable):
            hasty.generate("two")
        with ThreadPoolExecutor() as threads:
            call = threads.submit(patient.generate, "three")
            server.start()
            assert call.result(PATIENCE_SECONDS).text == "THREE"


def test_client_does_not_wait_where_another_could_not_connect(server) -> None:
    settings = {"retry": RetryPolicy(max_attempts=1), "options": {"grpc.initial_reconnect_backoff_ms": 60_000}}
    server.stop()
    with Client(server.target, **settings) as early, Client(server.target, **settings) as late:
        with pytest.raises(Unavailable):
            early.generate("one")
        server.start()
        assert late.generate("two").text == "TWO"


def test_generate_many_reads_its_input_as_answers_are_taken(client) -> None:
    read = []

    def texts():
        for number in range(1000):
            read.append(number)
            yield str(number)

    answers = client.generate_many(texts(), concurrency=4)
    assert read == []
    for taken in range(1, 21):
        next(answers)
        assert len(read) <= taken + 8
    answers.close()


def test_generate_many_runs_calls_side_by_side(client, service, held) -> None:
    behaviours = [held() for _ in range(4)]
    service.script.extend(behaviours)
    with ThreadPoolExecutor() as threads:
        answers = threads.submit(list, client.generate_many(list("abcdefgh"), concurrency=4))
        for behaviour in behaviours:
            behaviour.wait_until_began()
        for behaviour in reversed(behaviours):
            behaviour.let_go()
        assert "".join(answer.text for answer in answers.result(PATIENCE_SECONDS)) == "ABCDEFGH"
    assert service.max_running == 4


def test_generate_many_fails_in_its_turn_and_cancels_the_rest(client, service, failing, held) -> None:
    stuck = held()

    def fail(context) -> None:
        stuck.wait_until_began()
        failing("INVALID_ARGUMENT", "text: blank")(context)

    service.behaviours = {"bad": fail, "stuck": stuck}
    answers = client.generate_many(["good", "bad", "stuck"], concurrency=3)
    assert next(answers).text == "GOOD"
    with pytest.raises(InvalidArgument, match="text: blank"):
        next(answers)
    stuck.assert_cancelled()


def test_dropped_generate_many_cancels_what_runs(client, service, held) -> None:
    stuck = held()
    service.behaviours = {"b": stuck}
    answers = client.generate_many(["a", "b"], concurrency=2)
    assert next(answers).text == "A"
    stuck.wait_until_began()
    del answers
    gc.collect()
    stuck.assert_cancelled()


def test_client_is_for_many_threads(client) -> None:
    with ThreadPoolExecutor(16) as threads:
        texts = [f"t{n}" for n in range(64)]
        assert [result.text for result in threads.map(client.generate, texts)] == [text.upper() for text in texts]


def test_error_keeps_grpcs_own_as_its_cause(client, service, failing) -> None:
    service.script.append(failing("INTERNAL", "incident 7"))
    with pytest.raises(CallError) as caught:
        client.generate("x")
    assert "StatusCode.INTERNAL" in repr(caught.value.__cause__)
