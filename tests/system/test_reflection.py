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
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from dragoman.client.search import Search
from dragoman.client.sync import Client
from tests.protos.packages import FOLDER, install
from tests.system.harness.server import ROOT, serving

pytestmark = pytest.mark.e2e

DOG = "A dog runs through the snow."


def test_reflection_is_complete_and_enough_to_call_by(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = {"dragoman.v1.Generation", "inference.GRPCInferenceService", "grpc.health.v1.Health"}
    assert set(database.get_services()) == services | {"grpc.reflection.v1alpha.ServerReflection"}
    pool = DescriptorPool(database)

    def call(name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Call a unary method by its description, from JSON to JSON."""
        method = pool.FindServiceByName("dragoman.v1.Generation").FindMethodByName(name)
        invoke = channel.unary_unary(
            f"/dragoman.v1.Generation/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = invoke(json_format.ParseDict(request, GetMessageClass(method.input_type)()), timeout=60)
        return dict(json_format.MessageToDict(answer, preserving_proto_field_name=True))

    models = call("ListModels", {})["models"]
    assert [model["name"] for model in models] == ["en-de", "en-fr"]
    assert all("captions" in model["domain"] for model in models), "a stranger reads the domain of each model"
    answer = call("Generate", {"model": "en-de", "text": DOG, "num_beams": 2})
    assert answer["text"] and answer["finish_reason"] == "FINISH_REASON_EOS"
    with pytest.raises(grpc.RpcError) as failed:
        call("Generate", {"model": "en-de", "text": " "})
    status = dict(failed.value.trailing_metadata())["grpc-status-details-bin"]
    error = GetMessageClass(pool.FindMessageTypeByName("dragoman.v1.Error")).FromString(status)
    assert (error.code, error.message) == (3, failed.value.details())
    for name in ("RetryInfo", "RequestInfo"):
        assert pool.FindMessageTypeByName(f"google.rpc.{name}").fields, "details of errors"


@pytest.fixture(scope="session")
def node() -> tuple[str, dict[str, str]]:
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
