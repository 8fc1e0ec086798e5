"""ModelStreamInfer: requests on one stream, each answered as it goes, in pieces where it has one text."""

import asyncio
from typing import TypeAlias

from structlog.contextvars import bind_contextvars

from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.protocols.grpc.interceptors import Context
from dragoman.server.protocols.grpc.reading import Refused
from dragoman.server.protocols.grpc.streams import RequestStream
from dragoman.server.protocols.openinference.answers import Answering, streamed, to_failure, to_response
from dragoman.server.protocols.openinference.requests import STREAM, Inference
from dragoman.server.service.context import Call, new_incident
from dragoman.server.service.service import Core

Message: TypeAlias = Inference | Refused


class InferStream(RequestStream[Message]):
    """A stream of ModelStreamInfer."""

    def __init__(self, core: Core, context: Context, max_message_bytes: int) -> None:
        """Start without requests, inside the RPC's task."""
        super().__init__(core, context)
        self._max_message_bytes = max_message_bytes
        self._answering = Answering(core, self.items, context.time_remaining, max_message_bytes)
        self._ids: set[str] = set()  # under way

    async def begin(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """Start a message's requests; the next message is read when all of them have begun."""
        message = self._checked(message)
        if isinstance(message, Inference) and len(message) > 1:
            has_begun = asyncio.Event()
            tasks.create_task(self._answer_texts(message, has_begun))
            await has_begun.wait()
        else:
            self.start(message, message.ByteSize(), tasks)

    def _checked(self, message: Message) -> Message:
        """Return a message whose id is under way from now on, or the refusal of one that may not begin."""
        if isinstance(message, Refused):
            return message
        request_id = message.request_id
        if request_id in self._ids:
            return Refused(InvalidRequest("id", "is that of another request, which is under way on this stream"), request_id)
        if message.is_streamed and len(message) > 1:
            return Refused(InvalidRequest(STREAM, f"goes with one text only, and there are {len(message)}"), request_id)
        if request_id:
            self._ids.add(request_id)
        return message

    async def answer(self, request: Message, index: int, call: Call) -> inference_pb2.ModelStreamInferResponse:
        """Write the answer to one text in pieces, unless it is wanted whole; return the last one."""
        call.request_id = request.request_id or new_incident()
        bind_contextvars(request_id=call.request_id)
        if isinstance(request, Refused):
            raise request.error
        try:
            response = await self._answering.in_pieces(request, call.request_id, call, self._write_piece)
        finally:
            self._ids.discard(request.request_id)
        return streamed(response, is_final=True)

    def failure(self, error: ServiceError, request: Message, index: int, call: Call) -> inference_pb2.ModelStreamInferResponse:
        """Return the error of a request."""
        return to_failure(error, request.request_id if isinstance(request, Refused) else call.request_id)

    async def _answer_texts(self, inference: Inference, has_begun: asyncio.Event) -> None:
        """Answer a message of several texts, when all have their answers."""
        request_id = inference.request_id or new_incident()
        num_bytes = inference.ByteSize()
        self.window.hold(num_bytes)
        try:
            answered = await self._answering.each(inference, request_id, self.window, has_begun)
            last = streamed(await to_response(inference, answered, request_id, self._max_message_bytes), is_final=True)
        except ServiceError as error:
            last = to_failure(error, request_id)
        finally:
            self.window.hold(-num_bytes)
            self._ids.discard(inference.request_id)
        self.window.begin()
        await self.finish(0, last.SerializeToString())

    async def _write_piece(self, piece: inference_pb2.ModelInferResponse) -> None:
        await self.write(streamed(piece, is_final=False))
