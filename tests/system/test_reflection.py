"""A client that has nothing but the server's address: reflection, as grpcurl uses it."""

from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from tests.system.harness.server import Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


def files_of(channel: grpc.Channel, **question: str) -> list[FileDescriptorProto]:
    """Return the files that the server sends."""
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
    """Call a unary method by its description, from JSON to JSON."""
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


def test_the_details_of_errors_can_be_looked_up(channel: grpc.Channel) -> None:
    for name in ("RetryInfo", "RequestInfo"):
        assert "google/rpc/error_details.proto" in reflected(channel, f"google.rpc.{name}")
