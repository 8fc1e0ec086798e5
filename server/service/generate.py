"""Generation service: validates a request, sends it to the engine and converts the outcome to an answer or an error.

An answer is counted when its call ends, after it has been sent: an answer too large to send, or not received, is no success.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from structlog.contextvars import bind_contextvars

from dragoman.server.engine import messages
from dragoman.server.errors import InvalidRequest, QueueFull, UnknownModel, UnknownPair
from dragoman.server.service.answers import AnswerLimit, Generated, Piece, error_of, place_refused, to_generated
from dragoman.server.service.callers import NO_DEADLINES, Caller, Deadlines
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.in_flight import InFlight
from dragoman.server.service.languages import (
    MAX_LISTED_CHARACTERS,
    PromptTemplate,
    detokenizer_after,
    listed,
    shown,
)
from dragoman.server.service.requests import GenerateRequest, ScoreRequest, check_length
from dragoman.server.service.result_cache import Hit, ResultCache
from dragoman.server.service.score import Scores, to_scores
from dragoman.server.service.terms import Match
from dragoman.server.service.texts import Texts, is_divided
from dragoman.server.service.validation import Validator, check_text
from dragoman.server.telemetry.metrics import ANSWERS, Metrics

if TYPE_CHECKING:
    from dragoman.server.models.loaded import LoadedModel
    from dragoman.server.models.registry import Held, ModelRegistry

# Grace beyond a deadline; a live engine reports a late request's end sooner, and with its tokens.
HANG_SECONDS = 0.5

# Usual limit of texts that are divided.
MAX_TEXT_CHARACTERS = 100_000

Outcome = TypeVar("Outcome")


class Generation:
    """Generation and scoring with the loaded models."""

    def __init__(
        self,
        models: "ModelRegistry",
        metrics: Metrics,
        calls: RunningCalls,
        in_flight: InFlight,
        deadlines: Deadlines = NO_DEADLINES,
        max_text_characters: int = MAX_TEXT_CHARACTERS,
        results: ResultCache | None = None,
    ) -> None:
        """Prepare the loaded models, which may change later; without `results` every answer is computed."""
        self._results = results or ResultCache(0)
        metrics.watch_result_cache(lambda: self._results.num_bytes)
        self._models = models
        self._metrics = metrics
        self._deadlines = deadlines
        self.validator = Validator()
        self.has_scores = True  # without, scores of plain greedy searches are 0, which saves time
        self.texts = Texts(calls, in_flight, self.validator, self._serve, max_text_characters)
        for model in models.all():
            self.prepare(model)

    def prepare(self, model: "LoadedModel") -> None:
        """Compute token sizes and load the special-token reader, 0.1 s and seconds, so that requests do not wait for them."""
        tokenizers = model.tokenizers
        for tokenizer in (tokenizers.source, tokenizers.target):
            self.validator.sizes_of(tokenizer)
        if tokenizers.special_tokens and model.manifest.defaults.special_tokens_in_text:
            _ = tokenizers.encode_with_special_tokens

    async def generate(
        self, request: GenerateRequest, call: Call, remaining_seconds: float | None = None, limit: AnswerLimit | None = None
    ) -> Generated:
        """Return the whole answer; cancelling the task frees the slots at the engine's next step.

        `remaining_seconds` are until the deadline, `limit` is the adapter's answer size. Raises `ServiceError` without an answer.
        """
        held = self._hold(request, call, remaining_seconds)
        async with held as model:
            if is_divided(request, model):
                check_text(request.text, model)
                (generated,) = await self.texts.generate([request], call, model, limit)
            else:
                generated = await self._serve(request, call, model, limit)
            held.is_cached = call.is_cached
            return generated

    async def generate_all(
        self, requests: Sequence[GenerateRequest], call: Call, remaining_seconds: float | None, limit: AnswerLimit | None
    ) -> list[Generated]:
        """Return the answers to texts, blank ones included, whose requests differ only in them, and divide them; as `generate`."""
        held = self._hold(requests[0], call, remaining_seconds)
        async with held as model:
            if requests[0].markup or requests[0].keep_placeholders:
                is_divided(requests[0], model)  # which refuses what cannot be
            generated = await self.texts.generate(requests, call, model, limit)
            held.is_cached = call.is_cached
            return generated

    async def _serve(self, request: GenerateRequest, call: Call, model: "LoadedModel", limit: AnswerLimit | None) -> Generated:
        sequence, template, is_truncated, terms = await self._admit(request, call, model, limit)
        if not self.has_scores:
            search = msgspec.structs.replace(sequence.search, has_log_probs=False)
            sequence = msgspec.structs.replace(sequence, search=search)
        key = self._results.key(request, model, sequence)
        found = await _in_time(self._results.find_or_compute(key, sequence, model.engine.generate), sequence)
        finished = self._finish(call, model, sequence, found)
        if sequence.text_range is not None and not model.manifest.alignment:
            answers = [await self._aligned(answer, call, model, sequence) for answer in finished.answers]
            finished = msgspec.structs.replace(finished, answers=answers)
        return to_generated(request, call, model, sequence, template, finished, is_truncated=is_truncated, terms=terms)

    async def _aligned(
        self, answer: messages.Answer, call: Call, model: "LoadedModel", sequence: messages.Request
    ) -> messages.Answer:
        """Return an answer with the alignment of its tokens by the scorer's attention."""
        assert sequence.text_range is not None
        target_ids = [*answer.token_ids, model.manifest.eos_id][: model.manifest.max_target_tokens]
        request = messages.ScoreRequest(
            id=model.engine.next_id(),
            source_ids=sequence.source_ids,
            target_ids=target_ids,
            arrival=time.monotonic(),
            deadline=sequence.deadline,
            priority=sequence.priority,
            is_aligned=True,
            share=sequence.share,
            decoder_start_id=sequence.decoder_start_id,
        )
        scored = await _in_time(model.engine.score(request), request)
        if isinstance(scored, messages.Finished) or scored.reason != "eos":
            raise error_of(scored, call)
        weights = np.frombuffer(scored.alignment, np.float32).reshape(len(target_ids), len(sequence.source_ids))
        alignment = weights[: len(answer.token_ids), slice(*sequence.text_range)].argmax(1).tolist()
        return msgspec.structs.replace(answer, alignment=alignment)

    @asynccontextmanager
    async def stream(
        self, request: GenerateRequest, call: Call, remaining_seconds: float | None = None, limit: AnswerLimit | None = None
    ) -> AsyncIterator[AsyncIterator[Piece]]:
        """Yield an iterator over the answer's pieces, the last with the whole answer; arguments and errors as `generate`.

        Leaving the `with` frees the slots at the engine's next step. A dropped generator would be closed only by the garbage
        collector; for the same reason adapters write pieces where they iterate, and do not yield them.
        """
        held = self._hold(request, call, remaining_seconds)
        async with held as model, aclosing(self._pieces(request, call, model, limit)) as pieces:
            yield pieces
            held.is_cached = call.is_cached

    async def _pieces(
        self, request: GenerateRequest, call: Call, model: "LoadedModel", limit: AnswerLimit | None
    ) -> AsyncGenerator[Piece, None]:
        if is_divided(request, model):
            check_text(request.text, model)
            async with aclosing(self.texts.stream(request, call, model, limit)) as found:
                async for piece in found:
                    yield piece
            return
        sequence, template, is_truncated, terms = await self._admit(request, call, model, limit, is_streamed=True)
        complete = partial(to_generated, request, call, model, sequence, template, is_truncated=is_truncated, terms=terms)
        key = self._results.key(request, model, sequence)
        if (hit := self._results.find(key)) is not None:
            result = complete(self._finish(call, model, sequence, hit))
            yield Piece(result.best.text, result.best.tokens, result)
            return
        detokenizer = detokenizer_after(model.tokenizers.target, template.before(sequence))
        texts: list[str] = []
        num_sent = 0
        events = model.engine.stream(sequence)
        async with aclosing(events):
            while not isinstance(event := await _in_time(anext(events), sequence), messages.Finished):
                texts.append(detokenizer.push(event.token_ids))
                num_sent += len(event.token_ids)
                call.generated_tokens = num_sent  # in case the caller disconnects
                yield Piece(texts[-1], event.token_ids)
        self._finish(call, model, sequence, event)
        self._results.keep(key, event)
        rest = event.answers[0].token_ids[num_sent:]
        texts.append(detokenizer.push(rest) + detokenizer.finish())
        text = "".join(texts)
        yield Piece(texts[-1], rest, complete(event, text))

    async def score(
        self, request: ScoreRequest, call: Call, remaining_seconds: float | None = None, limit: AnswerLimit | None = None
    ) -> Scores:
        """Return the scores of a target; arguments and errors as `generate`."""
        async with self._hold(request, call, remaining_seconds) as model:
            sequence, template = await self.validator.validate_score(request, call, model, limit)
            self._charge(call, model, sequence, template, len(sequence.target_ids))
            scored = await _in_time(model.engine.score(sequence), sequence)
            if isinstance(scored, messages.Finished):
                scored = messages.Scored(sequence.id, "deadline", [], b"", scored.ended)
            if call.span is not None:
                call.span.add_scoring(model.version, scored)
                call.span.add_languages(template.source_language, template.target_language)
            if scored.reason != "eos":
                raise error_of(scored, call)
            call.count_answer = partial(self._metrics.observe_scored, model.name, sequence, call.source_tokens, scored)
            return to_scores(request, call, model, sequence, template, scored)

    def _hold(self, request: GenerateRequest | ScoreRequest, call: Call, remaining_seconds: float | None) -> "Held":
        """Return a context that holds the request's model, loading it if needed; check permission and priority first."""
        if call.not_entered is not None:
            raise call.not_entered
        name, version = self._name_of(request, call.caller), check_length("model_version", request.model_version)
        model = self._models.get(name, version)
        call.model = model.name
        bind_contextvars(model=model.name)
        if call.caller is not None:
            call.caller.check_priority(request.priority)
        highest = model.traits.max_priority
        if highest is not None and request.priority > highest:
            raise InvalidRequest("priority", f"{request.priority} is above {highest}, max_priority of model {model.name}")
        remaining_seconds, call.deadline_limit = self.deadlines(call).time_left(call.arrival, remaining_seconds)
        if remaining_seconds is not None:
            call.deadline = time.monotonic() + remaining_seconds
        return self._models.hold(name, version, call.request_id, call.share.caller, remaining_seconds)

    async def _admit(
        self,
        request: GenerateRequest,
        call: Call,
        model: "LoadedModel",
        limit: AnswerLimit | None,
        *,
        is_streamed: bool = False,
    ) -> tuple[messages.Request, PromptTemplate, bool, Sequence[Match]]:
        """Check the queue, then validate, tokenise and charge; returns as `Validator.validate`."""
        try:
            model.engine.ensure_place(call.share)
        except QueueFull as full:  # the queue is full, or the caller's part of it
            if not full.limit or call.caller is None:
                raise
            raise place_refused(call.caller, full.limit, full.retry_after_seconds) from None
        validated = await self.validator.validate(request, call, model, limit, is_streamed=is_streamed)
        sequence, template, _, _ = validated
        if call.caller is not None:
            search = sequence.search
            field = "num_beams" if search.num_beams > 1 else "num_return_sequences"
            call.caller.check_slots(search.num_slots, "terms" if search.terms and request.num_beams is None else field)
        self._charge(call, model, sequence, template)
        if call.span is not None:
            call.span.describe(model.version, sequence)
            call.span.add_languages(template.source_language, template.target_language)
        return validated

    def _charge(
        self,
        call: Call,
        model: "LoadedModel",
        sequence: messages.Request | messages.ScoreRequest,
        template: PromptTemplate,
        num_target_tokens: int = 0,
    ) -> None:
        is_charged, call.source_tokens = call.source_tokens > 0, template.num_source_tokens(sequence.source_ids)
        if call.caller is not None and not is_charged:  # a segment may be queued several times
            call.caller.read(call.source_tokens + num_target_tokens)

    def _finish(
        self, call: Call, model: "LoadedModel", sequence: messages.Request, found: messages.Finished | Hit
    ) -> messages.Finished:
        """Record the outcome and return it; without an answer, count the tokens at once and raise the error."""
        if isinstance(found, Hit):
            call.generated_tokens, call.is_cached = found.finished.num_generated, True
            call.count_answer = partial(self._metrics.observe_hit, model.name, sequence, *found)
            return found.finished
        finished = found
        call.generated_tokens = finished.num_generated or call.generated_tokens  # what was streamed, if the engine is lost
        if call.span is not None:
            call.span.add_phases(finished)
        count = partial(self._metrics.observe_finished, model.name, sequence, call.source_tokens, finished)
        if finished.reason not in ANSWERS:
            count()
            raise error_of(finished, call)
        if finished.admitted is not None:
            model.use.queue_seconds += finished.admitted - sequence.arrival
        call.count_answer = count
        return finished

    def models(self, caller: Caller | None = None) -> "Sequence[LoadedModel]":
        """Return the models that a caller may use, sorted by name; all without a caller."""
        models = self._models.all()
        if caller is None or caller.models is None:
            return models
        return [model for model in models if model.name in caller.models]

    def model(self, name: str, caller: Caller | None = None, version: str = "") -> "LoadedModel":
        """Return a model by name; an empty name means the only model. Models not permitted to the caller are unknown.

        Raises:
            InvalidRequest: If the name or the version is malformed.
            UnknownModel: If the caller may use no such model.
            UnknownVersion: If the model is not served in this version.
            NotReady: If no version can answer for now, and this may be one of them.
        """
        return self._models.get(self._permitted(name, caller), check_length("model_version", version))

    def model_for(self, request: GenerateRequest | ScoreRequest, caller: Caller | None = None) -> "LoadedModel":
        """Return the model for a request; errors as `model` and `choose_model`."""
        return self.model(self._name_of(request, caller), caller, request.model_version)

    def _name_of(self, request: GenerateRequest | ScoreRequest, caller: Caller | None) -> str:
        """Return the name of the request's model: as given, or chosen by its languages."""
        if not request.model and request.target_language and len(models := self.models(caller)) > 1:
            return choose_model(models, request.source_language, request.target_language).name
        return self._permitted(request.model, caller)

    def _permitted(self, name: str, caller: Caller | None) -> str:
        """Return the permitted model name; raises as `model`."""
        name = check_length("model", name)
        if caller is None or caller.models is None:
            return name
        names = [model.name for model in self.models(caller)]
        if not name and len(names) == 1:
            return names[0]
        if name not in names:
            raise UnknownModel(name, names)
        return name

    def deadlines(self, call: Call) -> Deadlines:
        """Return the deadlines of a call: its caller's or the server's."""
        return self._deadlines if call.caller is None else call.caller.deadlines

    def max_characters(self) -> int:
        """Return the most characters of a text worth reading: one more than could be divided, or any model could use."""
        return max([self.texts.max_characters, *map(self.validator.max_characters, self._models.all())]) + 1


