"""The Open Inference Protocol over HTTP: tensors in JSON and as bytes behind it, and Triton's `generate` and `generate_stream`."""

import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import ClientResponse, ClientSession

from dragoman.inference.inference_pb2 import ModelInferRequest
from tests.system.harness import openinference as oip
from tests.system.harness import openinference_messages as messages
from tests.system.harness.grpc_client import TOGETHER
from tests.system.harness.http_client import retry_of, session_of
from tests.system.harness.openinference_bodies import asking, outputs, with_tensors
from tests.system.harness.protocol import Answer, Method, Opened, Query, Refused


class OipRest:
    """A caller of it."""

    name = "OIP REST"

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self.methods: Mapping[str, Method] = {
            "infer": Method(self._infer),
            "infer of several": Method(self._infer, TOGETHER),
            "infer of several in bytes": Method(self._infer_in_bytes, TOGETHER),
            "generate": Method(self._generate),
            "generate_stream": Method(self._stream),
        }

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Opened:
        async with session_of(server, {"Authorization": f"Bearer {token}"} if token else {}) as session:
            yield cls(session)

    def supports(self, way: str, options: Mapping[str, Any]) -> bool:
        return True

    def project(self, answer: Answer) -> Answer:
        return oip.project(answer)

    async def call_unimplemented(self) -> None:
        async with self._session.post("/v2/repository/models/en-de/load") as response:
            await check(response)

    async def _infer(self, asked: Query) -> list[Answer]:
        body = asking(*asked.texts, parameters=dict(asked.options))
        async with self._session.post(f"/v2/models/{asked.model}/infer", json=body) as response:
            await check(response)
            found = outputs(await response.json())
        return oip.rows_of({name: elements for name, (_, elements) in found.items()}, len(asked.texts))

    async def _infer_in_bytes(self, asked: Query) -> list[Answer]:
        request: ModelInferRequest = messages.asking(*asked.texts, model=asked.model)
        sent, headers = with_tensors(request, parameters=dict(asked.options) | {"binary_data_output": True})
        async with self._session.post(f"/v2/models/{asked.model}/infer", data=sent, headers=headers) as response:
            await check(response)
            body, head = await response.read(), int(response.headers["Inference-Header-Content-Length"])
        found = outputs(json.loads(body[:head]), body[head:])
        return oip.rows_of({name: elements for name, (_, elements) in found.items()}, len(asked.texts))

    async def _generate(self, asked: Query) -> list[Answer]:
        body = {"text_input": asked.texts[0], **asked.options}
        async with self._session.post(f"/v2/models/{asked.model}/generate", json=body) as response:
            await check(response)
            return [answer_of(await response.json())]

    async def _stream(self, asked: Query) -> list[Answer]:
        body = {"text_input": asked.texts[0], **asked.options}
        async with self._session.post(f"/v2/models/{asked.model}/generate_stream", json=body) as response:
            await check(response)
            events = [json.loads(line.removeprefix(b"data: ")) async for line in response.content if line.strip()]
        answer = answer_of(events[-1])
        if len(events) > 1:  # each says what is new
            tokens = [token for event in events for token in json.loads(event["tokens"])]
            answer = replace(answer, texts=["".join(event["text_output"] for event in events)], tokens=[tokens])
        return [answer]


def answer_of(named: Mapping[str, Any]) -> Answer:
    """Return what outputs by name say of one text."""
    [told] = oip.rows_of({name: value if isinstance(value, list) else [value] for name, value in named.items()}, 1)
    return told


async def check(response: ClientResponse) -> None:
    if response.status != 200:
        told = await response.json()
        assert list(told) == ["error"]
        raise Refused(str(response.status), told["error"], retry_of(response))
