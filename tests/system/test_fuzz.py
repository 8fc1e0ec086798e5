"""Messages to each gRPC method of a running server, mostly wrong: it answers each as documented and stays as it was.

Some hundred, or 10,000 with `TEST_LONG=1`. `TEST_FUZZ_SEED` chooses them, a failure prints them, `TEST_FUZZ_CASE` sends one alone.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from dragoman.v1.generation_pb2 import GenerateBatchResponse, GenerateBulkResponse
from tests.system.fuzz.cases import Case, cases, make_case, methods
from tests.system.fuzz.oracle import Ending, complaints, send
from tests.system.harness.callers import connection, unharmed
from tests.system.harness.server import LONG, Server, serving

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("TEST_FUZZ_SEED", "16"))
NUM_MESSAGES = 10_000 if LONG else 600
# Sent before anything is measured: pools of threads, arenas and caches grow to what they need once.
NUM_WARMUP_MESSAGES = NUM_MESSAGES // 3
COUNTED = ("Generate", "GenerateStream", "GenerateBatch", "GenerateBulk", "Score")
UNCOUNTED = ("ListModels", "GetModel", "Check", "Watch", "ServerReflectionInfo")
BLAMED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
# With these a call may have ended for its caller before the server's answer came, or gRPC ended it before the server saw it.
LEFT = [grpc.StatusCode[name] for name in ("CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")]


def test_no_message_does_any_harm(short: Path) -> None:
    with serving(short, "--max-slots", "16") as server:
        # The Open Inference Protocol has a fuzzer of its own.
        with connection(server) as channel:
            question = ServerReflectionRequest(list_services="")
            [response] = ServerReflectionStub(channel).ServerReflectionInfo(iter([question]), timeout=60)
        services = [service.name for service in response.list_services_response.service]
        known = methods([name for name in services if not name.startswith("inference.")])
        assert {method.name for method in known.values()} >= {*COUNTED, *UNCOUNTED}
        send(server.address, cases(SEED + 1, known, NUM_WARMUP_MESSAGES))
        with unharmed(server):
            before = refused(server)
            chosen = os.environ.get("TEST_FUZZ_CASE")
            sent = cases(SEED, known, NUM_MESSAGES) if chosen is None else [make_case(SEED, int(chosen), known)]
            endings = send(server.address, sent)
            server.wait_until_idle()
            problems = wrong_endings(endings) + wrong_counts(refused(server) - before, endings)
            if problems:
                pytest.fail(f"seed {SEED}, {NUM_MESSAGES} messages:\n" + "\n".join(problems), pytrace=False)


def wrong_endings(endings: list[tuple[Case, Ending]]) -> list[str]:
    """Return what is wrong with how calls ended, each kind of it once."""
    kinds: dict[tuple[str, str], str] = {}
    for case, ending in endings:
        for complaint in complaints(case, ending):
            kinds.setdefault((case.path, complaint[:40]), f"{complaint}\n  {case.describe()[:2000]}")
    return list(kinds.values())


def wrong_counts(counted: Counter[grpc.StatusCode], endings: list[tuple[Case, Ending]]) -> list[str]:
    """Return where the server's counts are not what callers saw; a caller that left first saw another ending."""
    problems = []
    for code in BLAMED:
        at_least = at_most = 0
        for case, ending in endings:
            if case.name not in COUNTED:
                continue
            num_seen = (ending.code is code) + [item.error.code for item in batch_items(case, ending)].count(code.value[0])
            at_least += num_seen
            at_most += max(1, num_requests(case)) if ending.code in LEFT else num_seen
        if not at_least <= counted[code] <= at_most:
            problems.append(f"{code.name}: the server counted {counted[code]}, callers saw {at_least} to {at_most}")
    return problems


def batch_items(case: Case, ending: Ending) -> list[Any]:
    match case.name:
        case "GenerateBatch":
            return [GenerateBatchResponse.FromString(data) for data in ending.answers]
        case "GenerateBulk":
            return [item for data in ending.answers for item in GenerateBulkResponse.FromString(data).answers]
        case _:
            return []


def num_requests(case: Case) -> int:
    """Return how many requests a case has at the most; each of several in a message takes two bytes at least."""
    if case.name != "GenerateBulk":
        return len(case.messages)
    return sum(max(1, len(data) // 2) for data in case.messages)


def refused(server: Server) -> Counter[grpc.StatusCode]:
    """Return the failures that a caller's message is to blame for, by status."""
    return Counter({code: int(server.metric("dragoman_requests_failed_total", code=code.name)) for code in BLAMED})
