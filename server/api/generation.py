"""The dragoman.v1.Generation service: text in, text out. It owns the answer's shape; how requests run is the engine's business.

Errors are raised as `server.errors` and become statuses in the interceptor, which also counts them; an answer is counted here.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NoReturn, cast

from structlog.contextvars import bind_contextvars

from model.tokenizer import StreamingDetokenizer
from protos import generation_pb2, generation_pb2_grpc
from server.api.calls import Call, current_call
from server.api.interceptors import Context
from server.api.ports import Model, Models
from server.api.validation import Prepared, Validator, check_model_name
from server.engine import messages
from server.errors import Cancelled, DeadlineExceeded, QueueFull, StepFailed, Unavailable
from server.telemetry.metrics import Metrics

FINISH_REASONS: dict[messages.FinishReason, generation_pb2.FinishReason] = {
    "eos": generation_pb2.FINISH_REASON_EOS,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}
RETRY_SECONDS = 1.0


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves every RPC of the service. Method names are the protocol's."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        """Serve these models.

        Args:
            models: What is loaded.
            metrics: Where answers are counted.
        """
        self._models = models
        self._metrics = metrics
        self._validator = Validator()

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> generation_pb2.GenerateResponse:
        """Return the whole answer."""
        call, model = self._begin(request)
        prepared = await self._prepare(request, context, call, model, is_streamed=False)
        finished = await model.engine.generate(prepared.request)
        self._check(call, model, prepared, finished)
        response = _to_response(call, model, prepared, finished, model.tokenizer.decode(finished.token_ids))
        self._metrics.observe_finished(model.name, prepared.request, finished)
        return response

    async def GenerateStream(self, request: generation_pb2.GenerateRequest, context: Context) -> None:
        """Write the answer in pieces, then whole.

        Pieces are written, not yielded: a generator that waits in `yield` when the caller goes away would be closed by the garbage
        collector some time later, and the request would run on until then.
        """
        call, model = self._begin(request)
        prepared = await self._prepare(request, context, call, model, is_streamed=True)
        detokenizer = StreamingDetokenizer(model.tokenizer)
        pieces: list[str] = []
        num_sent = 0
        finished: messages.Finished | None = None
        events = cast(AsyncGenerator[messages.Tokens | messages.Finished], model.engine.stream(prepared.request))
        async with aclosing(events):
            async for event in events:
                if isinstance(event, messages.Finished):
                    finished = event
                    break
                pieces.append(detokenizer.push(event.token_ids))
                num_sent += len(event.token_ids)
                await context.write(generation_pb2.GenerateStreamResponse(text=pieces[-1], tokens=event.token_ids))
        if finished is None:
            raise RuntimeError("the engine's stream ended without saying how")
        self._check(call, model, prepared, finished)
        rest = finished.token_ids[num_sent:]
        pieces.append(detokenizer.push(rest) + detokenizer.finish())
        response = _to_response(call, model, prepared, finished, "".join(pieces))
        await context.write(generation_pb2.GenerateStreamResponse(text=pieces[-1], tokens=rest, result=response))
        self._metrics.observe_finished(model.name, prepared.request, finished)

    async def ListModels(self, _: generation_pb2.ListModelsRequest, context: Context) -> generation_pb2.ListModelsResponse:
        """Describe every model."""
        return generation_pb2.ListModelsResponse(models=[_describe(model) for model in self._models.all()])

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Context) -> generation_pb2.Model:
        """Describe one model."""
        return _describe(self._models.get(check_model_name(request.model)))

    def _begin(self, request: generation_pb2.GenerateRequest) -> tuple[Call, Model]:
        """Return the RPC's record, which now knows its model, and the model."""
        model = self._models.get(check_model_name(request.model))
        call = current_call.get()
        call.model = model.name
        bind_contextvars(model=model.name)
        return call, model

    async def _prepare(
        self, request: generation_pb2.GenerateRequest, context: Context, call: Call, model: Model, *, is_streamed: bool
    ) -> Prepared:
        """Validate and tokenise."""
        prepared = await self._validator.prepare(
            request, model, arrival=call.arrival, remaining_seconds=context.time_remaining(), is_streamed=is_streamed
        )
        call.source_tokens = len(prepared.request.source_ids)
        return prepared

    def _check(self, call: Call, model: Model, prepared: Prepared, finished: messages.Finished) -> None:
        """Note what was generated; for an ending that is no answer, record its tokens and raise."""
        call.generated_tokens = finished.num_generated
        if finished.reason not in FINISH_REASONS:
            self._metrics.observe_finished(model.name, prepared.request, finished)
            _raise(finished)


def _raise(finished: messages.Finished) -> NoReturn:
    """Raise what an ending that is no answer means to the caller."""
    match finished.reason:
        case "cancelled":
            raise Cancelled("the request was cancelled")
        case "deadline":
            raise DeadlineExceeded(f"the deadline passed after {finished.num_generated} tokens")
        case "queue_full":
            raise QueueFull("too many requests are waiting", retry_after_seconds=finished.retry_after_seconds)
        case "draining":
            raise Unavailable("the model's engine is shutting down", retry_after_seconds=RETRY_SECONDS)
        case "step_failed":
            raise StepFailed(f"generation failed; quote incident {finished.incident}")
        case _:
            raise AssertionError(f"{finished.reason} is an answer")


def _to_response(
    call: Call, model: Model, prepared: Prepared, finished: messages.Finished, text: str
) -> generation_pb2.GenerateResponse:
    """Return the answer's message."""
    arrival = prepared.request.arrival
    admitted = arrival if finished.admitted is None else finished.admitted
    first_token = finished.ended if finished.first_token is None else finished.first_token
    return generation_pb2.GenerateResponse(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        text=text,
        tokens=finished.token_ids,
        finish_reason=FINISH_REASONS[finished.reason],
        is_truncated=prepared.is_truncated,
        usage=generation_pb2.Usage(source_tokens=len(prepared.request.source_ids), generated_tokens=finished.num_generated),
        timings=generation_pb2.Timings(
            queue_seconds=admitted - arrival,
            prefill_seconds=finished.prefill_seconds,
            decode_seconds=finished.ended - first_token,
            time_to_first_token_seconds=first_token - arrival,
            total_seconds=time.monotonic() - arrival,
        ),
    )


def _describe(model: Model) -> generation_pb2.Model:
    """Return a model's description."""
    manifest = model.manifest
    return generation_pb2.Model(
        name=model.name,
        version=model.version,
        is_ready=model.engine.is_ready,
        precision=manifest.precision,
        device=model.device,
        max_source_tokens=manifest.max_source_tokens,
        max_target_tokens=manifest.max_target_tokens,
        default_max_new_tokens=manifest.default_max_new_tokens,
        max_slots=model.max_slots,
        source_vocab_size=manifest.source_vocab_size,
        target_vocab_size=manifest.target_vocab_size,
    )
