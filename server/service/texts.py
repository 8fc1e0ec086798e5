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
from dragoman.server.service.markup import Markup
from dragoman.server.service.requests import MARKUPS, SEED_BITS, SPLITS, GenerateRequest, with_defaults
from dragoman.server.service.sentences import Slices, on_thread, split_text, trimmed
from dragoman.server.service.tags import Block, Translated
from dragoman.server.service.terms import NUM_BEAMS
from dragoman.server.service.validation import Validator

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest
    from dragoman.server.models.loaded import LoadedModel

# Least bytes of a log-probability in a message, and parts of a text prepared or joined before yielding to other tasks.
LOG_PROB_BYTES, PARTS_PER_TURN = 9, 512
# Longer documents are parsed and rendered on a thread.
INLINE_CHARACTERS = 512
# Poll interval of a segment for which the queue has no place.
PLACE_SECONDS = 0.02

T = TypeVar("T")
Serve = Callable[[GenerateRequest, Call, "LoadedModel", AnswerLimit | None], Awaitable[Generated]]


class Part(NamedTuple):
    """A part of a text: a segment, or what is kept as it is."""

    text: str
    is_translated: bool
    is_cut: bool = False  # whether its sentence goes on in the next segment


class Text(NamedTuple):
    """A divided text: its parts, block by block where it is a document."""

    blocks: Sequence[Sequence[Part]]
    document: Markup | None = None
    source: str = ""  # of a document

    @property
    def parts(self) -> Iterator[Part]:
        """All parts, in order."""
        return chain.from_iterable(self.blocks)


def is_divided(request: GenerateRequest, model: "LoadedModel") -> bool:
    """Return whether a text is to be divided, by the request or the model's default; raise `InvalidRequest` if it cannot be."""
    manifest = model.manifest
    asked = {"split": request.split or ("" if manifest.has_prompts else model.traits.split), "markup": request.markup}
    for field, choice in (("split", SPLITS), ("markup", MARKUPS)):
        if (asked[field] or choice[0]) not in choice:
            raise InvalidRequest(field, f"{shown(asked[field])} is not one of {', '.join(choice)}")
    if request.translate_attributes and not has_markup(request):
        raise InvalidRequest("translate_attributes", "has no effect without markup")
    wanted = [field for field in asked if asked[field] not in ("", "none")] + ["keep_placeholders"] * request.keep_placeholders
    if wanted and manifest.has_prompts:
        raise InvalidRequest(wanted[0], f"model {model.name} continues prompts, which are not divided")
    if wanted and wanted != ["split"] and not manifest.attention_layers:
        raise InvalidRequest(wanted[-1], f"model {model.name} has no attention between source and target, which places tags")
    return bool(wanted)


