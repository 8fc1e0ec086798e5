"""The native API over gRPC, in each of its RPCs."""

import asyncio
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from dragoman.v1.generation_pb2 import (
    FinishReason,
    GenerateBatchResponse,
    GenerateBulkRequest,
    GenerateRequest,
    GenerateResponse,
    TokenLogProb,
)
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.protocol import Answer, LogProb, Method, Opened, Query, Refused

OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
TOGETHER = 10


def request_of(asked: Query, number: int, **more: Any) -> GenerateRequest:
    return GenerateRequest(model=asked.model, text=asked.texts[number], **asked.options, **more)


def log_prob(told: TokenLogProb) -> LogProb:
    return told.token, told.piece, told.log_prob, tuple(map(log_prob, told.top))


def answer_of(response: GenerateResponse) -> Answer:
    return Answer(
        texts=[answer.text for answer in response.answers],
        scores=[answer.score for answer in response.answers],
        tokens=[list(answer.tokens) for answer in response.answers],
        endings=[FinishReason.Name(answer.finish_reason)[14:].lower() for answer in response.answers],
        log_probs=[list(map(log_prob, answer.log_probs)) for answer in response.answers],
        counts=(response.usage.source_tokens, response.usage.generated_tokens),
        is_truncated=response.is_truncated,
        seed=response.seed if response.HasField("seed") else None,
    )


async def collected(call: Any) -> list[Any]:
    """Return what comes on a stream of requests, on a thread: grpc.aio forgets the status of a call that ends while it writes."""
    try:
        return await asyncio.to_thread(list, call)
    except asyncio.CancelledError:
        call.cancel()
        raise
    except grpc.RpcError as error:
        raise refused(error) from None


def refused(error: Any) -> Refused:
    retry, seconds = RetryInfo(), None
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Unpack(retry):
            seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return Refused(error.code().name, error.details() or "", seconds)


class NativeGrpc:
    """A caller of it."""

    name = "gRPC"

    def __init__(self, channel: grpc.aio.Channel, of_streams: grpc.Channel, token: str) -> None:
        self._channel, self._stub, self._streams = channel, GenerationStub(channel), GenerationStub(of_streams)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.methods: Mapping[str, Method] = {
            "Generate": Method(self._generate),
            "GenerateStream": Method(self._stream),
            "GenerateBatch": Method(self._batch, TOGETHER),
            "GenerateBulk": Method(self._bulk, TOGETHER),
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
        return answer

    async def call_unimplemented(self) -> None:
        call = self._channel.unary_unary("/dragoman.v1.Generation/Nothing", lambda _: b"", lambda data: data)
        try:
            await call(None, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def _generate(self, asked: Query) -> list[Answer]:
        try:
            return [answer_of(await self._stub.Generate(request_of(asked, 0), metadata=self._metadata))]
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def _stream(self, asked: Query) -> list[Answer]:
        call = self._stub.GenerateStream(request_of(asked, 0), metadata=self._metadata)
        try:
            pieces = [piece async for piece in call]
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None
        assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
        return [answer_of(pieces[-1].result)]

    async def _batch(self, asked: Query) -> list[Answer]:
        requests = [request_of(asked, number, request_id=str(number)) for number in range(len(asked.texts))]
        return in_order(await collected(self._streams.GenerateBatch(iter(requests), metadata=self._metadata)))

    async def _bulk(self, asked: Query) -> list[Answer]:
        requests = [request_of(asked, number, request_id=str(number)) for number in range(len(asked.texts))]
        messages = iter([GenerateBulkRequest(requests=requests)])
        found = await collected(self._streams.GenerateBulk(messages, metadata=self._metadata))
        return in_order([answer for message in found for answer in message.answers])


def in_order(answers: list[GenerateBatchResponse]) -> list[Answer]:
    for answer in answers:
        if answer.HasField("error"):
            error = answer.error
            seconds = error.retry_after_seconds if error.HasField("retry_after_seconds") else None
            raise Refused({code.value[0]: code.name for code in grpc.StatusCode}[error.code], error.message, seconds)
    return [answer_of(answer.response) for answer in sorted(answers, key=lambda answer: answer.index)]
