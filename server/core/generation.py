"""Requests in, answers out: the one way through the house that every face takes. How requests run is the engine's business.

What cannot be answered is raised as `server.errors`. An answer is counted with the record of its call, when the face is done with
it: one that turns out not to fit a message, or to have nobody to take it, is no success.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import cast

from structlog.contextvars import bind_contextvars

from dragoman.model.tokenizer import StreamingDetokenizer
from dragoman.server.core.answer_size import AnswerLimit
from dragoman.server.core.answers import Generated, Piece, to_generated
from dragoman.server.core.calls import Call
from dragoman.server.core.endings import raise_ending, raise_pair_ending
from dragoman.server.core.ports import Model, Models
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.core.scoring import PairScores, prepare_pair, to_scores
from dragoman.server.core.validation import Prepared, Validator, check_model_name
from dragoman.server.engine import messages
from dragoman.server.telemetry.metrics import Metrics

ANSWERS = ("eos", "length")


class Generation:
    """Generates and scores with the models there are."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        """Serve these models.

        Args:
            models: What is loaded; may change.
            metrics: Where requests are counted.
        """
        self._models = models
        self._metrics = metrics
        self._validator = Validator()

    def model(self, name: str) -> Model:
        """Return a model, for a description; the empty name means the only one.

        Raises:
            InvalidRequest: If no model can have this name.
            UnknownModel: If none has it.
        """
        return self._models.get(check_model_name(name))

    def max_characters(self) -> int:
        """Return how many characters of a text some model could use; that there are more is all it needs to know of the rest."""
        return max(map(self._validator.max_characters, self._models.all()), default=0) + 1

    async def generate(
        self, request: GenerateRequest, call: Call, remaining_seconds: float | None = None, limit: AnswerLimit | None = None
    ) -> Generated:
        """Return the whole answer; cancelling the awaiting task frees its slots at the engine's next step.

        Args:
            request: What is asked for.
            call: Its record.
            remaining_seconds: Until its deadline, None if it has none.
            limit: What the face can send; None for anything.

        Raises:
            ServiceError: If there is no answer.
        """
        model = self._begin(request, call)
        prepared = await self._prepare(request, call, model, remaining_seconds, limit, is_streamed=False)
        finished = await model.engine.generate(prepared.request)
        self._check(call, model, prepared, finished)
        text = model.tokenizer.decode(finished.answers[0].token_ids)
        return to_generated(call, model, prepared, finished, text)

    @asynccontextmanager
    async def stream(
        self, request: GenerateRequest, call: Call, remaining_seconds: float | None = None, limit: AnswerLimit | None = None
    ) -> AsyncIterator[AsyncIterator[Piece]]:
        """Give the answer in pieces to iterate over, the last of which has it whole.

        Leaving the `with` early, however that happens, frees the request's slots at the engine's next step. That is why there is
        one: a generator that its user drops, or that waits in `yield` when the caller goes away, would be closed by the garbage
        collector some time later, and the request would run on until then. For the same reason a face writes pieces where it
        iterates, and does not yield them.

        Args:
            request: What is asked for.
            call: Its record.
            remaining_seconds: Until its deadline, None if it has none.
            limit: What the face can send; None for anything.

        Raises:
            ServiceError: While iterating, if there is no answer.
        """
        async with aclosing(self._pieces(request, call, remaining_seconds, limit)) as pieces:
            yield pieces

    async def score(
        self, request: ScoreRequest, call: Call, remaining_seconds: float | None = None, limit: AnswerLimit | None = None
    ) -> PairScores:
        """Return the scores of a pair; arguments and errors as `generate`."""
        model = self._begin(request, call)
        pair = await prepare_pair(
            request,
            model,
            self._validator,
            arrival=call.arrival,
            remaining_seconds=remaining_seconds,
            share=call.share,
            limit=limit,
        )
        call.source_tokens = len(pair.source_ids)
        scored = await model.engine.score(pair)
        if call.span is not None:
            call.span.add_scoring(model.version, scored)
        if scored.reason != "eos":
            raise_pair_ending(scored)
        call.count_answer = partial(self._metrics.observe_scored, model.name, pair, scored)
        return to_scores(call, model, request, pair, scored)

    async def _pieces(
        self, request: GenerateRequest, call: Call, remaining_seconds: float | None, limit: AnswerLimit | None
    ) -> AsyncGenerator[Piece, None]:
        model = self._begin(request, call)
        prepared = await self._prepare(request, call, model, remaining_seconds, limit, is_streamed=True)
        detokenizer = StreamingDetokenizer(model.tokenizer)
        texts: list[str] = []
        num_sent = 0
        finished: messages.Finished | None = None
        events = cast(AsyncGenerator[messages.Tokens | messages.Finished], model.engine.stream(prepared.request))
        async with aclosing(events):
            async for event in events:
                if isinstance(event, messages.Finished):
                    finished = event
                    break
                texts.append(detokenizer.push(event.token_ids))
                num_sent += len(event.token_ids)
                yield Piece(texts[-1], event.token_ids)
        if finished is None:
            raise RuntimeError("the engine's stream ended without saying how")
        self._check(call, model, prepared, finished)
        rest = finished.answers[0].token_ids[num_sent:]
        texts.append(detokenizer.push(rest) + detokenizer.finish())
        yield Piece(texts[-1], rest, to_generated(call, model, prepared, finished, "".join(texts)))

    def _begin(self, request: GenerateRequest | ScoreRequest, call: Call) -> Model:
        """Return the model; the call's record now knows it."""
        model = self._models.get(check_model_name(request.model))
        call.model = model.name
        bind_contextvars(model=model.name)
        return model

    async def _prepare(
        self,
        request: GenerateRequest,
        call: Call,
        model: Model,
        remaining_seconds: float | None,
        limit: AnswerLimit | None,
        *,
        is_streamed: bool,
    ) -> Prepared:
        """Validate and tokenise, unless the queue is full anyway."""
        model.engine.ensure_place(call.share)
        prepared = await self._validator.prepare(
            request,
            model,
            arrival=call.arrival,
            remaining_seconds=remaining_seconds,
            is_streamed=is_streamed,
            share=call.share,
            limit=limit,
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
        count = partial(self._metrics.observe_finished, model.name, prepared.request, finished)
        if finished.reason not in ANSWERS:
            count()
            raise_ending(finished)
        call.count_answer = count
