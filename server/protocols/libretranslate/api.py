"""LibreTranslate's API: https://docs.libretranslate.com."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn

import msgspec
from aiohttp import web
from structlog.contextvars import bind_contextvars

from dragoman.server.errors import InvalidRequest, NotReady, ServiceError
from dragoman.server.protocols.bulk import Items
from dragoman.server.protocols.http.middleware import own_ending
from dragoman.server.protocols.http.origins import Origins
from dragoman.server.protocols.http.requests import Endpoint, Exchange
from dragoman.server.protocols.http.responses import HttpRefusal, headers_of, status_of
from dragoman.server.protocols.libretranslate.languages import ALIASES, Detected, Detector, LibreLanguages
from dragoman.server.protocols.libretranslate.reading import JSON, Asked, Reader, key_of, shown
from dragoman.server.protocols.v1.messages import MessageLimit
from dragoman.server.service.callers import Caller
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT
from dragoman.server.service.outcomes import RETRY_SECONDS
from dragoman.server.service.ports import Model
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.routing import is_of_one_pair
from dragoman.server.service.sentences import Slices, pieces_of, put_together
from dragoman.server.service.service import Core


class Wanted(NamedTuple):
    """What is wanted of each text.

    Attributes:
        model: What is to translate.
        source: Its language, by any of its spellings.
        target: Language of the answer.
        num_alternatives: Answers beside the best one.
    """

    model: Model
    source: str
    target: str
    num_alternatives: int = 0

    @property
    def num_beams(self) -> int | None:
        """Width of the search; None for the model's."""
        if not self.num_alternatives:
            return None
        return max(self.num_alternatives + 1, self.model.manifest.defaults.num_beams or 1)

    def request(self, text: str) -> GenerateRequest:
        """Return the request for a text."""
        num_answers = self.num_alternatives + 1 if self.num_alternatives else None
        return GenerateRequest(
            model=self.model.name,
            text=text,
            num_beams=self.num_beams,
            num_return_sequences=num_answers,
            source_language=self.source,
            target_language=self.target,
        )


def most_alternatives(model: Model, caller: Caller | None) -> int:
    """Return how many answers beside the best one a caller may want of a model."""
    most = None if caller is None else caller.limits.max_slots
    return min(model.max_slots_per_request, most or model.max_slots_per_request) - 1


class Translation:
    """Has a model translate the texts of calls."""

    def __init__(self, core: Core, max_bytes: int) -> None:
        """Translate with the core's models; answers of a call have at most so many bytes together."""
        self._generation, self._records = core.generation, core.calls.records
        self._max_bytes, self._limit = max_bytes, MessageLimit(max_bytes)

    async def of_all(self, texts: Sequence[str], wanted: Wanted, exchange: Exchange, num_kept: int = 0) -> Sequence[list[str]]:
        """Return the answers of each text, the best one first.

        Args:
            texts: To be translated.
            wanted: What is wanted of each.
            exchange: The call.
            num_kept: Characters beside these that each answer of the call will have.

        Raises:
            ServiceError: If one has none.
        """
        call = exchange.call
        assert call.window is not None
        call.is_counted = False  # from now on its requests are
        run = _Run(wanted, Items(self._records, call, own_ending), exchange, self._seconds(exchange), self._max_bytes)
        run.count_bytes(num_kept * (wanted.num_alternatives + 1))

        async def translate(index: int) -> list[str]:
            answers = await self._one(texts[index], index, run)
            run.count(answers)
            return answers

        return await call.window.run_each(len(texts), translate, _num_in_hand(wanted, call.caller))

    def _seconds(self, exchange: Exchange) -> float | None:
        """Return when the call has to have its answer, in seconds since it came, for all of its requests; None for any time."""
        call, left = exchange.call, exchange.remaining_seconds
        seconds, _ = self._generation.deadlines(call).time_left(call.arrival, left)
        return None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def _one(self, text: str, index: int, run: "_Run") -> list[str]:
        """Serve one request, with a record of its own; its tokens count for the call's too."""
        whole = run.exchange.call
        bind_contextvars(item=index)
        # The same version of a model answers all of them, which is why they have the call's id.
        with run.items.recorded(whole.request_id, is_part=True) as call:
            try:
                seconds = None if run.until is None else run.until - asyncio.get_running_loop().time()
                generated = await self._generation.generate(run.wanted.request(text), call, seconds, self._limit)
            finally:
                whole.model = call.model
        return [answer.text for answer in generated.answers]


