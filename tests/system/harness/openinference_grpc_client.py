"""The Open Inference Protocol over gRPC: texts one by one, together, and on a stream."""

import grpc

from dragoman.inference.inference_pb2 import ModelInferRequest, ModelInferResponse, RepositoryModelLoadRequest
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.harness import openinference as oip
from tests.system.harness.grpc_client import NUM_TEXTS, GrpcClient
from tests.system.harness.protocol import Answer, Method, Query, Refused


def request_of(query: Query) -> ModelInferRequest:
    """Return a message of all texts: options as parameters, but for a list, which only a tensor has."""
    plain = {name: value for name, value in query.options.items() if not isinstance(value, list)}
    request = oip.with_parameters(oip.infer_request(*query.texts, model=query.model, id=query.request_id), **plain)
    for name in query.options.keys() - plain.keys():
        oip.with_tensor(request, name, query.options[name])
    return request


def elements(response: ModelInferResponse) -> dict[str, list[object]]:
    return {name: elements for name, (_, elements) in oip.grpc_outputs(response).items()}


class OpenInferenceGrpc(GrpcClient):
    """A client of it."""

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
        response = await self.unary(self._stub.ModelInfer, request_of(query), query)
        return oip.answers_of(elements(response), len(query.texts))

    async def _stream(self, query: Query) -> list[Answer]:
        messages = await self.stream(self._streams.ModelStreamInfer, [request_of(query)], query)
        last = messages[-1].infer_response
        if messages[-1].error_message:
            status, _, reason = messages[-1].error_message.partition(": ")
            seconds = last.parameters["retry_after_seconds"].double_param if "retry_after_seconds" in last.parameters else None
            raise Refused(status, reason, seconds)
        assert last.parameters["triton_final_response"].bool_param
        return [oip.joined([elements(message.infer_response) for message in messages])]
