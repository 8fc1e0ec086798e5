"""KServe's SDK: its clients over gRPC and REST; prints what they were answered as JSON.

The package's own `__init__` imports a model server and a client of Kubernetes, too; the rest is loaded without them, as it is.
"""

import asyncio
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import numpy as np

found = importlib.util.find_spec("kserve")
assert found is not None and found.submodule_search_locations is not None
package = ModuleType("kserve")
package.__path__ = list(found.submodule_search_locations)
sys.modules["kserve"] = package

import httpx  # noqa: E402
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig  # noqa: E402
from kserve.protocol.infer_type import InferInput, InferRequest, RequestedOutput  # noqa: E402

MODEL = "en-de"


async def over_grpc(address: str, *texts: str) -> dict[str, Any]:
    """Call with what the client sends by default, which is parameters of REST too."""
    client = InferenceGRPCClient(address, channel_args=[("grpc.enable_http_proxy", 0)])
    tensor = InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    response = await client.infer(InferRequest(MODEL, [tensor], request_id="mine", parameters={"num_beams": 2}))
    ready = [await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready(MODEL)]
    await client.close()
    return {"ready": ready, "answer": told(response)}


def request(*texts: str, is_binary: bool, model: str = MODEL, **more: Any) -> Any:
    tensor = InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_), binary_data=is_binary)
    return InferRequest(model, [tensor], request_id="mine", parameters={"num_beams": 2}, **more)


def told(response: Any) -> dict[str, Any]:
    outputs = {output.name: output.as_numpy().ravel().tolist() for output in response.outputs}
    texts = [text.decode() if isinstance(text, bytes) else text for text in outputs["text_output"]]
    return {"id": response.id, "text": texts, "score": outputs["score"]}


async def over_rest(address: str, *texts: str) -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    wanted = [RequestedOutput(name, parameters={"binary_data": True}) for name in ("score", "text_output")]
    asked = [{"is_binary": False}, {"is_binary": True}, {"is_binary": True, "request_outputs": wanted}]
    answers = [told(await client.infer(address, request(*texts, **each), MODEL)) for each in asked]
    errors = []
    for refused in (request(" ", is_binary=False), request("a", is_binary=True, model="nobody")):
        try:
            await client.infer(address, refused, refused.model_name)
        except httpx.HTTPStatusError as failed:
            errors.append([failed.response.status_code, str(failed)])
    ready = [
        await client.is_server_live(address),
        await client.is_server_ready(address),
        await client.is_model_ready(address, MODEL),
        await client.is_model_ready(address, "nobody"),
    ]
    await client.close()
    return {"ready": ready, "answers": answers, "errors": errors}


def main(grpc_address: str, http_address: str, *texts: str) -> None:
    print(json.dumps([asyncio.run(over_grpc(grpc_address, *texts)), asyncio.run(over_rest(http_address, *texts))]))


main(*sys.argv[1:])
