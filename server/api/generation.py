"""The dragoman.v1.Generation service: text in, text out. How requests run is the engine's business.

Errors are raised as `dragoman.server.errors` and become statuses where they are counted: in the interceptor, or in a batch's
stream. An answer is counted here.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from structlog.contextvars import bind_contextvars

from dragoman.model.tokenizer import StreamingDetokenizer
from dragoman.server.api.answers import FINISH_REASONS, check_size, raise_ending, to_response
from dragoman.server.api.batch import Batch
from dragoman.server.api.calls import Call, current_call
from dragoman.server.api.interceptors import Context
from dragoman.server.api.ports import Model, Models
from dragoman.server.api.records import Records
from dragoman.server.api.scoring import prepare_pair, raise_pair_ending, to_score_response
from dragoman.server.api.validation import Prepared, Validator, check_model_name
from dragoman.server.engine import messages
from dragoman.server.telemetry.metrics import Metrics
from dragoman.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves every RPC of the service. Method names are the protocol's."""

    def __init__(self, models: Models, metrics: Metrics, records: Records, draining: asyncio.Event, max_message_bytes: int) -> None:
        """Serve these models.

        Args:
            models: What is loaded.
            metrics: Where answers are counted.
            records: What writes the record of each request of a batch.
            draining: Set once no new request is to be served.
            max_message_bytes: Largest message that gRPC sends.
        """
        self._models = models
        self._metrics = metrics
        self._records = records
        self._draining = draining
        self._max_message_bytes = max_message_bytes
        self._validator = Validator()

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> generation_pb2.GenerateResponse:
        """Return the whole answer."""
        call, model = self._begin(request)
        prepared = await self._prepare(request, context, call, model, is_streamed=False)
        finished = await model.engine.generate(prepared.request)
        self._check(call, model, prepared, finished)
        text = model.tokenizer.decode(finished.answers[0].token_ids)
        response = to_response(call, model, prepared, finished, text)
        check_size(response, self._max_message_bytes)
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
        rest = finished.answers[0].token_ids[num_sent:]
        pieces.append(detokenizer.push(rest) + detokenizer.finish())
        response = to_response(call, model, prepared, finished, "".join(pieces))
        last = generation_pb2.GenerateStreamResponse(text=pieces[-1], tokens=rest, result=response)
        check_size(last, self._max_message_bytes)
        await context.write(last)
        self._metrics.observe_finished(model.name, prepared.request, finished)

    async def GenerateBatch(self, requests: AsyncIterator[generation_pb2.GenerateRequest], context: Context) -> None:
        """Write the answer to each request of a stream when it is there."""
        await Batch(self.Generate, self._models, self._records, context).serve(requests, self._draining)

    async def Score(self, request: generation_pb2.ScoreRequest, context: Context) -> generation_pb2.ScoreResponse:
        """Return the scores of a pair."""
        call, model = self._begin(request)
        remaining = context.time_remaining()
        pair = await prepare_pair(request, model, self._validator, arrival=call.arrival, remaining_seconds=remaining)
        call.source_tokens = len(pair.source_ids)
        scored = await model.engine.score(pair)
        if call.span is not None:
            call.span.add_scoring(model.version, scored)
        if scored.reason != "eos":
            raise_pair_ending(scored)
        response = to_score_response(call, model, request, pair, scored)
        check_size(response, self._max_message_bytes)
        self._metrics.observe_scored(model.name, pair, scored)
        return response

    async def ListModels(self, _: generation_pb2.ListModelsRequest, context: Context) -> generation_pb2.ListModelsResponse:
        """Describe every model."""
        return generation_pb2.ListModelsResponse(models=[_describe(model) for model in self._models.all()])

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Context) -> generation_pb2.Model:
        """Describe one model."""
        return _describe(self._models.get(check_model_name(request.model)))

    def _begin(self, request: generation_pb2.GenerateRequest | generation_pb2.ScoreRequest) -> tuple[Call, Model]:
        """Return the RPC's record, which now knows its model, and the model."""
        model = self._models.get(check_model_name(request.model))
        call = current_call.get()
        call.model = model.name
        bind_contextvars(model=model.name)
        return call, model

    async def _prepare(
        self, request: generation_pb2.GenerateRequest, context: Context, call: Call, model: Model, *, is_streamed: bool
    ) -> Prepared:
        """Validate and tokenise, unless the queue is full anyway."""
        model.engine.ensure_place()
        prepared = await self._validator.prepare(
            request, model, arrival=call.arrival, remaining_seconds=context.time_remaining(), is_streamed=is_streamed
        )
        call.source_tokens = len(prepared.request.source_ids)
        if call.span is not None:
            call.span.describe(model.version, prepared.request)
        return prepared

    def _check(self, call: Call, model: Model, prepared: Prepared, finished: messages.Finished) -> None:
        """Note what was generated; for an ending that is no answer, record its tokens and raise."""
        call.generated_tokens = finished.num_generated
        if call.span is not None:
            call.span.add_phases(finished)
        if finished.reason not in FINISH_REASONS:
            self._metrics.observe_finished(model.name, prepared.request, finished)
            raise_ending(finished)


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
        domain=manifest.domain,
    )
