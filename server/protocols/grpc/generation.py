"""The dragoman.v1.Generation service; the interceptor or stream converts its errors to statuses."""

from collections.abc import AsyncIterator

from dragoman.server.protocols.grpc.interceptors import Context, current_call
from dragoman.server.protocols.grpc.reading import BulkRequest
from dragoman.server.protocols.grpc.streams import MAX_TOGETHER_BYTES, Batch
from dragoman.server.protocols.v1.descriptions import Descriptions
from dragoman.server.protocols.v1.messages import (
    MessageLimit,
    to_generate_request,
    to_score_request,
    to_score_response,
    to_stream_response,
    write_response,
)
from dragoman.server.service.context import Call
from dragoman.server.service.service import Service
from dragoman.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves every RPC of the service; the protocol defines the method names."""

    def __init__(self, service: Service, max_message_bytes: int) -> None:
        self._service = service
        self._limit = MessageLimit(max_message_bytes)
        self._descriptions = Descriptions(service.models, max_message_bytes)

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> generation_pb2.GenerateResponse:
        """Return the whole answer."""
        response = generation_pb2.GenerateResponse()
        await self._generate(request, current_call.get(), context, response)
        return response

    async def GenerateStream(self, request: generation_pb2.GenerateRequest, context: Context) -> None:
        """Write the answer in pieces, then whole."""
        wanted = to_generate_request(request)
        async with self._service.generation.stream(wanted, current_call.get(), context.time_remaining(), self._limit) as pieces:
            async for piece in pieces:
                await context.write(await to_stream_response(piece, self._limit.max_bytes))

    async def GenerateBatch(self, requests: AsyncIterator[generation_pb2.GenerateRequest], context: Context) -> None:
        """Write the answer to each request of a stream as it completes."""
        await Batch(self._generate, self._service, context).serve(requests)

    async def GenerateBulk(self, requests: AsyncIterator[BulkRequest], context: Context) -> None:
        """Write answers as GenerateBatch does, several per message."""
        together = min(MAX_TOGETHER_BYTES, self._limit.max_bytes)
        await Batch(self._generate, self._service, context, together).serve(requests)

    async def Score(self, request: generation_pb2.ScoreRequest, context: Context) -> generation_pb2.ScoreResponse:
        """Return the scores of a source and target."""
        wanted = to_score_request(request)
        scores = await self._service.generation.score(wanted, current_call.get(), context.time_remaining(), self._limit)
        return await to_score_response(scores, self._limit.max_bytes)

    async def ListModels(self, _: generation_pb2.ListModelsRequest, context: Context) -> generation_pb2.ListModelsResponse:
        """Return the models that the caller may use."""
        models = self._service.generation.models(current_call.get().caller)
        return self._descriptions.of_all(models)

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Context) -> generation_pb2.Model:
        """Return one model."""
        return self._descriptions.of(
            self._service.generation.model(request.model, current_call.get().caller, request.model_version)
        )

    async def _generate(
        self, request: generation_pb2.GenerateRequest, call: Call, context: Context, response: generation_pb2.GenerateResponse
    ) -> None:
        """Write the whole answer into `response`."""
        wanted = to_generate_request(request)
        generated = await self._service.generation.generate(wanted, call, context.time_remaining(), self._limit)
        await write_response(generated, self._limit.max_bytes, response)
