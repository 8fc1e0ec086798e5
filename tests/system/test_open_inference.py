"""Clients of other servers, unmodified, against the real server: Triton's, and the stubs of KServe's.

Each runs in a process of its own: its stubs have the same names as ours, and one process can have one of them.
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from dragoman.client.sync import Client
from dragoman.inference import inference_pb2

HERE = Path(__file__).parent / "foreign"
TEXTS = ["A dog runs through the snow.", "Two men are waiting on a bench.", "A little girl is playing near the water."]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 5},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 3, "length_penalty": 0.7, "early_stopping": True},
    {"do_sample": True, "seed": 2**40, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "seed": 3, "num_return_sequences": 4, "min_new_tokens": 4},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"suppressed_tokens": [5, 6, 7], "forced_prefix": "Ein"},
    {"return_alternatives": True, "num_return_sequences": 3},
    {"truncate": True, "priority": 3, "num_beams": 2},
]

pytestmark = pytest.mark.e2e


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def run_client(script: str, address: str, *arguments: str) -> Any:
    """Run one of the scripts beside this file against a server; return what it prints."""
    command = [sys.executable, str(HERE / script), address, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def triton() -> Callable[..., Any]:
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("needs tritonclient, which `make setup` installs")
    return lambda *arguments: run_client("triton_caller.py", *arguments)


@pytest.mark.parametrize("way", ["sync", "aio"])
def test_tritons_client_gets_the_native_answers_to_the_last_bit(shared_server: Any, triton: Any, native: Any, way: str) -> None:
    """Texts one by one and all together, options as tensors, as parameters and as JSON."""
    answered = triton(shared_server.address, way, json.dumps({"texts": TEXTS, "options": OPTIONS}))
    assert len(answered) == len(OPTIONS)
    for options, found in zip(OPTIONS, answered, strict=True):
        expected = [native(text, **options) for text in TEXTS]
        assert set(found) == {"tensors", "parameters", "sampling_parameters", "together"}
        for name in ("tensors", "parameters", "sampling_parameters", "together"):
            assert found[name] == expected, (name, options)


def test_pieces_of_a_stream_are_the_native_answer(shared_server: Any, triton: Any, native: Any) -> None:
    found = triton(shared_server.address, "stream", json.dumps({"texts": TEXTS}))
    for number, text in enumerate(TEXTS):
        pieces, expected = found[str(number)], native(text)
        assert len(pieces["texts"]) > 3 and "".join(pieces["texts"]) == expected["text_output"][0]
        assert pieces["score"] == expected["score"] and pieces["num_final"] == 1
        assert found[f"aio-{number}"] == pieces
    assert found["error"].startswith("INVALID_ARGUMENT: text: is blank")


def test_what_tritons_client_asks_of_a_server(shared_server: Any, triton: Any) -> None:
    found = triton(shared_server.address, "describe")
    assert found["ready"] == [True, True, True, False]
    assert found["metadata"]["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": ["-1", "1"]}
    assert found["config"]["config"]["model_transaction_policy"] == {"decoupled": True}
    assert [model["name"] for model in found["index"]["models"]] == ["en-de", "en-fr"]
    assert found["statistics"]["model_stats"][0]["name"] == "en-de"


def test_every_kind_of_error_has_its_status(shared_server: Any, triton: Any) -> None:
    found = triton(shared_server.address, "errors")
    assert {name: status for name, (status, _) in found.items()} == {
        "blank": "StatusCode.INVALID_ARGUMENT",
        "no model": "StatusCode.NOT_FOUND",
        "no version": "StatusCode.NOT_FOUND",
        "unknown input": "StatusCode.INVALID_ARGUMENT",
        "unknown output": "StatusCode.INVALID_ARGUMENT",
        "unknown parameter": "StatusCode.INVALID_ARGUMENT",
        "timeout": "StatusCode.DEADLINE_EXCEEDED",
        "deadline": "StatusCode.DEADLINE_EXCEEDED",
        "shared memory": "StatusCode.UNIMPLEMENTED",
        "load": "StatusCode.UNIMPLEMENTED",
    }
    assert "text_input[1]" in found["blank"][1] and "admin_port" in found["load"][1]


def test_who_leaves_frees_its_slots(serve: Any, endless: Path, triton: Any) -> None:
    """That a step or two later they are free is tested with the engine; here, that the engine is told."""
    with serve(endless, "--max-slots", "4") as server:
        command = [sys.executable, str(HERE / "triton_caller.py"), server.address, "cancel"]
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


def numbers(message: DescriptorProto, prefix: str = "") -> dict[str, Any]:
    """Return number and type of every field, those of messages inside it too."""
    name = prefix + message.name
    found: dict[str, Any] = {f"{name}.{x.name}": (x.number, x.type, x.label, x.type_name) for x in message.field}
    for inner in message.nested_type:
        found |= numbers(inner, f"{name}.")
    return found


def described(*files: FileDescriptorProto) -> dict[str, Any]:
    """Return every field, value and method that files have."""
    found: dict[str, Any] = {}
    for file in files:
        for message in file.message_type:
            found |= numbers(message)
        found |= {f"{kind.name}.{value.name}": value.number for kind in file.enum_type for value in kind.value}
        for service in file.service:
            for x in service.method:
                streams = (x.client_streaming, x.server_streaming)
                found[f"{file.package}.{service.name}.{x.name}"] = (x.input_type, x.output_type, *streams)
    return found


def test_the_contract_has_the_published_numbers(triton: Any) -> None:
    """All RPCs, and of messages nothing that is not published as it is."""
    published = described(*(FileDescriptorProto.FromString(bytes.fromhex(file)) for file in triton("127.0.0.1:1", "contract")))
    file = FileDescriptorProto()
    inference_pb2.DESCRIPTOR.CopyToProto(file)
    ours = described(file)
    assert {name: published.get(name) for name in ours} == ours
    methods = {name for name in published if name.startswith("inference.GRPCInferenceService.")}
    assert methods and methods <= ours.keys()


def test_kserves_stubs_speak_the_same_protocol(shared_server: Any, native: Any) -> None:
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("needs kserve, which `make setup` installs")
    found = run_client("kserve_caller.py", shared_server.address, TEXTS[0])
    assert found == {"ready": [True, True, True], "text": native(TEXTS[0], num_beams=2)["text_output"][0]}
