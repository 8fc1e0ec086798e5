"""Messages over gRPC and over HTTP, mostly wrong: the server answers each as documented, tells nothing, and stays as it was.

Some hundred, or 10,000 of each with `TEST_LONG=1`. `TEST_FUZZ_SEED` chooses them, a failure prints them, `TEST_FUZZ_CASE` sends one
of gRPC alone. Messages over HTTP are made of the served OpenAPI document; bytes that are no HTTP are in `test_http.py`.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
import requests
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dragoman.v1.generation_pb2 import GenerateBatchResponse, GenerateBulkResponse
from tests.system.fuzz.cases import Case, cases, make_case, methods
from tests.system.fuzz.oracle import Ending, complaints, send
from tests.system.harness.callers import connection, generate, unharmed
from tests.system.harness.server import LONG, ROOT, Server, serving

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
    return Counter({code: int(server.metric("dragoman_requests_failed_total", code=code.name)) for code in BLAMED})


NUM_HTTP_MESSAGES = 10_000 if LONG else 300
TIMEOUT_SECONDS = 60
# What an answer may have as its status, also where the document does not say so; whoever is known and has time gets no other.
STATUSES = {200, 400, 403, 404, 405, 408, 413, 415, 501, 504}
SECRETS = ("Traceback", "aiohttp", str(ROOT), "/usr/lib", "site-packages", "the neighbour's text")
# LibreTranslate's API, which the document does not have.
TEXT = {"type": "string"}
LIBRE_BODY = {
    "type": "object",
    "properties": {
        "q": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 5}]},
        "source": {"enum": ["auto", "de", "fr", "xx"]},
        "target": {"enum": ["de", "fr", "xx"]},
        "format": {"enum": ["text", "html"]},
        "alternatives": {"type": "integer"},
        "api_key": TEXT,
        "model": {"enum": ["alpha", "", "x"]},
    },
    "required": ["q", "source", "target"],
}
KINDS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
LIBRE_PATHS = {
    path: {
        "post": {
            "requestBody": {"required": True, "content": {kind: {"schema": LIBRE_BODY} for kind in KINDS}},
            "responses": {"200": {"description": "OK"}},
        }
    }
    for path in ("/translate", "/detect")
}


def messages_of(address: str) -> st.SearchStrategy[Any]:
    """Return what makes messages for every path there is, of the document or not as it has them."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, which `make setup` installs")
    document = requests.get(f"{address}/openapi.json", timeout=TIMEOUT_SECONDS).json()
    schema = schemathesis.openapi.from_dict(document | {"paths": document["paths"] | LIBRE_PATHS})
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {"/v1/generate", "/v2/models/{model}/infer", "/translate"} <= {operation.path for operation in operations}
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


def send_http(address: str, number: int, seed: int) -> Counter[tuple[str, int]]:
    """Send messages; return how many of each path and status there were. What is wrong with an answer fails the test."""
    seen: Counter[tuple[str, int]] = Counter()
    everything = messages_of(address)
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
            seen[case.path, response.status_code] += 1
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
        # What is loaded when it is first needed, and stays, is there before anything is measured.
        assert requests.post(f"{server.http_address}/detect", json={"q": "Ein Hund"}, timeout=TIMEOUT_SECONDS).status_code == 200
        send_http(server.http_address, NUM_HTTP_MESSAGES // 10, SEED + 1)
        with unharmed(server):
            seen = send_http(server.http_address, NUM_HTTP_MESSAGES, SEED)
        codes: Counter[int] = Counter()
        for (_, code), count in seen.items():
            codes[code] += count
        print(f"{seen.total()} messages, by status: {dict(sorted(codes.items()))}")
    assert codes[200] and codes[400]