async def _in_time(outcome: Awaitable[Outcome], sequence: messages.Request | messages.ScoreRequest) -> Outcome | messages.Finished:
    """Wait for the engine, which enforces deadlines itself unless it hangs."""
    if sequence.deadline is None:
        return await outcome
    try:
        async with asyncio.timeout_at(sequence.deadline + HANG_SECONDS):
            return await outcome
    except TimeoutError:
        return messages.Finished(sequence.id, "deadline", [], 0, None, 0.0, None, time.monotonic())


def choose_model(models: "Sequence[LoadedModel]", source_language: str, target_language: str) -> "LoadedModel":
    """Return the only model for a language pair, or for just this pair; raise `InvalidRequest` for several, else `UnknownPair`."""
    check_length("source_language", source_language)
    check_length("target_language", target_language)
    able = [model for model in models if model.templates.is_able(source_language, target_language)]
    if len(able) > 1 and source_language:
        able = [model for model in able if is_of_one_pair(model)] or able
    if len(able) == 1:
        return able[0]
    pair = f"from {shown(source_language)} to {shown(target_language)}" if source_language else f"to {shown(target_language)}"
    if not able:
        raise UnknownPair(pair, pairs_of(models))
    raise InvalidRequest("model", f"is missing; {len(able)} translate {pair}: {listed([model.name for model in able])}")


def is_of_one_pair(model: "LoadedModel") -> bool:
    """Return whether a model has exactly one source and one target language."""
    return len(model.templates.source_languages) == len(model.templates.target_languages) == 1


def pairs_of(models: "Sequence[LoadedModel]") -> str:
    """Return the pairs that models translate, for people: `en to de (en-de)`; models without languages are left out."""
    pairs: list[str] = []
    num_characters = 0
    translating = [model for model in models if model.templates.target_languages]
    for model in translating:
        sides = (model.templates.source_languages, model.templates.target_languages)
        source, target = (listed([x.code for x in side], MAX_LISTED_CHARACTERS // 4) or "anything" for side in sides)
        pairs.append(f"{source} to {target} ({model.name})")
        num_characters += len(pairs[-1])
        if num_characters > MAX_LISTED_CHARACTERS and len(pairs) < len(translating):
            pairs.append(f"and those of {len(translating) - len(pairs)} more")
            break
    return "; ".join(pairs)
