"""Clients of other servers over HTTP, unmodified, against the real server: Triton's, KServe's, and curl.

Those with stubs of their own run in a process of their own: their stubs have the same names as ours.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.sync import Client
from tests.system.test_open_inference import HERE, OPTIONS, TEXTS, run_client, wait_until

pytestmark = pytest.mark.e2e

WAYS = {"bytes", "json", "parameters", "sampling_parameters", "together", "together in json"}


def host_of(server: Any) -> str:
    return str(server.http_address).removeprefix("http://")


@pytest.fixture(scope="session")
def triton() -> Callable[..., Any]:
    for name in ("tritonclient", "geventhttpclient"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which `make setup` installs")
    return lambda *arguments: run_client("triton_http_caller.py", *arguments)


@pytest.mark.parametrize("way", ["sync", "aio"])
def test_tritons_client_gets_the_native_answers_to_the_last_bit(shared_server: Any, triton: Any, native: Any, way: str) -> None:
    """Texts one by one and all together, tensors as bytes and in JSON, options as tensors, as parameters and as JSON."""
    answered = triton(host_of(shared_server), way, json.dumps({"texts": TEXTS, "options": OPTIONS}))
    assert len(answered["waited for"]) == len(OPTIONS)
    for options, found in zip(OPTIONS, answered["waited for"], strict=True):
        expected = [native(text, **options) for text in TEXTS]
        assert set(found) == WAYS
        for name in WAYS:
            assert found[name] == expected, (name, options)
    if way == "sync":
        assert answered["later"] == [native(text) for text in TEXTS]
    else:
        assert answered["ready"] == [True, True, True]


def test_what_tritons_client_asks_of_a_server(shared_server: Any, triton: Any) -> None:
    found = triton(host_of(shared_server), "describe")
    assert found["ready"] == [True, True, True, False]
    assert found["metadata"]["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    assert found["config"]["model_transaction_policy"] == {"decoupled": True}
    assert [model["name"] for model in found["index"]] == ["en-de", "en-fr"]
    assert [[model["name"] for model in told["model_stats"]] for told in found["statistics"]] == [["en-de", "en-fr"], ["en-de"]]
    assert found["server"]["name"] == "dragoman" and found["id"] == "mine"


def test_every_kind_of_error_has_its_status(shared_server: Any, triton: Any) -> None:
    found = triton(host_of(shared_server), "errors")
    assert {name: status for name, (status, _) in found.items()} == {
        "blank": "400",
        "no model": "404",
        "no version": "404",
        "unknown input": "400",
        "unknown output": "400",
        "unknown parameter": "400",
        "timeout": "504",
        "compressed": "415",
        "shared memory": "501",
        "load": "501",
        "settings": "501",
        "deadline of its own": "TimeoutError",
    }
    assert "text_input[1]" in found["blank"][1] and "admin_port" in found["load"][1]


def test_who_leaves_frees_its_slots(serve: Any, endless: Path, triton: Any) -> None:
    """That a step or two later they are free is tested with the engine; here, that the engine is told."""
    with serve(endless, "--max-slots", "4", "--http-port", "0") as server:
        command = [sys.executable, str(HERE / "triton_http_caller.py"), host_of(server), "cancel"]
        caller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_until(lambda: server.metric("dragoman_engine_slots_in_use", model="alpha") == 4)
        assert caller.communicate("leave\n", timeout=60)[0] == '"left"\n'
        assert {server.wait_for("item")["code"] for _ in range(8)} == {"CANCELLED"}, "twice as many as there are slots had begun"
        with Client(server.address) as client:
            answer = client.generate("a dog", model="alpha", max_new_tokens=2)
        assert len(answer.tokens) == 2
        wait_until(lambda: server.metric("dragoman_engine_slots_in_use", model="alpha") == 0)
        assert server.metric("dragoman_engine_steps_total", model="alpha") < 900 * 64 / 4
        assert server.terminate() == 0


def test_kserves_client_gets_the_native_answers(shared_server: Any, native: Any) -> None:
    for name in ("kserve", "httpx", "orjson", "pandas", "cloudevents", "fastapi", "psutil"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which `make setup` installs")
    found = run_client("kserve_rest_caller.py", shared_server.http_address, *TEXTS)
    assert found["ready"] == [True, True, True, False]
    expected = [native(text, num_beams=2) for text in TEXTS]
    for answer in found["answers"]:
        assert answer["id"] == "mine"
        assert answer["text"] == [each["text_output"][0] for each in expected]
        assert answer["score"] == [each["score"][0] for each in expected]
    assert [status for status, _ in found["errors"].values()] == [400, 404]
    assert "text: is blank" in found["errors"]["blank"][1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_generates_and_streams(shared_server: Any, native: Any) -> None:
    """As Triton's manual has it: without saying what the body is."""

    def curl(path: str, message: Any, *flags: str) -> str:
        command = ["curl", "-s", *flags, "-d", json.dumps(message), f"{shared_server.http_address}/v2/models/en-de/{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    for options in ({}, {"num_beams": 4, "length_penalty": 0.7}):
        expected = native(TEXTS[0], **options)
        message = {"text_input": TEXTS[0], "parameters": options}
        whole = json.loads(curl("generate", message))
        lines = curl("generate_stream", message, "-N").splitlines()
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert whole["text_output"] == "".join(piece["text_output"] for piece in pieces) == expected["text_output"][0]
        assert whole["score"] == pieces[-1]["score"] == expected["score"][0]
        assert json.loads(whole["tokens"]) == expected["tokens"][0]
    assert len([line for line in curl("generate_stream", {"text_input": TEXTS[0]}, "-N").splitlines() if line]) > 3
    assert json.loads(curl("generate_stream", {"text_input": " "})) == {"error": "text: is blank"}
