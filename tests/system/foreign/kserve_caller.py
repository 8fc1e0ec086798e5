"""A caller with the stubs of KServe's SDK, which are loaded without the rest of it; prints what it was answered as JSON."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc


def load(name: str) -> Any:
    """Import a module of KServe's by its file."""
    found = importlib.util.find_spec("kserve")
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(
        name, Path(found.origin).parent / "protocol/grpc" / f"{name.rpartition('.')[2]}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


pb = load("grpc_predict_v2_pb2")
for parent in ("kserve", "kserve.protocol", "kserve.protocol.grpc"):
    sys.modules[parent] = ModuleType(parent)
sys.modules["kserve.protocol.grpc"].grpc_predict_v2_pb2 = pb  # type: ignore[attr-defined]
sys.modules["kserve.protocol.grpc.grpc_predict_v2_pb2"] = pb


def main(address: str, text: str) -> None:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:

        def call(name: str, request: Any) -> Any:
            method = channel.unary_unary(
                f"/inference.GRPCInferenceService/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=getattr(pb, f"{name}Response").FromString,
            )
            return method(request, timeout=60)

        request = pb.ModelInferRequest(model_name="en-de")
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
        request.parameters["num_beams"].int64_param = 2
        response = call("ModelInfer", request)
        assert response.outputs[0].name == "text_output"
        ready = [
            call("ServerLive", pb.ServerLiveRequest()).live,
            call("ServerReady", pb.ServerReadyRequest()).ready,
            call("ModelReady", pb.ModelReadyRequest(name="en-de")).ready,
        ]
        print(json.dumps({"ready": ready, "text": response.raw_output_contents[0][4:].decode()}))


main(*sys.argv[1:])
