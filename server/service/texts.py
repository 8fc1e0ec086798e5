"""Texts of any length: divided into segments, each a request of its own, whose answers are put together again.

The segments of a call share its model version, deadline, caller and limits of requests; they are queued beside other callers'
requests and cancelled together. Each has a span and counts in the metrics, the call has the line of the access log.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from dragoman.server.errors import InvalidRequest, LimitReached, QueueFull, ServiceError
from dragoman.server.service.answers import Answer, AnswerLimit, Generated, Piece, Segment, Timings, shortlist_tokens
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT, InFlight
from dragoman.server.service.languages import shown
from dragoman.server.service.requests import SEED_BITS, SPLITS, GenerateRequest, with_defaults
from dragoman.server.service.sentences import Slices, split_text, trimmed
from dragoman.server.service.validation import Validator

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest
    from dragoman.server.models.loaded import LoadedModel

# Least bytes of a log-probability in a message, and parts of a text prepared or joined before yielding to other tasks.
LOG_PROB_BYTES, PARTS_PER_TURN = 9, 512
# Poll interval of a segment for which the queue has no place.
PLACE_SECONDS = 0.02

T = TypeVar("T")
Serve = Callable[[GenerateRequest, Call, "LoadedModel", AnswerLimit | None], Awaitable[Generated]]


class Part(NamedTuple):
    """A part of a text: a segment, or what is kept as it is."""

    text: str
    is_translated: bool
    is_cut: bool = False  # whether its sentence goes on in the next segment


def is_split(request: GenerateRequest, model: "LoadedModel") -> bool:
    """Return whether a text is to be divided, by the request or the model's default; raise `InvalidRequest` if it cannot be."""
    has_prompts = model.manifest.has_prompts
    asked = request.split or ("" if has_prompts else model.traits.split) or SPLITS[0]
    if asked not in SPLITS:
        raise InvalidRequest("split", f"{shown(asked)} is not one of {', '.join(SPLITS)}")
    if asked == SPLITS[0]:
        return False
    if has_prompts:
        raise InvalidRequest("split", f"model {model.name} continues prompts, which are not divided")
    return True


