"""Messages over gRPC and over HTTP, mostly wrong: the server answers each as documented, tells nothing, and stays as it was.

Some hundred, or 10,000 of each with `TEST_LONG=1`. `TEST_FUZZ_SEED` chooses them, a failure prints them, `TEST_FUZZ_CASE` sends one
of gRPC alone. Messages over HTTP are made of the served OpenAPI document; bytes that are no HTTP are in `test_http.py`.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.system.fuzz.cases import Case, cases, make_case, methods
from tests.system.fuzz.oracle import Ending, complaints, send
from tests.system.harness.callers import connection, generate, unharmed
from tests.system.harness.server import LONG, ROOT, serving

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("TEST_FUZZ_SEED", "16"))
NUM_MESSAGES = 10_000 if LONG else 600
# Sent before anything is measured: pools of threads, arenas and caches grow to what they need once.
NUM_WARMUP_MESSAGES = NUM_MESSAGES // 3


def test_no_message_does_any_harm(short: Path) -> None:
    with serving(short, "--max-slots", "16") as server:
        # The Open Inference Protocol has a fuzzer of its own.
        with connection(server) as channel:
            question = ServerReflectionRequest(list_services="")
            [response] = ServerReflectionStub(channel).ServerReflectionInfo(iter([question]), timeout=60)
        services = [service.name for service in response.list_services_response.service]
        known = methods([name for name in services if not name.startswith("inference.")])
        assert {method.name for method in known.values()} >= {"Generate", "GenerateBulk", "Score", "Watch", "ServerReflectionInfo"}
        send(server.address, cases(SEED + 1, known, NUM_WARMUP_MESSAGES))
        with unharmed(server):
            chosen = os.environ.get("TEST_FUZZ_CASE")
            sent = cases(SEED, known, NUM_MESSAGES) if chosen is None else [make_case(SEED, int(chosen), known)]
            endings = send(server.address, sent)
            if problems := wrong_endings(endings):
                pytest.fail(f"seed {SEED}, {NUM_MESSAGES} messages:\n" + "\n".join(problems), pytrace=False)


def wrong_endings(endings: list[tuple[Case, Ending]]) -> list[str]:
    kinds: dict[tuple[str, str], str] = {}
    for case, ending in endings:
        for complaint in complaints(case, ending):
            kinds.setdefault((case.path, complaint[:40]), f"{complaint}\n  {case.describe()[:2000]}")
    return list(kinds.values())


NUM_HTTP_MESSAGES = 10_000 if LONG else 300
TIMEOUT_SECONDS = 60
# Statuses of answers to an authenticated caller with time left, also where the document lists fewer.
STATUSES = {200, 400, 403, 404, 405, 408, 413, 415, 501, 504}
SECRETS = ("Traceback", "aiohttp", str(ROOT), "/usr/lib", "site-packages", "the neighbour's text")


def messages_of(address: str) -> st.SearchStrategy[Any]:
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, which `make setup` installs")
    document = requests.get(f"{address}/openapi.json", timeout=TIMEOUT_SECONDS).json()
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    assert {"/v1/generate", "/v2/models/{model}/infer"} <= {operation.path for operation in operations}
    posts = [operation for operation in operations if operation.method.lower() == "post"]
    modes = list(schemathesis.GenerationMode)
    # Where there is a body, there is more to get wrong.
    chosen = [operation.as_strategy(generation_mode=mode) for operation in (*operations, *posts, *posts) for mode in modes]
    return st.one_of(chosen)


def known(case: Any) -> None:
    if isinstance(case.path_parameters, dict) and "model" in case.path_parameters:
        case.path_parameters["model"] = "alpha"
    if isinstance(case.body, dict) and case.path.startswith("/v1"):
        case.body.pop("model", None)
        case.body.pop("modelVersion", None)


def send_http(address: str, number: int, seed: int) -> Counter[int]:
    """Send messages; return the number of answers of each status. What is wrong with an answer fails the test."""
    seen, everything = Counter[int](), messages_of(address)
    with requests.Session() as session:

        @hypothesis.seed(seed)
        @settings(max_examples=number, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @hypothesis.given(everything, st.booleans())
        def ask(case: Any, is_known: bool) -> None:
            if is_known:
                known(case)
            try:
                response = case.call(base_url=address, session=session, timeout=TIMEOUT_SECONDS)
            except (ValueError, requests.exceptions.InvalidURL, requests.exceptions.InvalidHeader):
                return  # the client does not send it
            seen[response.status_code] += 1
            is_no = response.status_code == 503 and case.path.endswith("/ready")  # of a model that there is not
            assert is_no or response.status_code in STATUSES, (response.status_code, response.content[:1000])
            assert response.headers["server"] == ["dragoman"], dict(response.headers)
            assert not [secret for secret in SECRETS if secret.encode() in response.content], response.content[:1000]

        ask()
    return seen


@pytest.mark.timeout(3600)
def test_no_message_over_http_does_any_harm(short: Path) -> None:
    with serving(short, "--max-slots", "16") as server:
        with connection(server) as channel:
            generate(channel, 4, text="the neighbour's text").result()
        requests.post(f"{server.http_address}/detect", json={"q": "a dog"}, timeout=TIMEOUT_SECONDS)  # reads the detector's model
        send_http(server.http_address, NUM_HTTP_MESSAGES // 10, SEED + 1)
        with unharmed(server):
            seen = send_http(server.http_address, NUM_HTTP_MESSAGES, SEED)
    assert seen[200] and seen[400], seen
