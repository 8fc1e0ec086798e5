"""Requests in, answers out: the one way through the house that every face takes. How requests run is the engine's business.

What cannot be answered is raised as `server.errors`. An answer is counted with the record of its call, when the face is done with
it: one that turns out not to fit a message, or to have nobody to take it, is no success.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar, cast

from structlog.contextvars import bind_contextvars

from dragoman.server.engine import messages
from dragoman.server.errors import InvalidRequest, QueueFull, UnknownModel
from dragoman.server.service.answer_size import AnswerLimit
from dragoman.server.service.answers import Generated, Piece, to_generated
from dragoman.server.service.callers import NO_DEADLINES, Caller, Deadlines
from dragoman.server.service.context import Call
from dragoman.server.service.languages import decode_after, detokenizer_after
from dragoman.server.service.outcomes import place_refused, raise_ending, raise_pair_ending
from dragoman.server.service.ports import Model, Models
from dragoman.server.service.requests import GenerateRequest, ScoreRequest
from dragoman.server.service.routing import choose_model
from dragoman.server.service.score import PairScores, prepare_pair, to_scores
from dragoman.server.service.validation import Prepared, Validator, check_model_name, check_model_version
from dragoman.server.telemetry.metrics import Metrics

ANSWERS = ("eos", "length")
# Beyond a deadline; an engine that steps reports the end of a late request sooner, and with its tokens.
HANG_SECONDS = 0.5

Event = TypeVar("Event")


class Generation:
    """Generates and scores with the models there are."""

    def __init__(self, models: Models, metrics: Metrics, deadlines: Deadlines = NO_DEADLINES) -> None:
        """Serve these models.

        Args:
            models: What is loaded; may change.
            metrics: Where requests are counted.
            deadlines: The server's own.
        """
        self._models = models
        self._metrics = metrics
        self._deadlines = deadlines
        self._validator = Validator()
        for model in models.all():
            self.prepare(model)

    def prepare(self, model: Model) -> None:
        """Work out what requests for a model need and none shall wait for; a large vocabulary takes a tenth of a second.

        What reads special tokens, where requests that do not say have them read, takes seconds and holds up others meanwhile.
        """
        tokenizers = model.tokenizers
        for tokenizer in (tokenizers.source, tokenizers.target):
            self._validator.sizes.of(tokenizer)
        if tokenizers.special_tokens and model.manifest.defaults.special_tokens_in_text:
            _ = tokenizers.encode_with_special_tokens

    def models(self, caller: Caller | None = None) -> Sequence[Model]:
        """Return the models that a caller may use, sorted by name; all of them for nobody in particular."""
        models = self._models.all()
        if caller is None or caller.models is None:
            return models
        return [model for model in models if model.name in caller.models]

    def model(self, name: str, caller: Caller | None = None, version: str = "") -> Model:
        """Return a model to look at; the empty name means the only one. A caller is not told of models that it may not use.

        Raises:
            InvalidRequest: If no model can have this name, or no version such a one.
            UnknownModel: If none has it that the caller may use.
            UnknownVersion: If the model is not served in this version.
            NotReady: If none of its versions can answer for now, and this may be one of them.
        """
        return self._models.get(self._permitted(name, caller), check_model_version(version))

    def _permitted(self, name: str, caller: Caller | None) -> str:
        """Return the name of the model that a caller means by one.

        Raises:
            InvalidRequest: If no model can have this name.
            UnknownModel: If none has it that the caller may use.
        """
        name = check_model_name(name)
        if caller is None or caller.models is None:
            return name
        names = [model.name for model in self.models(caller)]
        if not name and len(names) == 1:
            return names[0]
        if name not in names:
            raise UnknownModel(name, names)
        return name

    def model_for(self, request: GenerateRequest | ScoreRequest, caller: Caller | None = None) -> Model:
        """Return the model that a request means, to look at; errors as `model`, and those of `choose_model`."""
        return self.model(self._name_of(request, caller), caller, request.model_version)

    def _name_of(self, request: GenerateRequest | ScoreRequest, caller: Caller | None) -> str:
        """Return the name of the model that a request means: the one that it names, or else the one for its languages."""
        if not request.model and request.target_language and len(models := self.models(caller)) > 1:
            return choose_model(models, request.source_language, request.target_language).name
        return self._permitted(request.model, caller)

    def deadlines(self, call: Call) -> Deadlines:
        """Return how long a call may take, whatever its caller says: the caller's own limits, or the server's."""
        return self._deadlines if call.caller is None else call.caller.deadlines

    def max_characters(self, model: Model | None = None) -> int:
        """Return how many characters of a text a model could use, or any model; of the rest it is enough that there is more."""
        return max(map(self._validator.max_characters, self._models.all() if model is None else [model]), default=0) + 1

    def check_source_length(self, text: str, model: Model) -> None:
        """See `Validator.check_source_length`."""
        self._validator.check_source_length(text, model)

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
        arrived = time.monotonic()
        async with self._hold(request, call, remaining_seconds) as model:
            remaining_seconds = _left_since(arrived, remaining_seconds)
            prepared = await self._prepare(request, call, model, remaining_seconds, limit, is_streamed=False)
            finished = await _in_time(model.engine.generate(prepared.request), prepared.request)
            self._check(call, model, prepared, finished)
            before = prepared.frame.before(prepared.request)
            text = decode_after(model.tokenizers.target, before, finished.answers[0].token_ids)
            return to_generated(call, request.text, model, prepared, finished, text)

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
            ServiceError: If there is no answer, at once or while iterating.
        """
        arrived = time.monotonic()
        async with self._hold(request, call, remaining_seconds) as model:
            remaining_seconds = _left_since(arrived, remaining_seconds)
            async with aclosing(self._pieces(model, request, call, remaining_seconds, limit)) as pieces:
                yield pieces

    async def score(
        self, request: ScoreRequest, call: Call, remaining_seconds: float | None = None, limit: AnswerLimit | None = None
    ) -> PairScores:
        """Return the scores of a pair; arguments and errors as `generate`."""
        arrived = time.monotonic()
        async with self._hold(request, call, remaining_seconds) as model:
            remaining_seconds = _left_since(arrived, remaining_seconds)
            return await self._score(request, call, model, self._time_left(call, remaining_seconds), limit)

    async def _score(
        self, request: ScoreRequest, call: Call, model: Model, remaining_seconds: float | None, limit: AnswerLimit | None
    ) -> PairScores:
        prepared = await prepare_pair(
            request,
            model,
            self._validator,
            arrival=call.arrival,
            remaining_seconds=remaining_seconds,
            share=call.share,
            limit=limit,
        )
        pair = prepared.request
        call.source_tokens = prepared.frame.num_source_tokens(pair.source_ids)
        if call.caller is not None:
            call.caller.read(call.source_tokens + len(pair.target_ids))
        try:
            async with _until(pair.deadline):
                scored = await model.engine.score(pair)
        except TimeoutError:
            scored = messages.Scored(pair.id, "deadline", [], b"", time.monotonic())
        if call.span is not None:
            call.span.add_scoring(model.version, scored)
            call.span.add_languages(prepared.frame.source_language, prepared.frame.target_language)
        if scored.reason != "eos":
            raise_pair_ending(scored, call)
        call.count_answer = partial(self._metrics.observe_scored, model.name, pair, call.source_tokens, scored)
        return to_scores(call, model, request, prepared, scored)

    async def _pieces(
        self, model: Model, request: GenerateRequest, call: Call, remaining_seconds: float | None, limit: AnswerLimit | None
    ) -> AsyncGenerator[Piece, None]:
        prepared = await self._prepare(request, call, model, remaining_seconds, limit, is_streamed=True)
        detokenizer = detokenizer_after(model.tokenizers.target, prepared.frame.before(prepared.request))
        texts: list[str] = []
        num_sent = 0
        events = cast(AsyncGenerator[messages.Tokens | messages.Finished], model.engine.stream(prepared.request))
        async with aclosing(events):
            while not isinstance(event := await _in_time(anext(events), prepared.request), messages.Finished):
                texts.append(detokenizer.push(event.token_ids))
                num_sent += len(event.token_ids)
                call.generated_tokens = num_sent  # what a caller has had that does not wait for the end
                yield Piece(texts[-1], event.token_ids)
        finished = event
        self._check(call, model, prepared, finished)
        rest = finished.answers[0].token_ids[num_sent:]
        texts.append(detokenizer.push(rest) + detokenizer.finish())
        yield Piece(texts[-1], rest, to_generated(call, request.text, model, prepared, finished, "".join(texts)))

    def _hold(
        self, request: GenerateRequest | ScoreRequest, call: Call, remaining_seconds: float | None
    ) -> AbstractAsyncContextManager[Model]:
        """Return what holds the model that a request is for, if its caller's limits let it in; it may have to be waited for.

        Raises:
            ServiceError: If they do not, or the caller may use no such model.
        """
        if call.not_entered is not None:
            raise call.not_entered
        name, version = self._name_of(request, call.caller), check_model_version(request.model_version)
        self._begin(request, call, self._models.get(name, version))
        seconds = self._time_left(call, remaining_seconds)
        return self._models.hold(name, version, call.request_id, call.share.caller, seconds)

    def _begin(self, request: GenerateRequest | ScoreRequest, call: Call, model: Model) -> None:
        """Have the call's record know the model.

        Raises:
            ServiceError: If a request of its caller's, or one for the model, may not have such a priority.
        """
        call.model = model.name
        bind_contextvars(model=model.name)
        if call.caller is not None:
            call.caller.check_priority(request.priority)
        highest = model.traits.max_priority
        if highest is not None and request.priority > highest:
            raise InvalidRequest("priority", f"{request.priority} is above {highest}, max_priority of model {model.name}")

    def _time_left(self, call: Call, remaining_seconds: float | None) -> float | None:
        """Return the time until a request's deadline, the caller's or ours."""
        deadlines = self.deadlines(call)
        if deadlines == NO_DEADLINES:
            return remaining_seconds
        seconds, call.deadline_limit = deadlines.time_left(call.arrival, remaining_seconds)
        return seconds

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
        self._ensure_place(model, call)
        remaining_seconds = self._time_left(call, remaining_seconds)
        prepared = await self._validator.prepare(
            request,
            model,
            arrival=call.arrival,
            remaining_seconds=remaining_seconds,
            is_streamed=is_streamed,
            share=call.share,
            limit=limit,
        )
        call.source_tokens = prepared.frame.num_source_tokens(prepared.request.source_ids)
        if call.caller is not None:
            search = prepared.request.search
            call.caller.check_slots(search.num_slots, "num_beams" if search.num_beams > 1 else "num_return_sequences")
            call.caller.read(call.source_tokens)
        if call.span is not None:
            call.span.describe(model.version, prepared.request)
            call.span.add_languages(prepared.frame.source_language, prepared.frame.target_language)
        return prepared

    def _ensure_place(self, model: Model, call: Call) -> None:
        """Do nothing if the queue probably has a place for a request; a limit that leaves none is its caller's, or the queue's."""
        try:
            model.engine.ensure_place(call.share)
        except QueueFull as full:
            if not full.limit or call.caller is None:
                raise
            raise place_refused(call.caller, full.limit, full.retry_after_seconds) from None

    def _check(self, call: Call, model: Model, prepared: Prepared, finished: messages.Finished) -> None:
        """Note what was generated; for an ending that is no answer, record its tokens and raise."""
        call.generated_tokens = finished.num_generated
        if call.span is not None:
            call.span.add_phases(finished)
        count = partial(self._metrics.observe_finished, model.name, prepared.request, call.source_tokens, finished)
        if finished.reason not in ANSWERS:
            count()
            raise_ending(finished, call)
        if finished.admitted is not None:
            model.count_queued(finished.admitted - prepared.request.arrival)
        call.count_answer = count


def _until(deadline: float | None) -> asyncio.Timeout:
    """Return a limit for waiting on an engine, which ends its requests at their deadlines itself unless it hangs."""
    return asyncio.timeout_at(None if deadline is None else deadline + HANG_SECONDS)


async def _in_time(event: Awaitable[Event], request: messages.Request) -> Event | messages.Finished:
    try:
        async with _until(request.deadline):
            return await event
    except TimeoutError:
        return messages.Finished(request.id, "deadline", [], 0, None, 0.0, None, time.monotonic())


def _left_since(arrived: float, remaining_seconds: float | None) -> float | None:
    """Return what is left now of the time that was left at some moment; None for any time."""
    return None if remaining_seconds is None else remaining_seconds - (time.monotonic() - arrived)