class Texts:
    """Division of texts, and generation for their segments with `serve`."""

    def __init__(self, calls: RunningCalls, in_flight: InFlight, validator: Validator, serve: Serve, max_characters: int) -> None:
        """Use `serve` for each segment, with a call of its own if there are several; `max_characters` limit the texts of a call."""
        self.max_characters = max_characters
        self._calls, self._in_flight, self._validator, self._serve = calls, in_flight, validator, serve
        self._slices = Slices()

    async def generate(
        self, requests: Sequence[GenerateRequest], call: Call, model: "LoadedModel", limit: AnswerLimit | None
    ) -> list[Generated]:
        """Return the answers to texts that differ only in `text`; the first failure is raised, naming the segment."""
        texts = [parts async for parts in self._divided(requests, call, model)]
        async with aclosing(self._answers(requests[0], texts, call, model, limit)) as found:
            answered = [generated async for generated in found]
        remaining, least = iter(answered), _num_answers(requests[0], model.manifest)
        return [await _joined(parts, remaining, least, call, model) for parts in texts]

    async def stream(
        self, request: GenerateRequest, call: Call, model: "LoadedModel", limit: AnswerLimit | None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the answer to a text segment by segment, in order."""
        (parts,) = [parts async for parts in self._divided([request], call, model)]
        answered, kept = list[Generated](), ""
        async with aclosing(self._answers(request, [parts], call, model, limit)) as answers:
            for part in parts:
                if part.is_translated:
                    answered.append(await anext(answers))
                    yield Piece(kept + answered[-1].best.text, answered[-1].best.tokens)
                    kept = ""
                else:
                    kept += part.text
            async for _ in answers:  # which ends what it counts
                pass
        least = _num_answers(request, model.manifest)
        yield Piece(kept, (), await _joined(parts, iter(answered), least, call, model))

    async def _divided(self, requests: Sequence[GenerateRequest], call: Call, model: "LoadedModel") -> AsyncIterator[list[Part]]:
        if sum(len(request.text) for request in requests) > self.max_characters:
            raise InvalidRequest("text", f"more than {self.max_characters} characters, max_text_characters of the server")
        for request in requests:
            is_by_line = (request.split or model.traits.split) == "lines"
            found = (part if part[0] else None for part in split_text(request.text, is_by_line=is_by_line))
            parts = list[Part]()
            for number, (text, is_translated) in enumerate(await self._slices.collect(found, call.owner)):
                if number % PARTS_PER_TURN == 0:
                    await asyncio.sleep(0)
                cut = await self._validator.cut_source(text, request, model) if is_translated else [text]
                if len(cut) > 1:
                    for piece in cut[:-1]:
                        parts += (Part(*one, is_cut=True) for one in trimmed(piece))
                    parts += (Part(*one) for one in trimmed(cut[-1]))
                else:
                    parts.append(Part(text, is_translated))
            yield parts

    async def _answers(
        self,
        request: GenerateRequest,
        texts: Sequence[Sequence[Part]],
        call: Call,
        model: "LoadedModel",
        limit: AnswerLimit | None,
    ) -> AsyncGenerator[Generated, None]:
        """Yield the answers to the segments of all texts in order; a single one is the call's own request."""
        segments = await self._slices.collect(_segments(request, texts, model.manifest), call.owner)
        num_kept = sum(len(_bytes(part.text)) for part in chain(*texts) if not part.is_translated)
        size = _Size(limit, request, num_kept * _num_answers(request, model.manifest))
        if not segments:
            await self._validator.validate(replace(request, text="a", split=SPLITS[0]), call, model, limit)
            return
        if len(segments) == 1:
            generated = await self._serve(segments[0][0], call, model, limit)
            size.add(generated)
            yield generated
            return
        call.is_counted = False  # its segments are, until one fails
        has_failed, num_cached = False, 0
        answers: dict[int, Generated] = {}
        news, turn = asyncio.Event(), asyncio.Lock()

        async def serve(number: int) -> None:
            nonlocal has_failed, num_cached
            segment, place = segments[number]
            try:
                with self._calls.part(call) as part:
                    try:
                        answer = await self._in_turn(segment, part, model, limit, turn, may_be_refused=not (number or call.is_item))
                    except Exception:
                        has_failed = True
                        raise
                    num_cached += part.is_cached
                size.add(answer)
            except ServiceError as error:
                raise error.copy(f"{error.message} ({place})") from None
            answers[number] = answer
            news.set()

        with self._in_flight.window(call.owner) as window:
            running = asyncio.create_task(window.run_each(len(segments), serve, _max_at_once(segments, call, model)))
            running.add_done_callback(lambda _: news.set())
            try:
                for number in range(len(segments)):
                    while number not in answers:
                        if running.done():
                            await running
                        news.clear()
                        await news.wait()
                    yield answers.pop(number)
            finally:
                call.is_counted, call.is_cached = not has_failed, num_cached == len(segments)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _in_turn(
        self,
        segment: GenerateRequest,
        part: Call,
        model: "LoadedModel",
        limit: AnswerLimit | None,
        turn: asyncio.Lock,
        *,
        may_be_refused: bool,
    ) -> Generated:
        """Return the answer to a segment; unless it may be refused, wait while the queue has no place for it."""
        while True:
            if not may_be_refused:
                async with turn:
                    await _until_place(part, model)
            try:
                return await self._serve(segment, part, model, limit)
            except (QueueFull, LimitReached):
                if may_be_refused or (part.deadline is not None and time.monotonic() >= part.deadline):
                    raise
            await asyncio.sleep(PLACE_SECONDS)


def _segments(
    request: GenerateRequest, texts: Sequence[Sequence[Part]], manifest: "Manifest"
) -> Iterator[tuple[GenerateRequest, str]]:
    """Yield the request for each segment, and its place for errors; samples of all have the same seed, as each alone."""
    shared = replace(request, split=SPLITS[0], forced_prefix="")
    filled = with_defaults(request, manifest.defaults, 2)
    if filled.do_sample and filled.temperature != 0 and request.seed is None:
        shared = replace(shared, seed=secrets.randbits(SEED_BITS), no_cache=True)
    for number, parts in enumerate(texts, start=1):
        end, is_first = 0, True
        for part in parts:
            end += len(part.text)
            if part.is_translated:
                of_text = f" of text {number}" if len(texts) > 1 else ""
                own = replace(shared, text=part.text, forced_prefix=request.forced_prefix if is_first else "")
                yield own, f"characters {end - len(part.text)} to {end}{of_text}"
                is_first = False


def _num_answers(request: GenerateRequest, manifest: "Manifest") -> int:
    return with_defaults(request, manifest.defaults, 2).num_return_sequences or 1


def _max_at_once(segments: Sequence[tuple[GenerateRequest, str]], call: Call, model: "LoadedModel") -> int:
    """Return how many segments run or wait at once, within the caller's limits."""
    request, manifest = segments[0][0], model.manifest
    num_slots = max(with_defaults(request, manifest.defaults, 2).num_beams or 1, _num_answers(request, manifest))
    most = max(1, REQUESTS_PER_SLOT * model.max_slots // num_slots)
    return most if call.caller is None else min(most, call.caller.most_at_once or most)


async def _until_place(call: Call, model: "LoadedModel") -> None:
    """Wait until the queue has a place."""
    while call.deadline is None or time.monotonic() < call.deadline:
        try:
            model.engine.ensure_place(call.share)
        except QueueFull:
            await asyncio.sleep(PLACE_SECONDS)
        else:
            return


class _Size:
    """Least bytes of a call's answers so far, which are refused as soon as they are too large to be sent."""

    def __init__(self, limit: AnswerLimit | None, request: GenerateRequest, num_bytes: int) -> None:
        """Start with the bytes that are kept as they are; raise as `add`."""
        self._limit, self._has_log_probs, self._num_bytes = limit, request.has_log_probs, 0
        self._num_told = 1 + request.top_log_probs
        self._count(num_bytes)

    def add(self, generated: Generated) -> None:
        """Count the answers to a segment; raise `InvalidRequest` if all are too large."""
        for answer in generated.answers:
            told = len(answer.log_probs) * self._num_told if self._has_log_probs else 0
            self._count(len(_bytes(answer.text)) + told * LOG_PROB_BYTES)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        limit = self._limit
        if limit is not None and self._num_bytes > limit.max_bytes:
            raise InvalidRequest("text", f"its answers have more than {limit.max_bytes} bytes, {limit.name} of the server")


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


class _Chain(Collection[T]):
    """Collections one after the other, without a copy."""

    def __init__(self, parts: Sequence[Collection[T]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, wanted: object) -> bool:
        return any(wanted in part for part in self._parts)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)


async def _joined(parts: Sequence[Part], remaining: Iterator[Generated], least: int, call: Call, model: "LoadedModel") -> Generated:
    """Return the answer to a text, yielding to the event loop; `remaining` are the answers to its segments, and to later texts'.

    `least` is the number of answers of a text without segments.
    """
    answered, segments = list[Generated](), list[Segment]()
    source = target = 0
    for number, part in enumerate(parts):
        text = part.text
        if part.is_translated:
            answered.append(next(remaining))
            best = answered[-1].best
            text = best.text
            segments.append(Segment(source, source + len(part.text), target, target + len(text), best.score, part.is_cut))
        source, target = source + len(part.text), target + len(text)
        if number % PARTS_PER_TURN == 0:
            await asyncio.sleep(0)
    timings = [one.timings for one in answered]
    answers = list[Answer]()
    for rank in range(max((len(one.answers) for one in answered), default=least)):
        answers.append(_answer(parts, [_ranked(one, rank) for one in answered]))
        await asyncio.sleep(0)
    return Generated(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        answers=answers,
        is_truncated=any(one.is_truncated for one in answered),
        source_tokens=sum(one.source_tokens for one in answered),
        generated_tokens=sum(one.generated_tokens for one in answered),
        timings=Timings(
            queue_seconds=sum(one.queue_seconds for one in timings),
            prefill_seconds=sum(one.prefill_seconds for one in timings),
            decode_seconds=sum(one.decode_seconds for one in timings),
            time_to_first_token_seconds=timings[0].time_to_first_token_seconds if timings else 0.0,
            total_seconds=time.monotonic() - call.arrival,
        ),
        seed=answered[0].seed if answered else None,
        shortlist_tokens=shortlist_tokens(model.manifest),
        segments=segments,
    )


def _ranked(generated: Generated, rank: int) -> Answer:
    """Return an answer by rank; the last where there are fewer."""
    return generated.answers[min(rank, len(generated.answers) - 1)]


def _answer(parts: Sequence[Part], answers: Sequence[Answer]) -> Answer:
    """Return the answer to a text from one answer to each of its segments."""
    texts = iter(answers)
    return Answer(
        "".join(next(texts).text if part.is_translated else part.text for part in parts),
        list(chain.from_iterable(answer.tokens for answer in answers)),
        "length" if any(answer.finish_reason == "length" for answer in answers) else "eos",
        sum(answer.score for answer in answers) / max(len(answers), 1),
        _Chain([answer.log_probs for answer in answers]),
    )
