"""Clients that have nothing but the server's address, by reflection as grpcurl uses it, or its contract, in Node.js."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from dragoman.client.search import Search
from dragoman.client.sync import Client
from tests.protos.packages import FOLDER, install
from tests.system.harness.server import serving

pytestmark = pytest.mark.e2e


def files_of(channel: grpc.Channel, **question: str) -> list[FileDescriptorProto]:
    request = ServerReflectionRequest(**question)
    [response] = ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=60)
    return [FileDescriptorProto.FromString(file) for file in response.file_descriptor_response.file_descriptor_proto]


def reflected(channel: grpc.Channel, symbol: str) -> dict[str, FileDescriptorProto]:
    """Return the file of a symbol and all that it imports."""
    files = {file.name: file for file in files_of(channel, file_containing_symbol=symbol)}
    while missing := {name for file in files.values() for name in file.dependency} - files.keys():
        for name in missing:
            [found] = [file for file in files_of(channel, file_by_filename=name) if file.name == name]
            files[name] = found
    return files


def call(channel: grpc.Channel, pool: DescriptorPool, name: str, request: dict[str, Any]) -> dict[str, Any]:
    method = pool.FindMethodByName(f"dragoman.v1.Generation.{name}")
    reply = GetMessageClass(method.output_type)
    invoke = channel.unary_unary(
        f"/dragoman.v1.Generation/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply.FromString,
    )
    answer = invoke(json_format.ParseDict(request, GetMessageClass(method.input_type)()), timeout=60)
    return dict(json_format.MessageToDict(answer, preserving_proto_field_name=True))


def test_reflection_is_complete_and_enough_to_call_by(channel: grpc.Channel) -> None:
    [listed] = ServerReflectionStub(channel).ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")]))
    services = {"dragoman.v1.Generation", "inference.GRPCInferenceService", "grpc.health.v1.Health"}
    services.add("grpc.reflection.v1alpha.ServerReflection")
    assert {service.name for service in listed.list_services_response.service} == services
    files = reflected(channel, "dragoman.v1.Generation")
    assert set(files) == {"dragoman/v1/generation.proto", "google/protobuf/any.proto"}
    pool = DescriptorPool()
    for file in reversed(files.values()):
        pool.Add(file)

    models = call(channel, pool, "ListModels", {})["models"]
    assert [model["name"] for model in models] == ["en-de", "en-fr"]
    assert all("captions" in model["domain"] for model in models), "a stranger reads the domain of each model"
    answer = call(channel, pool, "Generate", {"model": "en-de", "text": "A dog runs through the snow.", "num_beams": 2})
    assert answer["text"] and answer["finish_reason"] == "FINISH_REASON_EOS"
    with pytest.raises(grpc.RpcError) as failed:
        call(channel, pool, "Generate", {"model": "en-de", "text": " "})
    status = dict(failed.value.trailing_metadata())["grpc-status-details-bin"]
    error = GetMessageClass(pool.FindMessageTypeByName("dragoman.v1.Error")).FromString(status)
    assert (error.code, error.message) == (3, failed.value.details())
    for name in ("RetryInfo", "RequestInfo"):
        assert "google/rpc/error_details.proto" in reflected(channel, f"google.rpc.{name}"), "details of errors"


ROOT = Path(__file__).resolve().parents[2]
DOG = "A dog runs through the snow."


@pytest.fixture(scope="session")
def node() -> tuple[str, dict[str, str]]:
    """The program and the environment to run our client in."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs Node.js: `node` and `npm`")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < 18:
        pytest.skip(f"needs Node.js 18 or newer, not {version}")
    packages = install(ROOT / ".cache/node", npm)
    # A proxy for the world is none for this machine.
    return node, os.environ | {"NODE_PATH": str(packages / "node_modules"), "no_proxy": "127.0.0.1", "no_grpc_proxy": "127.0.0.1"}


def test_node_calls_the_server_with_nothing_but_the_contract(node: Any, bundles: Path) -> None:
    program, environment = node
    # So small that a crowd of 32 is too much, and large enough for the rest.
    with serving(bundles, "--max-slots", "4", "--max-waiting-requests", "4") as server:
        command = [program, str(FOLDER / "client.js"), server.address, "en-de", str(ROOT / "protos")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        with Client(server.address) as client:
            ours = client.generate(DOG, model="en-de")
            beams = client.generate(DOG, model="en-de", search=Search(num_beams=3, num_return_sequences=2, return_log_probs=True))
    said = {line["call"]: line["outcome"] for line in map(json.loads, done.stdout.splitlines())}

    generated, batch, failed = said["generate"], said["batch"], said["failure"]
    ended = (generated["text"], generated["tokens"], generated["finish_reason"])
    assert ended == (beams.text, list(beams.tokens), "FINISH_REASON_EOS")
    assert (generated["model"], generated["model_version"]) == ("en-de", ours.model_version)
    for answer, expected in zip(generated["answers"], beams.answers, strict=True):
        assert (answer["score"], len(answer["log_probs"])) == (expected.score, len(expected.log_probs))
    assert said["sample"]["seed"] == str(2**64 - 1) and said["sample"]["text"], "64 bits go there and back"
    assert len(said["stream"]["pieces"]) > 2 and "".join(said["stream"]["pieces"]) == ours.text == said["stream"]["result"]["text"]
    assert set(batch) == {"good", "bad", "also good"} and batch["good"]["text"] == ours.text and batch["also good"]["text"]
    assert batch["bad"]["code"] == 3 and batch["bad"]["message"].startswith("num_beams: ")
    assert (failed["name"], failed["code"]) == ("NOT_FOUND", 5) and "retry_after_seconds" not in failed
    assert "en-xx" in failed["message"] and "en-de" in failed["message"]
    assert [detail["type_url"] for detail in failed["details"]] == ["type.googleapis.com/google.rpc.RequestInfo"]
    assert 0 < len(said["crowd"]) < 32
    for refusal in said["crowd"]:
        assert (refusal["code"], refusal["retry_after_seconds"] > 0) == (8, True)
        assert "type.googleapis.com/google.rpc.RetryInfo" in [detail["type_url"] for detail in refusal["details"]]
    assert said["nobody"]["code"] == 14 and said["nobody"]["message"]