class _Run:
    """One call's texts on their way."""

    def __init__(self, wanted: Wanted, items: Items, exchange: Exchange, until: float | None, max_bytes: int) -> None:
        self.wanted, self.items, self.exchange, self.until = wanted, items, exchange, until
        self._max_bytes, self._num_bytes = max_bytes, 0

    def count(self, answers: Sequence[str]) -> None:
        """Count answers; errors as `count_bytes`."""
        self.count_bytes(sum(len(answer.encode(errors="replace")) for answer in answers))

    def count_bytes(self, number: int) -> None:
        """Count what will be sent.

        Raises:
            InvalidRequest: If all together is more than can be.
        """
        self._num_bytes += number
        if self._num_bytes > self._max_bytes:
            raise InvalidRequest("q", f"answers have more than {self._max_bytes} bytes, max_message_bytes of the server")


def _num_in_hand(wanted: Wanted, caller: Caller | None) -> int:
    """Return how many requests of a call run or wait at a time: no more than its caller's limits let in."""
    most = max(1, REQUESTS_PER_SLOT * wanted.model.max_slots // (wanted.num_beams or 1))
    return most if caller is None else min(most, caller.most_at_once or most)


AUTO = "auto"
# Sentences of a call, and stops that end none.
MAX_PIECES = 4096
MAX_STOPS = 64 * MAX_PIECES
# As LibreTranslate has them, where that differs from everybody else's.
STATUSES = {"UNAUTHENTICATED": HTTPStatus.FORBIDDEN, "NOT_FOUND": HTTPStatus.BAD_REQUEST, "UNIMPLEMENTED": HTTPStatus.BAD_REQUEST}
# What a refusal names as the core does, and LibreTranslate's callers do not know.
FIELDS = {"text": "q", "source_language": "source", "target_language": "target"}
# How long a page waits while somebody types.
FRONTEND_MILLISECONDS = 500


class LibreApi:
    """Answers what LibreTranslate does; a `Manner`."""

    def __init__(self, core: Core, max_message_bytes: int, origins: Origins) -> None:
        """Serve what the core does.

        Args:
            core: What answers.
            max_message_bytes: Bytes of all answers of a call together.
            origins: Whose pages may send forms.
        """
        self._core, self._generation = core, core.generation
        self._reader = Reader(origins)
        self._translation = Translation(core, max_message_bytes)
        self._languages = LibreLanguages()
        self._detector = Detector()
        self._slices = Slices()

    def endpoints(self) -> Iterable[Endpoint]:
        """Return what it answers."""
        reads = self._reader.read
        return (
            Endpoint("POST", "/translate", self.translate, reads, is_counted=True, has_items=True, key_of=key_of),
            Endpoint("POST", "/detect", self.detect, reads, key_of=key_of),
            Endpoint("GET", "/languages", self.languages, is_open=True),
            Endpoint("GET", "/frontend/settings", self.settings, is_open=True),
            Endpoint("GET", "/health", self.health, is_open=True, is_awaited=False),
            Endpoint("POST", "/translate_file", _not_offered, is_open=True),
            Endpoint("POST", "/suggest", _not_offered, is_open=True),
        )

    async def translate(self, exchange: Exchange) -> web.Response:
        """Answer with translations of one text or several."""
        asked: Asked = exchange.message
        caller = exchange.call.caller
        _check(asked)
        target = ALIASES.get(asked.target.lower(), asked.target)
        source, detected = await self._source(asked, target, caller)
        if self._is_same(source, target, caller):
            answers = [[text] for text in asked.texts]
        else:
            model = self._generation.model_for(
                GenerateRequest(model=asked.model, source_language=source, target_language=target), caller
            )
            if asked.alternatives > (most := most_alternatives(model, caller)):
                raise InvalidRequest("alternatives", f"{asked.alternatives} is more than {most}, which model {model.name} can give")
            answers = await self._answers(asked.texts, Wanted(model, source, target, asked.alternatives), exchange)
        return await _json(_told(asked, answers, detected))

    async def _answers(self, texts: Sequence[str], wanted: Wanted, exchange: Exchange) -> list[list[str]]:
        """Return for each text its translation and alternatives to it, each made of those of its pieces."""
        taken: list[list[tuple[str, bool]]] = [[] for _ in texts]
        check = partial(self._generation.check_source_length, model=wanted.model)
        found = _pieces(texts, self._generation.max_characters(wanted.model), check)
        for index, piece, is_translated in await self._slices.collect(found):
            taken[index].append((piece, is_translated))
        wishes = [piece for pieces in taken for piece, is_translated in pieces if is_translated]
        num_kept = sum(len(piece) for pieces in taken for piece, is_translated in pieces if not is_translated)
        given = await self._translation.of_all(wishes, wanted, exchange, num_kept)
        answers, start = [], 0
        for pieces in taken:
            end = start + sum(is_translated for _, is_translated in pieces)
            count = max(map(len, given[start:end]), default=1)
            whole = [put_together(pieces, given[start:end], index) for index in range(min(count, wanted.num_alternatives + 1))]
            answers.append(list(dict.fromkeys(whole)))
            start = end
        return answers

    async def _source(self, asked: Asked, target: str, caller: Caller | None) -> tuple[str, Detected | None]:
        """Return the language of texts, and how sure that is where their caller does not say.

        Raises:
            InvalidRequest: If no model has one of the languages.
            NotOffered: If it would have to be detected, and cannot be.
        """
        models = self._generation.models(caller)
        told = ALIASES.get(asked.source.lower(), asked.source)
        for field, code in (("target", target), ("source", told)):
            if code.lower() != AUTO and not self._languages.find(models, code):
                there = ", ".join(known.code for known in self._languages.all(models)) or "none"
                raise InvalidRequest(field, f"{shown(code)} is not supported; there: {there}"[:500])
        if told.lower() != AUTO:
            return told, None
        sources = self._languages.sources_of(models, target)
        if not sources:
            raise InvalidRequest("target", f"{shown(target)} is not supported: nothing is translated to it")
        if not self._detector.is_there and len(sources) == 1:
            return sources[0], Detected(sources[0], 0.0)
        found = await self._detector.detect(asked.texts, [*sources, self._languages.find(models, target)])
        return found[0].language, found[0]

    def _is_same(self, source: str, target: str, caller: Caller | None) -> bool:
        """Whether there is nothing to translate: both are one language, and no model is there for just that."""
        models = self._generation.models(caller)
        is_one = self._languages.find(models, source) == self._languages.find(models, target)
        return is_one and not any(is_of_one_pair(model) and model.frames.is_able(source, target) for model in models)

    async def detect(self, exchange: Exchange) -> web.Response:
        """Answer with the languages that a text may be in, of those that models have."""
        asked: Asked = exchange.message
        _check_texts(asked)
        codes = [known.code for known in self._languages.all(self._generation.models(exchange.call.caller))]
        return await _json([found._asdict() for found in await self._detector.detect(asked.texts, codes)])

    async def languages(self, exchange: Exchange) -> web.Response:
        """Answer with the languages there are."""
        return await _json([known._asdict() for known in self._languages.all(self._generation.models(exchange.call.caller))])

    async def settings(self, exchange: Exchange) -> web.Response:
        """Answer with what a page needs to know."""
        known = self._languages.all(self._generation.models(exchange.call.caller))
        reads = next((one for one in known if one.targets), None)
        writes = next((one for one in known if reads is not None and one.code in reads.targets), None)
        is_closed = self._core.callers is not None
        return await _json(
            {
                "apiKeys": is_closed,
                "charLimit": -1,
                "filesTranslation": False,
                "frontendTimeout": FRONTEND_MILLISECONDS,
                "keyRequired": is_closed,
                "language": {
                    "source": {"code": reads.code if reads else "", "name": reads.name if reads else ""},
                    "target": {"code": writes.code if writes else "", "name": writes.name if writes else ""},
                },
                "suggestions": False,
                "supportedFilesFormat": [],
            }
        )

    async def health(self, _: Exchange) -> web.Response:
        """Answer whether the server is ready, as the metrics port's `/readyz` does."""
        if not self._core.is_ready:
            raise NotReady("the server is not ready", RETRY_SECONDS)
        return await _json({"status": "ok"})

    def refuse(self, error: ServiceError, request_id: str) -> web.Response:
        """See `Manner`."""
        status = STATUSES.get(error.code, status_of(error)) if not isinstance(error, HttpRefusal) else error.status
        headers = {name: value for name, value in headers_of(error).items() if name != "WWW-Authenticate"}
        body = msgspec.json.encode({"error": _in_its_words(error.message)})
        return web.Response(body=body, status=status, content_type=JSON, headers=headers)

    def error_event(self, error: ServiceError, request_id: str) -> tuple[str, str]:
        """See `Manner`; it sends no events."""
        raise AssertionError("nothing is streamed")


async def _not_offered(_: Exchange) -> NoReturn:
    raise HttpRefusal(HTTPStatus.FORBIDDEN, "files and suggestions are not taken here")


def _in_its_words(message: str) -> str:
    """Return what went wrong, with the field that it names called as LibreTranslate calls it."""
    field, colon, reason = message.partition(": ")
    return f"{FIELDS.get(field, field)}{colon}{reason}"


def _check(asked: Asked) -> None:
    """Refuse what misses a field, and formats that are not read.

    Raises:
        InvalidRequest: Naming the field.
    """
    _check_texts(asked)
    for field in ("source", "target"):
        if not getattr(asked, field):
            raise InvalidRequest(field, "is missing")
    if asked.format == "html":
        raise InvalidRequest("format", "html is not translated here, for tags could not be kept in their places; send text")
    if asked.format not in ("", "text"):
        raise InvalidRequest("format", f"{shown(asked.format)} is not supported")


def _check_texts(asked: Asked) -> None:
    if not asked.texts:
        raise InvalidRequest("q", "is missing")


def _pieces(texts: Sequence[str], max_characters: int, check: Callable[[str], None]) -> Iterator[tuple[int, str, bool] | None]:
    """Yield the index of a text, a piece of it, and whether that is to be translated; None for a piece that is empty.

    Args:
        texts: To be translated.
        max_characters: Of a piece; no end of a sentence is looked for after so many.
        check: Raises what a piece that is too long is refused with.

    Raises:
        InvalidRequest: If a piece is too long, or more are to be translated than may be at once.
    """
    count = num_empty = 0
    for index, text in enumerate(texts):
        for piece, is_translated in pieces_of(text, max_characters):
            num_empty += not piece
            if is_translated:
                check(piece)
                count += 1
            if count > MAX_PIECES or num_empty > MAX_STOPS:
                raise InvalidRequest("q", f"more than {MAX_PIECES} sentences; send fewer at once")
            yield (index, piece, is_translated) if piece else None


def _told(asked: Asked, answers: Sequence[Sequence[str]], detected: Detected | None) -> dict[str, Any]:
    """Return what is answered, in lists where `q` is one."""
    translated = [best for best, *_ in answers]
    told: dict[str, Any] = {"translatedText": translated if asked.is_list else translated[0]}
    if detected is not None:
        told["detectedLanguage"] = [detected._asdict()] * len(translated) if asked.is_list else detected._asdict()
    if asked.alternatives:
        others = [[other for other in rest if other] for _, *rest in answers]
        told["alternatives"] = others if asked.is_list else others[0]
    return told


async def _json(told: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(told), content_type=JSON)
