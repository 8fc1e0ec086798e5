"""Several servers behind one client: calls are balanced, and one that goes, however it goes, costs nobody an answer."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.callers import CALL_SECONDS, RETRYING, Caller, Callers, Outcome, outcome
from tests.system.harness.server import ROOT, Server, serving

pytestmark = pytest.mark.e2e

FLAGS = ("--num-threads", "1", "--max-connection-age-seconds", "2")


def documented_options() -> list[tuple[str, Any]]:
    """Return the options with gRPC's own retries that docs/kubernetes.md gives to clients of other languages."""
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    (config,) = [block for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if "retryPolicy" in block]
    return [("grpc.use_local_subchannel_pool", 1), ("grpc.service_config", json.dumps(json.loads(config)))]


async def configured(caller: Caller, model: str, text: str) -> list[Outcome]:
    """Ask as a client of another language does, on a channel for a few calls."""
    async with aio.insecure_channel(caller.address, documented_options()) as channel:
        stub: Any = GenerationStub(channel)
        request = GenerateRequest(model=model, text=text, **caller.options)
        return [outcome(await stub.Generate(request, timeout=CALL_SECONDS)) for _ in range(20)]


async def streaming(caller: Caller, model: str, text: str) -> list[Outcome]:
    pieces = [piece async for piece in caller.client.stream(text, model=model, **caller.options)]
    return [("", "".join(piece.text for piece in pieces))]


def num_answered(server: Server) -> float:
    return server.metric("dragoman_request_success_total")


def test_no_call_fails_while_replicas_are_restarted_one_after_another_and_one_is_killed(endless: Path) -> None:
    """Neither with the Python client nor with gRPC's own retries; of streams, only those cut in the middle by the kill."""
    bundle = endless / "alpha"
    with ExitStack() as stack:
        replicas = [stack.enter_context(serving(bundle, *FLAGS)) for _ in range(3)]
        target = "ipv4:" + ",".join(server.address for server in replicas)
        kinds = RETRYING | {"configured": configured, "stream": streaming}
        callers = stack.enter_context(Callers(target, kinds=kinds, num=6, max_new_tokens=20))
        callers.wait_for_more(150)
        shares = [num_answered(server) for server in replicas]
        assert min(shares) > 0.2 * sum(shares), f"not balanced: {shares}"
        for number in (0, 1):
            port = replicas[number].address.rpartition(":")[2]
            assert replicas[number].terminate() == 0
            callers.wait_for_more(60)
            replicas[number] = stack.enter_context(serving(bundle, *FLAGS, "--port", port))
            callers.wait_for_more(60)
        assert callers.failures == []
        replicas[2].process.kill()
        replicas[2].wait()
        callers.wait_for_more(60)
        before = [num_answered(server) for server in replicas[:2]]
        callers.wait_for_more(300)
        assert all(num_answered(server) > count for server, count in zip(replicas, before, strict=False))
        callers.stop()
        assert {failure.kind for failure in callers.failures} <= {"stream"}
        assert callers.statuses.keys() <= {"UNAVAILABLE"} and len(callers.failures) <= 6
        assert callers.answered_differently() == []
        assert [server.terminate() for server in replicas[:2]] == [0, 0]
