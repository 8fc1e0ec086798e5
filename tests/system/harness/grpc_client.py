"""The native API and the Open Inference Protocol over gRPC, in each of their methods."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from dragoman.inference.inference_pb2 import ModelInferRequest, RepositoryModelLoadRequest
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.v1 import generation_pb2 as pb
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness import openinference as oip
from tests.system.harness.protocol import NUM_TEXTS, Answer, Connection, LogProb, Method, ProtocolClient, Query, Refused

# Channels with the same options share a connection; a local pool gives each its own.
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
ANY_SIZE = [*OPTIONS, ("grpc.max_send_message_length", -1)]
CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def request_of(query: Query, number: int, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=query.model, text=query.texts[number], **{"request_id": query.request_id, **query.options, **more}
    )


def requests_of(query: Query) -> list[pb.GenerateRequest]:
    return [request_of(query, number, request_id=f"{query.request_id}{number}") for number in range(len(query.texts))]


def log_prob(token: pb.TokenLogProb) -> LogProb:
    return token.token, token.piece, token.log_prob, tuple(map(log_prob, token.top))


def answer_of(response: pb.GenerateResponse) -> Answer:
    return Answer(
        texts=[answer.text for answer in response.answers],
        scores=[answer.score for answer in response.answers],
        tokens=[list(answer.tokens) for answer in response.answers],
        endings=[pb.FinishReason.Name(answer.finish_reason)[14:].lower() for answer in response.answers],
        log_probs=[list(map(log_prob, answer.log_probs)) for answer in response.answers],
        counts=(response.usage.source_tokens, response.usage.generated_tokens),
        is_truncated=response.is_truncated,
        seed=response.seed if response.HasField("seed") else None,
        version=response.model_version,
    )


def refused(error: Any) -> Refused:
    retry, seconds = RetryInfo(), None
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Unpack(retry):
            seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return Refused(error.code().name, error.details() or "", seconds)


def failure(call: Callable[[], Any]) -> tuple[str, str]:
    """Return status and message of a call over a synchronous channel, which may be a stream."""
    try:
        found = call()
        for _ in found if hasattr(found, "__next__") else ():
            pass
    except grpc.RpcError as error:
        return error.code().name, error.details()  # type: ignore[attr-defined]
    raise AssertionError("the call has not failed")


class GrpcClient(ProtocolClient):
    """A connection over gRPC: one channel for unary calls and one for streams of requests.

    Such streams are read on a thread: grpc.aio forgets the status of a call that ends while it writes.
    """

    stub_type: Callable[[Any], Any]

    def __init__(self, channel: grpc.aio.Channel, streams: grpc.Channel, token: str) -> None:
        self._channel, self._stub, self._streams = channel, self.stub_type(channel), self.stub_type(streams)
        self._token = {"authorization": f"Bearer {token}"} if token else {}

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Connection:
        with grpc.insecure_channel(server.address, ANY_SIZE) as streams:
            async with grpc.aio.insecure_channel(server.address, ANY_SIZE) as channel:
                yield cls(channel, streams, token)

    def beside(self, query: Query | None) -> dict[str, Any]:
        headers = self._token | (dict(query.headers) if query else {})
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        return {"metadata": metadata, "timeout": query.timeout_seconds if query else None}

    async def unary(self, method: Any, request: Any, query: Query | None = None) -> Any:
        try:
            return await method(request, **self.beside(query))
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def pieces(self, method: Any, request: Any, query: Query) -> list[Any]:
        try:
            return [piece async for piece in method(request, **self.beside(query))]
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def stream(self, method: Any, requests: list[Any], query: Query) -> list[Any]:
        call = method(iter(requests), **self.beside(query))
        try:
            return await asyncio.to_thread(list, call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except grpc.RpcError as error:
            raise refused(error) from None


class NativeGrpc(GrpcClient):
    name = "gRPC"
    stub_type = GenerationStub

    def __init__(self, channel: grpc.aio.Channel, streams: grpc.Channel, token: str) -> None:
        super().__init__(channel, streams, token)
        self.methods = {
            "Generate": Method(self._generate),
            "GenerateStream": Method(self._stream),
            "GenerateBatch": Method(self._batch, NUM_TEXTS),
            "GenerateBulk": Method(self._bulk, NUM_TEXTS),
        }

    async def call_unimplemented(self) -> None:
        await self.unary(self._channel.unary_unary("/dragoman.v1.Generation/Nothing"), b"")

    async def _generate(self, query: Query) -> list[Answer]:
        return [answer_of(await self.unary(self._stub.Generate, request_of(query, 0), query))]

    async def _stream(self, query: Query) -> list[Answer]:
        pieces = await self.pieces(self._stub.GenerateStream, request_of(query, 0), query)
        assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
        return [answer_of(pieces[-1].result)]

    async def _batch(self, query: Query) -> list[Answer]:
        return in_order(await self.stream(self._streams.GenerateBatch, requests_of(query), query))

    async def _bulk(self, query: Query) -> list[Answer]:
        messages = await self.stream(self._streams.GenerateBulk, [pb.GenerateBulkRequest(requests=requests_of(query))], query)
        return in_order([answer for message in messages for answer in message.answers])


def in_order(answers: list[pb.GenerateBatchResponse]) -> list[Answer]:
    for answer in answers:
        if answer.HasField("error"):
            error = answer.error
            seconds = error.retry_after_seconds if error.HasField("retry_after_seconds") else None
            raise Refused(CODES[error.code], error.message, seconds)
    return [answer_of(answer.response) for answer in sorted(answers, key=lambda answer: answer.index)]


def infer_request_of(query: Query) -> ModelInferRequest:
    """Return a message of all texts: options as parameters, but for a list, which only a tensor has."""
    plain = {name: value for name, value in query.options.items() if not isinstance(value, list)}
    request = oip.with_parameters(oip.infer_request(*query.texts, model=query.model, id=query.request_id), **plain)
    for name in query.options.keys() - plain.keys():
        oip.with_tensor(request, name, query.options[name])
    return request


class OpenInferenceGrpc(GrpcClient):
    name = "OIP gRPC"
    stub_type = GRPCInferenceServiceStub

    def __init__(self, channel: grpc.aio.Channel, streams: grpc.Channel, token: str) -> None:
        super().__init__(channel, streams, token)
        self.methods = {
            "ModelInfer": Method(self._infer),
            "ModelInfer of several": Method(self._infer, NUM_TEXTS),
            "ModelStreamInfer": Method(self._stream),
        }

    def project(self, answer: Answer) -> Answer:
        return oip.project(answer)

    async def call_unimplemented(self) -> None:
        await self.unary(self._stub.RepositoryModelLoad, RepositoryModelLoadRequest())

    async def _infer(self, query: Query) -> list[Answer]:
        response = await self.unary(self._stub.ModelInfer, infer_request_of(query), query)
        return oip.answers_of(oip.elements(oip.grpc_outputs(response)), len(query.texts))

    async def _stream(self, query: Query) -> list[Answer]:
        messages = await self.stream(self._streams.ModelStreamInfer, [infer_request_of(query)], query)
        last = messages[-1].infer_response
        if messages[-1].error_message:
            status, _, reason = messages[-1].error_message.partition(": ")
            seconds = last.parameters["retry_after_seconds"].double_param if "retry_after_seconds" in last.parameters else None
            raise Refused(status, reason, seconds)
        assert last.parameters["triton_final_response"].bool_param
        return [oip.joined([oip.elements(oip.grpc_outputs(message.infer_response)) for message in messages])]