def has_markup(request: GenerateRequest) -> bool:
    """Return whether the text is a document."""
    return request.markup not in ("", MARKUPS[0])


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
        texts = [text async for text in self._divided(requests, call, model)]
        async with aclosing(self._answers(requests[0], texts, call, model, limit)) as found:
            answered = [generated async for generated in found]
        remaining, least = iter(answered), _num_answers(requests[0], model.manifest)
        return [await _joined(text, remaining, least, call, model) for text in texts]

    async def stream(
        self, request: GenerateRequest, call: Call, model: "LoadedModel", limit: AnswerLimit | None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the answer to a text segment by segment, in order; that to a document in one piece."""
        (text,) = [text async for text in self._divided([request], call, model)]
        answered, kept = list[Generated](), ""
        async with aclosing(self._answers(request, [text], call, model, limit)) as answers:
            for part in () if text.document else text.parts:
                if part.is_translated:
                    answered.append(await anext(answers))
                    yield Piece(kept + answered[-1].best.text, answered[-1].best.tokens)
                    kept = ""
                else:
                    kept += part.text
            answered += [answer async for answer in answers]  # which ends what it counts
        least = _num_answers(request, model.manifest)
        whole = await _joined(text, iter(answered), least, call, model)
        yield Piece(whole.best.text if text.document else kept, whole.best.tokens if text.document else (), whole)

    async def _divided(self, requests: Sequence[GenerateRequest], call: Call, model: "LoadedModel") -> AsyncIterator[Text]:
        if sum(len(request.text) for request in requests) > self.max_characters:
            raise InvalidRequest("text", f"more than {self.max_characters} characters, max_text_characters of the server")
        for request in requests:
            if not has_markup(request) and not request.keep_placeholders:
                is_whole = request.split == SPLITS[0]
                whole = [Part(request.text, bool(request.text.strip()))] if is_whole else None
                yield Text([whole or await self._parts(request.text, request, call, model)])
                continue
            document = await _by_size(request.text, Markup, request)
            blocks = [await self._parts(block.text, request, call, model) for block in document.blocks]
            yield Text(blocks, document, request.text)

    async def _parts(self, text: str, request: GenerateRequest, call: Call, model: "LoadedModel") -> list[Part]:
        """Divide a text, or a block of a document: one by default into sentences, the other not at all."""
        asked = request.split or model.traits.split or SPLITS[has_markup(request)]
        if asked == SPLITS[0]:
            found: Iterator[tuple[str, bool]] = iter(trimmed(text))
        else:
            found = split_text(text, is_by_line=asked == "lines")
        parts = list[Part]()
        for number, (part, is_translated) in enumerate(
            await self._slices.collect((each if each[0] else None for each in found), call.owner)
        ):
            if number % PARTS_PER_TURN == 0:
                await asyncio.sleep(0)
            cut = await self._validator.cut_source(part, request, model) if is_translated else [part]
            if len(cut) > 1:
                for piece in cut[:-1]:
                    parts += (Part(*one, is_cut=True) for one in trimmed(piece))
                parts += (Part(*one) for one in trimmed(cut[-1]))
            else:
                parts.append(Part(part, is_translated))
        return parts

    async def _answers(
        self,
        request: GenerateRequest,
        texts: Sequence[Text],
        call: Call,
        model: "LoadedModel",
        limit: AnswerLimit | None,
    ) -> AsyncGenerator[Generated, None]:
        """Yield the answers to the segments of all texts in order; a single one is the call's own request."""
        segments = await self._slices.collect(_segments(request, texts, model.manifest), call.owner)
        num_kept = sum(len(_bytes(part.text)) for text in texts for part in text.parts if not part.is_translated)
        for text in texts:  # tags of documents
            num_kept += len(_bytes(text.source)) - sum(len(_bytes(part.text)) for part in text.parts) if text.source else 0
        size = _Size(limit, request, num_kept * _num_answers(request, model.manifest))
        if not segments:
            await self._validator.validate(replace(request, text="a", split=SPLITS[0]), call, model, limit)
            return
        if len(segments) == 1:
            call.is_aligned = segments[0].is_aligned
            generated = await self._serve(segments[0].request, call, model, limit)
            size.add(generated)
            yield generated
            return
        call.is_counted = False  # its segments are, until one fails
        has_failed, num_cached = False, 0
        answers: dict[int, Generated] = {}
        news, turn = asyncio.Event(), asyncio.Lock()

        async def serve(number: int) -> None:
            nonlocal has_failed, num_cached
            segment, place, is_aligned = segments[number]
            try:
                with self._calls.part(call) as part:
                    part.is_aligned = is_aligned
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


class _Segment(NamedTuple):
    """A request for a part of a text, its place for errors, and whether its answer is aligned."""

    request: GenerateRequest
    place: str
    is_aligned: bool


def _segments(request: GenerateRequest, texts: Sequence[Text], manifest: "Manifest") -> Iterator[_Segment]:
    """Yield the segments of texts; samples of all have the same seed, as each alone."""
    plain = replace(request, split=SPLITS[0], markup="", keep_placeholders=False, translate_attributes=False, forced_prefix="")
    filled = with_defaults(request, manifest.defaults, 2)
    if filled.do_sample and filled.temperature != 0 and request.seed is None:
        plain = replace(plain, seed=secrets.randbits(SEED_BITS), no_cache=True)
    for number, text in enumerate(texts, start=1):
        of_text = f" of text {number}" if len(texts) > 1 else ""
        end, prefix = 0, request.forced_prefix
        for index, parts in enumerate(text.blocks):
            if text.document is not None:
                end, of_block = 0, f" of block {index + 1}{of_text}"
            is_aligned = text.document is not None and _has_spans(text.document.blocks[index])
            for part in parts:
                end += len(part.text)
                if part.is_translated:
                    place = f"characters {end - len(part.text)} to {end}{of_text if text.document is None else of_block}"
                    yield _Segment(replace(plain, text=part.text, forced_prefix=prefix), place, is_aligned)
                    prefix = ""


def _num_answers(request: GenerateRequest, manifest: "Manifest") -> int:
    return with_defaults(request, manifest.defaults, 2).num_return_sequences or 1


def num_slots_of(request: GenerateRequest, model: "LoadedModel") -> int:
    """Return the slots that a request will need at most."""
    manifest = model.manifest
    num_slots = max(with_defaults(request, manifest.defaults, 2).num_beams or 1, _num_answers(request, manifest))
    return max(num_slots, NUM_BEAMS) if request.terms or request.glossary or request.indexes or model.traits.glossary else num_slots


def _max_at_once(segments: Sequence[_Segment], call: Call, model: "LoadedModel") -> int:
    """Return how many segments run or wait at once, within the limits of the call and its caller."""
    most = call.max_at_once or max(1, REQUESTS_PER_SLOT * model.max_slots // num_slots_of(segments[0].request, model))
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


async def _joined(text: Text, remaining: Iterator[Generated], least: int, call: Call, model: "LoadedModel") -> Generated:
    """Return the answer to a text, yielding to the event loop; `remaining` are the answers to its segments, and to later texts'.

    `least` is the number of answers of a text without segments. A document has no places of segments.
    """
    answered, segments = list[Generated](), list[Segment]()
    source = target = 0
    for number, part in enumerate(text.parts):
        translation = part.text
        if part.is_translated:
            answered.append(next(remaining))
            best = answered[-1].best
            translation = best.text
            segments.append(Segment(source, source + len(part.text), target, target + len(translation), best.score, part.is_cut))
        source, target = source + len(part.text), target + len(translation)
        if number % PARTS_PER_TURN == 0:
            await asyncio.sleep(0)
    timings = [one.timings for one in answered]
    answers, rendered = list[Answer](), dict[tuple[str, ...], str]()
    for rank in range(max((len(one.answers) for one in answered), default=least)):
        parts = [_ranked(one, rank) for one in answered]
        answer = _answer(text, parts)
        if text.document is not None:
            if (translations := tuple(part.text for part in parts)) not in rendered:
                rendered[translations] = await _by_size(text.source, _rendered, text, parts)
            answer = replace(answer, text=rendered[translations])
        answers.append(answer)
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
        segments=segments if text.document is None else (),
    )


def _ranked(generated: Generated, rank: int) -> Answer:
    """Return an answer by rank; the last where there are fewer."""
    return generated.answers[min(rank, len(generated.answers) - 1)]


def _answer(text: Text, answers: Sequence[Answer]) -> Answer:
    """Return the answer to a text from one answer to each of its segments."""
    texts = iter(answers)
    return Answer(
        "".join(next(texts).text if part.is_translated else part.text for part in text.parts),
        list(chain.from_iterable(answer.tokens for answer in answers)),
        "length" if any(answer.finish_reason == "length" for answer in answers) else "eos",
        sum(answer.score for answer in answers) / max(len(answers), 1),
        _Chain([answer.log_probs for answer in answers]),
        unmet_terms=list(dict.fromkeys(chain.from_iterable(answer.unmet_terms for answer in answers))),
    )


def _has_spans(block: Block) -> bool:
    return bool(block.kept) or len(block.elements) > 1


async def _by_size(text: str, work: Callable[..., T], *arguments: object) -> T:
    """Do work on a text, a long one on a thread."""
    return work(*arguments) if len(text) <= INLINE_CHARACTERS else await on_thread(work, *arguments)


def _rendered(text: Text, answers: Sequence[Answer]) -> str:
    """Return a document with its answers in place of its texts."""
    remaining, blocks = iter(answers), list[list[Translated]]()
    for parts in text.blocks:
        start, found = 0, list[Translated]()
        for part in parts:
            if part.is_translated:
                answer = next(remaining)
                found.append(Translated(start, start + len(part.text), answer.text, answer.links))
            start += len(part.text)
        blocks.append(found)
    assert text.document is not None
    return text.document.render(blocks)
