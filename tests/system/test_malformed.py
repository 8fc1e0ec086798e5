"""Messages over HTTP, mostly wrong, made of the served OpenAPI document: each is answered as documented, and nothing leaks.

By default some hundred; 10,000 with `TEST_LONG=1`. `TEST_FUZZ_SEED` chooses them. Bytes that are no HTTP are in
`test_http.py`, and messages over gRPC are in `test_fuzz.py`.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.system.harness.callers import connection, generate, unharmed
from tests.system.harness.server import serving

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, which `make setup` installs")

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("TEST_FUZZ_SEED", "16"))
NUM_MESSAGES = 10_000 if os.environ.get("TEST_LONG") else 300
NUM_WARMUP_MESSAGES = NUM_MESSAGES // 10
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

pytestmark = pytest.mark.e2e


def messages_of(address: str) -> st.SearchStrategy[Any]:
    """Return what makes messages for every path there is, of the document or not as it has them."""
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
    """Have a message ask the model that there is."""
    if isinstance(case.path_parameters, dict) and "model" in case.path_parameters:
        case.path_parameters["model"] = "alpha"
    if isinstance(case.body, dict) and case.path.startswith("/v1"):
        case.body.pop("model", None)
        case.body.pop("modelVersion", None)


def send(address: str, number: int, seed: int) -> Counter[tuple[str, int]]:
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
        send(server.http_address, NUM_WARMUP_MESSAGES, SEED + 1)
        with unharmed(server):
            seen = send(server.http_address, NUM_MESSAGES, SEED)
        codes: Counter[int] = Counter()
        for (_, code), count in seen.items():
            codes[code] += count
        print(f"{seen.total()} messages, by status: {dict(sorted(codes.items()))}")
    assert codes[200] and codes[400]
