"""The Open Inference Protocol over gRPC: texts one by one, together, and on a stream."""

import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from dragoman.inference.inference_pb2 import ModelInferRequest, ModelInferResponse, RepositoryModelLoadRequest
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.harness import openinference as oip
from tests.system.harness.grpc_client import OPTIONS, TOGETHER, collected, refused
from tests.system.harness.openinference_messages import asking, outputs, with_parameters, with_tensor
from tests.system.harness.protocol import Answer, Method, Opened, Query, Refused


def request_of(asked: Query) -> ModelInferRequest:
    """Return a message of all texts: options as parameters, but for a list, which only a tensor has."""
    plain = {name: value for name, value in asked.options.items() if not isinstance(value, list)}
    request = with_parameters(asking(*asked.texts, model=asked.model), **plain)
    for name in asked.options.keys() - plain.keys():
        with_tensor(request, name, asked.options[name])
    return request


def answer_of(response: ModelInferResponse, num_texts: int) -> list[Answer]:
    return oip.rows_of({name: elements for name, (_, elements) in outputs(response).items()}, num_texts)


class OipGrpc:
    """A caller of it."""

    name = "OIP gRPC"

    def __init__(self, channel: grpc.aio.Channel, of_streams: grpc.Channel, token: str) -> None:
        self._stub, self._streams = GRPCInferenceServiceStub(channel), GRPCInferenceServiceStub(of_streams)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.methods: Mapping[str, Method] = {
            "ModelInfer": Method(self._infer),
            "ModelInfer of several": Method(self._infer, TOGETHER),
            "ModelStreamInfer": Method(self._stream),
        }

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Opened:
        with grpc.insecure_channel(server.address, options=OPTIONS) as of_streams:
            async with grpc.aio.insecure_channel(server.address, options=OPTIONS) as channel:
                yield cls(channel, of_streams, token)

    def supports(self, way: str, options: Mapping[str, Any]) -> bool:
        return True

    def project(self, answer: Answer) -> Answer:
        return oip.project(answer)

    async def call_unimplemented(self) -> None:
        try:
            await self._stub.RepositoryModelLoad(RepositoryModelLoadRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def _infer(self, asked: Query) -> list[Answer]:
        try:
            return answer_of(await self._stub.ModelInfer(request_of(asked), metadata=self._metadata), len(asked.texts))
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def _stream(self, asked: Query) -> list[Answer]:
        texts, tokens = [], []
        last: ModelInferResponse | None = None
        for message in await collected(self._streams.ModelStreamInfer(iter([request_of(asked)]), metadata=self._metadata)):
            last = message.infer_response
            if message.error_message:
                status, _, reason = message.error_message.partition(": ")
                seconds = last.parameters["retry_after_seconds"].double_param if "retry_after_seconds" in last.parameters else None
                raise Refused(status, reason, seconds)
            found = outputs(last)
            texts.append(found["text_output"][1])
            tokens.append(found["tokens"][1])
        assert last is not None and last.parameters["triton_final_response"].bool_param
        [answer] = answer_of(last, 1)
        if len(texts) > 1:  # each says what is new
            whole = [token for [new] in tokens for token in json.loads(new)]
            answer = replace(answer, texts=["".join(text for [text] in texts)], tokens=[whole])
        return [answer]
