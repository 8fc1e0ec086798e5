"""The Open Inference Protocol over HTTP: tensors in JSON and as bytes behind it, and Triton's `generate` and `generate_stream`."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import ClientSession

from tests.system.harness import openinference as oip
from tests.system.harness.grpc_client import NUM_TEXTS
from tests.system.harness.http_client import HttpClient, events
from tests.system.harness.protocol import Answer, Method, Query


def elements(outputs: Mapping[str, tuple[Any, list[Any]]]) -> dict[str, list[Any]]:
    return {name: values for name, (_, values) in outputs.items()}


def as_lists(named: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: value if isinstance(value, list) else [value] for name, value in named.items()}


class OpenInferenceRest(HttpClient):
    """A client of it."""

    name = "OIP REST"

    def __init__(self, session: ClientSession, token: str = "") -> None:
        super().__init__(session, token)
        self.methods: Mapping[str, Method] = {
            "infer": Method(self._infer),
            "infer of several": Method(self._infer, NUM_TEXTS),
            "infer of several in bytes": Method(self._infer_in_bytes, NUM_TEXTS),
            "generate": Method(self._generate),
            "generate_stream": Method(self._stream),
        }

    def project(self, answer: Answer) -> Answer:
        return oip.project(answer)

    async def call_unimplemented(self) -> None:
        async with self.post("/v2/repository/models/en-de/load"):
            pass

    async def _infer(self, query: Query) -> list[Answer]:
        body = oip.infer_body(*query.texts, parameters=dict(query.options))
        async with self.post(f"/v2/models/{query.model}/infer", query, json=body) as response:
            found = oip.rest_outputs(await response.json())
        return oip.answers_of(elements(found), len(query.texts))

    async def _infer_in_bytes(self, query: Query) -> list[Answer]:
        request = oip.infer_request(*query.texts, model=query.model)
        sent, headers = oip.binary_body(request, parameters=dict(query.options) | {"binary_data_output": True})
        async with self.post(f"/v2/models/{query.model}/infer", query, data=sent, headers=headers) as response:
            body, head = await response.read(), int(response.headers["Inference-Header-Content-Length"])
        return oip.answers_of(elements(oip.rest_outputs(json.loads(body[:head]), body[head:])), len(query.texts))

    async def _generate(self, query: Query) -> list[Answer]:
        body = {"text_input": query.texts[0], **query.options}
        async with self.post(f"/v2/models/{query.model}/generate", query, json=body) as response:
            return oip.answers_of(as_lists(await response.json()), 1)

    async def _stream(self, query: Query) -> list[Answer]:
        body = {"text_input": query.texts[0], **query.options}
        async with self.post(f"/v2/models/{query.model}/generate_stream", query, json=body) as response:
            return [oip.joined([as_lists(event) async for _, event in events(response)])]
