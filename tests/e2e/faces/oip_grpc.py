"""The Open Inference Protocol over gRPC: texts one by one, together, and on a stream."""

import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from dragoman.inference.inference_pb2 import ModelInferRequest, ModelInferResponse, RepositoryModelLoadRequest
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.e2e.faces import oip
from tests.e2e.faces.native_grpc import OPTIONS, TOGETHER, collected, refused
from tests.e2e.faces.told import Asked, Opened, Refused, Told, Way
from tests.server.faces.oip.messages import asking, outputs, with_parameters, with_tensor


def request_of(asked: Asked) -> ModelInferRequest:
    """Return a message of all texts: options as parameters, but for a list, which only a tensor has."""
    plain = {name: value for name, value in asked.options.items() if not isinstance(value, list)}
    request = with_parameters(asking(*asked.texts, model=asked.model), **plain)
    for name in asked.options.keys() - plain.keys():
        with_tensor(request, name, asked.options[name])
    return request


def told_of(response: ModelInferResponse, num_texts: int) -> list[Told]:
    return oip.rows_of({name: elements for name, (_, elements) in outputs(response).items()}, num_texts)


class OipGrpc:
    """A caller of it."""

    name = "OIP gRPC"

    def __init__(self, channel: grpc.aio.Channel, of_streams: grpc.Channel, token: str) -> None:
        self._stub, self._streams = GRPCInferenceServiceStub(channel), GRPCInferenceServiceStub(of_streams)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.ways: Mapping[str, Way] = {
            "ModelInfer": Way(self._infer),
            "ModelInfer of several": Way(self._infer, TOGETHER),
            "ModelStreamInfer": Way(self._stream),
        }

    @classmethod
    @asynccontextmanager
    async def opened(cls, server: Any, token: str = "") -> Opened:
        with grpc.insecure_channel(server.address, options=OPTIONS) as of_streams:
            async with grpc.aio.insecure_channel(server.address, options=OPTIONS) as channel:
                yield cls(channel, of_streams, token)

    def says(self, way: str, options: Mapping[str, Any]) -> bool:
        return True

    def carried(self, told: Told) -> Told:
        return oip.carried(told)

    async def ask_for_what_is_not_offered(self) -> None:
        try:
            await self._stub.RepositoryModelLoad(RepositoryModelLoadRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def _infer(self, asked: Asked) -> list[Told]:
        try:
            return told_of(await self._stub.ModelInfer(request_of(asked), metadata=self._metadata), len(asked.texts))
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def _stream(self, asked: Asked) -> list[Told]:
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
        [told] = told_of(last, 1)
        if len(texts) > 1:  # each says what is new
            whole = [token for [new] in tokens for token in json.loads(new)]
            told = replace(told, texts=["".join(text for [text] in texts)], tokens=[whole])
        return [told]
