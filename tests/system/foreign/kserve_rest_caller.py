"""A caller with KServe's REST client; prints what it was answered as JSON. Run by `test_open_inference.py`.

The package's own `__init__` imports a model server and a client of Kubernetes, too; the client of inference is loaded without them,
from the files as they are.
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
from kserve.inference_client import InferenceRESTClient, RESTConfig  # noqa: E402
from kserve.protocol.infer_type import InferInput, InferRequest, RequestedOutput  # noqa: E402

MODEL = "en-de"


def request(*texts: str, is_binary: bool, **more: Any) -> Any:
    tensor = InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_), binary_data=is_binary)
    return InferRequest(MODEL, [tensor], request_id="mine", parameters={"num_beams": 2}, **more)


def told(response: Any) -> dict[str, Any]:
    outputs = {output.name: output.as_numpy().ravel().tolist() for output in response.outputs}
    texts = [text.decode() if isinstance(text, bytes) else text for text in outputs["text_output"]]
    return {"id": response.id, "text": texts, "score": outputs["score"]}


async def main(address: str, *texts: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    wanted = [RequestedOutput(name, parameters={"binary_data": True}) for name in ("score", "text_output")]
    answers = [
        told(await client.infer(address, request(*texts, is_binary=False), MODEL)),
        told(await client.infer(address, request(*texts, is_binary=True), MODEL)),
        told(await client.infer(address, request(*texts, is_binary=True, request_outputs=wanted), MODEL)),
    ]
    errors = {}
    for name, asked, model in (
        ("blank", request(" ", is_binary=False), MODEL),
        ("no model", request("a", is_binary=True), "nobody"),
    ):
        asked.model_name = model
        try:
            await client.infer(address, asked, model)
        except httpx.HTTPStatusError as failed:
            errors[name] = [failed.response.status_code, str(failed)]
    ready = [
        await client.is_server_live(address),
        await client.is_server_ready(address),
        await client.is_model_ready(address, MODEL),
        await client.is_model_ready(address, "nobody"),
    ]
    await client.close()
    print(json.dumps({"ready": ready, "answers": answers, "errors": errors}))


asyncio.run(main(*sys.argv[1:]))
