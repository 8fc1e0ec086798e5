"""GenerateBatch over a real connection, with real engines."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.search import Search
from dragoman.client.sync import Client
from dragoman.v1 import generation_pb2, generation_pb2_grpc
from tests.system.harness.server import wait_until

pytestmark = pytest.mark.e2e

NO_RETRY = RetryPolicy(max_attempts=1)


def ask(request_id: str, text: str = "a dog runs", **fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(request_id=request_id, text=text, **fields)


def test_good_bad_and_repeated_requests_are_answered_each_for_itself(serve: Any, endless: Path) -> None:
    requests = [
        *(ask(f"good {i}", model=("alpha", "beta")[i % 2], max_new_tokens=1 + i) for i in range(150)),
        ask("blank", " ", model="alpha"),
        ask("lost", model="gamma"),
        ask("wide", model="beta", num_beams=1000),
        ask("", model="alpha"),
        ask("good 7", model="alpha"),
    ]
    with serve(endless) as server, grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        responses = list(stub.GenerateBatch(iter(requests)))
        good = {r.request_id: r.response for r in responses if r.WhichOneof("outcome") == "response"}
        bad = sorted((r.request_id, r.error.code, r.error.message.partition(":")[0]) for r in responses if r.HasField("error"))
        assert {name: answer.usage.generated_tokens for name, answer in good.items()} == {f"good {i}": i + 1 for i in range(150)}
        invalid, missing = (code.value[0] for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND))
        assert bad == [
            ("", invalid, "request_id"),
            ("blank", invalid, "text"),
            ("good 7", invalid, "request_id"),
            ("lost", missing, "model"),
            ("wide", invalid, "num_beams"),
        ]
        alone = stub.Generate(ask("good 149", model="beta", max_new_tokens=150))
        assert (alone.tokens, alone.answers) == (good["good 149"].tokens, good["good 149"].answers)
        assert server.metric("dragoman_request_success_total") == 151
        assert server.metric("dragoman_requests_failed_total") == 5
        assert server.terminate() == 0
        items = [event for event in server.events if event["event"] == "item"]
        assert len(items) == 155 and len({event["batch_id"] for event in items}) == 1


def test_cancelled_stream_gives_its_slots_back(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha", "--max-slots", "4") as server, Client(server.address) as client:
        requests = [
            Request("a dog runs", max_new_tokens=1),
            *(Request("a dog runs", max_new_tokens=1000, search=Search(num_beams=1 + i % 4)) for i in range(7)),
        ]
        outcomes = client.generate_batch(requests)
        assert next(outcomes).result.usage.generated_tokens == 1

        def num_accepted() -> float:
            return server.metric("dragoman_num_requests_running") + server.metric("dragoman_num_requests_waiting")

        wait_until(lambda: num_accepted() == 7 and server.metric("dragoman_slots_in_use") > 0, "the others decode or wait")
        outcomes.close()
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "no slot is in use")
        assert server.metric("dragoman_num_requests_waiting") == 0
        assert server.metric("dragoman_requests_failed_total", model="alpha", code="CANCELLED") == 7
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        assert server.terminate() == 0


def test_a_full_queue_refuses_requests_of_a_batch_one_by_one(serve: Any, endless: Path) -> None:
    """Beside others, a stream's requests can be too many; the client's retries hide it."""
    flags = ("--max-slots", "4", "--max-waiting-requests", "2")
    with serve(endless / "alpha", *flags) as server, Client(server.address, retry=NO_RETRY) as hasty:
        requests = [Request("a dog runs", max_new_tokens=200) for _ in range(40)]
        errors = [outcome.error for outcome in hasty.generate_batch(requests) if outcome.error is not None]
        assert errors and {error.code for error in errors} == {"RESOURCE_EXHAUSTED"}
        assert all(error.retry_after_seconds > 0 for error in errors)
        with Client(server.address, retry=RetryPolicy(max_attempts=1000)) as patient:
            outcomes = list(patient.generate_batch(requests))
        assert sorted(outcome.index for outcome in outcomes) == list(range(40))
        assert {outcome.result.usage.generated_tokens for outcome in outcomes if outcome.result is not None} == {200}
        assert all(outcome.error is None for outcome in outcomes)
        assert server.terminate() == 0


def test_batch_survives_the_death_of_an_engine(serve: Any, endless: Path) -> None:
    flags = ("--restart-backoff-initial-seconds", "0.1")
    patience = RetryPolicy(max_attempts=100)
    with serve(endless / "alpha", *flags) as server, Client(server.address, retry=patience) as client:
        [pid] = {event["engine_pid"] for event in server.events if event["event"] == "engine ready"}
        requests = [Request("a dog runs", max_new_tokens=300) for _ in range(30)]
        outcomes = client.generate_batch(requests)
        killer = threading.Thread(target=kill_once_busy, args=(server, pid))
        killer.start()
        counts = [outcome.result.usage.generated_tokens for outcome in outcomes if outcome.result is not None]
        killer.join()
        assert counts == [300] * 30
        assert server.metric("dragoman_engine_restarts_total") == 1
        assert server.terminate() == 0


def kill_once_busy(server: Any, pid: int) -> None:
    """Kill an engine that has something to do."""
    wait_until(lambda: server.metric("dragoman_num_requests_running") > 0, "the engine is busy")
    os.kill(pid, signal.SIGKILL)


def test_draining_server_answers_what_it_has_read(serve: Any, endless: Path) -> None:
    """A client that has not sent everything is told with the stream's end that the rest was not looked at."""
    is_over = threading.Event()

    def requests() -> Iterator[generation_pb2.GenerateRequest]:
        yield from (ask(f"r{i}", max_new_tokens=300) for i in range(20))
        is_over.wait(60)

    with serve(endless / "alpha") as server, grpc.insecure_channel(server.address) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).GenerateBatch(requests())
        wait_until(lambda: server.metric("dragoman_requests_admitted_total") == 20, "all have been read")
        server.process.terminate()
        received = []
        with pytest.raises(grpc.RpcError) as caught:
            for response in call:
                received.append(response.response.usage.generated_tokens)
        is_over.set()
        assert received == [300] * 20
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait() == 0
