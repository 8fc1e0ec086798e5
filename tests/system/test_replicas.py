"""Several servers behind one client: calls are balanced, and one that goes, however it goes, costs nobody an answer."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.client.sync import Client
from dragoman.v1 import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
NUM_CALLERS = 6


@pytest.fixture
def replicas(serve: Any, endless: Path) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        flags = ("--num-threads", "1", "--warmup", "false", "--max-connection-age-seconds", "2")
        yield [stack.enter_context(serve(endless / "alpha", *flags)) for _ in range(3)]


@contextmanager
def callers(ask: Callable[[], object]) -> Iterator[list[object]]:
    """Have several threads ask all the time, meanwhile; what fails is raised in the end."""
    is_over, answers = threading.Event(), []

    def run() -> None:
        while not is_over.is_set():
            answers.append(ask())

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        futures = [pool.submit(run) for _ in range(NUM_CALLERS)]
        try:
            yield answers
        finally:
            is_over.set()
        for future in futures:
            future.result()


def wait_for_more(answers: list[object], count: int) -> None:
    wanted, pause = len(answers) + count, threading.Event()
    for _ in range(6000):
        if len(answers) >= wanted:
            return
        pause.wait(0.01)
    raise AssertionError(f"only {len(answers)} of {wanted} answers came")


def num_answered(server: Any) -> float:
    return float(server.metric("dragoman_request_success_total"))


def target(replicas: list[Any]) -> str:
    return "ipv4:" + ",".join(server.address for server in replicas)


def test_no_call_fails_while_one_replica_is_killed_and_another_drains(replicas: list[Any]) -> None:
    killed, drained, left = replicas
    with Client(target(replicas)) as client:
        with callers(lambda: client.generate("a dog runs", max_new_tokens=20).finish_reason) as answers:
            wait_for_more(answers, 100)
            shares = [num_answered(server) for server in replicas]
            assert min(shares) > 0.2 * sum(shares), f"not balanced: {shares}"
            killed.process.kill()
            killed.wait()
            wait_for_more(answers, 60)
            assert drained.terminate() == 0
            before = num_answered(left)
            wait_for_more(answers, 60)
            assert num_answered(left) > before
        assert set(answers) == {"length"}
    assert left.terminate() == 0


def test_a_client_of_another_language_loses_no_call_with_the_documented_service_config(replicas: list[Any]) -> None:
    """With the retries of gRPC itself and nothing else, by the configuration that docs/kubernetes.md gives."""
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    (config,) = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if "retryPolicy" in block]
    options = [("grpc.service_config", json.dumps(config))]
    with grpc.insecure_channel(target(replicas), options) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(text="a dog runs", max_new_tokens=20)
        with callers(lambda: stub.Generate(request, timeout=30).finish_reason) as answers:
            wait_for_more(answers, 100)
            replicas[0].process.kill()
            replicas[0].wait()
            wait_for_more(answers, 60)
            assert replicas[1].terminate() == 0
            wait_for_more(answers, 60)
        assert set(answers) == {generation_pb2.FINISH_REASON_LENGTH}
