"""LibreTranslate's API (https://docs.libretranslate.com; differences in docs/call.md).

Texts are split into sentences, each a request with its own record and limits; if one fails, the call fails and the rest are
cancelled.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn

from aiohttp import web
from structlog.contextvars import bind_contextvars

from dragoman.server.errors import InvalidRequest, NotReady
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.protocols.bulk import ItemRecords
from dragoman.server.protocols.http.middleware import own_ending
from dragoman.server.protocols.http.requests import Endpoint, Exchange
from dragoman.server.protocols.http.responses import LIBRETRANSLATE_ERRORS, HttpRefusal, json_response
from dragoman.server.protocols.libretranslate.languages import ALIASES, Detected, Detector, Known, LibreLanguages
from dragoman.server.protocols.libretranslate.reading import Asked, read_request, shown
from dragoman.server.protocols.v1.messages import MessageLimit
from dragoman.server.service.callers import RETRY_SECONDS, Caller
from dragoman.server.service.generate import is_of_one_pair
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.sentences import Slices, join_sentences, split_sentences
from dragoman.server.service.service import Service

AUTO = "auto"
# Limits of one call: sentences, and sentence ends without a sentence.
MAX_PIECES = 4096
MAX_STOPS = 64 * MAX_PIECES
# Typing delay of LibreTranslate's page.
FRONTEND_MILLISECONDS = 500


class Wanted(NamedTuple):
    """Model, languages in any spelling, and number of answers beside the best."""

    model: LoadedModel
    source: str
    target: str
    num_alternatives: int = 0

    @property
    def num_beams(self) -> int | None:
        """Beam width; None for the model's default."""
        if not self.num_alternatives:
            return None
        return max(self.num_alternatives + 1, self.model.manifest.defaults.num_beams or 1)

    def request(self, text: str) -> GenerateRequest:
        """Return the request for a text."""
        return GenerateRequest(
            model=self.model.name,
            text=text,
            num_beams=self.num_beams,
            num_return_sequences=self.num_alternatives + 1 if self.num_alternatives else None,
            source_language=self.source,
            target_language=self.target,
        )


class LibreTranslateApi:
    """Endpoints of LibreTranslate's API; `max_message_bytes` limits the answers of a call together."""

    def __init__(self, service: Service, max_message_bytes: int) -> None:
        self._service, self._generation = service, service.generation
        self._max_bytes, self._limit = max_message_bytes, MessageLimit(max_message_bytes)
        self._languages = LibreLanguages()
        self._detector = Detector()
        self._slices = Slices()

    def endpoints(self) -> Iterable[Endpoint]:
        """Return the endpoints."""
        endpoint = partial(Endpoint, errors=LIBRETRANSLATE_ERRORS)
        reading = partial(endpoint, "POST", read=read_request, api_key=lambda asked: asked.api_key)
        return (
            reading("/translate", self.translate, is_counted=True, has_items=True),
            reading("/detect", self.detect),
            endpoint("GET", "/languages", self.languages, is_open=True),
            endpoint("GET", "/frontend/settings", self.settings, is_open=True),
            endpoint("GET", "/health", self.health, is_open=True, is_awaited=False),
            endpoint("POST", "/translate_file", _not_offered, is_open=True),
            endpoint("POST", "/suggest", _not_offered, is_open=True),
        )

    async def translate(self, exchange: Exchange) -> web.Response:
        """Return the translations of the texts."""
        asked: Asked = exchange.message
        caller = exchange.call.caller
        _check(asked)
        target = ALIASES.get(asked.target.lower(), asked.target)
        source, detected = await self._source(asked, target, caller)
        if self._is_same(source, target, caller):
            answers = [[text] for text in asked.texts]
        else:
            request = GenerateRequest(model=asked.model, source_language=source, target_language=target)
            model = self._generation.model_for(request, caller)
            if asked.alternatives > (most := _most_alternatives(model, caller)):
                raise InvalidRequest("alternatives", f"{asked.alternatives} is more than {most}, which model {model.name} can give")
            answers = await self._answers(asked.texts, Wanted(model, source, target, asked.alternatives), exchange)
        return json_response(_translated(asked, answers, detected))

    async def detect(self, exchange: Exchange) -> web.Response:
        """Return the likeliest languages of a text, among those of the models."""
        asked: Asked = exchange.message
        _check_texts(asked)
        codes = [known.code for known in self._known(exchange)]
        return json_response([found._asdict() for found in await self._detector.detect(asked.texts, codes)])

    async def languages(self, exchange: Exchange) -> web.Response:
        """Return the languages of the models."""
        return json_response([known._asdict() for known in self._known(exchange)])

    async def settings(self, exchange: Exchange) -> web.Response:
        """Return the settings of LibreTranslate's page."""
        known = self._known(exchange)
        source = next((each for each in known if each.targets), None)
        target = next((each for each in known if source is not None and each.code in source.targets), None)
        is_closed = self._service.callers is not None
        return json_response(
            {
                "apiKeys": is_closed,
                "charLimit": -1,
                "filesTranslation": False,
                "frontendTimeout": FRONTEND_MILLISECONDS,
                "keyRequired": is_closed,
                "language": {
                    side: {"code": each.code if each else "", "name": each.name if each else ""}
                    for side, each in (("source", source), ("target", target))
                },
                "suggestions": False,
                "supportedFilesFormat": [],
            }
        )

    async def health(self, _: Exchange) -> web.Response:
        """Report readiness, as `/readyz` does."""
        if not self._service.is_ready:
            raise NotReady("the server is not ready", RETRY_SECONDS)
        return json_response({"status": "ok"})

    def _known(self, exchange: Exchange) -> list[Known]:
        return self._languages.all(self._generation.models(exchange.call.caller))

    async def _source(self, asked: Asked, target: str, caller: Caller | None) -> tuple[str, Detected | None]:
        """Return the source language, and its detection if the request has `auto`."""
        models = self._generation.models(caller)
        source = ALIASES.get(asked.source.lower(), asked.source)
        for field, code in (("target", target), ("source", source)):
            if code.lower() != AUTO and not self._languages.find(models, code):
                there = ", ".join(known.code for known in self._languages.all(models)) or "none"
                raise InvalidRequest(field, f"{shown(code)} is not supported; there: {there}"[:500])
        if source.lower() != AUTO:
            return source, None
        sources = self._languages.sources_of(models, target)
        if not sources:
            raise InvalidRequest("target", f"{shown(target)} is not supported: nothing is translated to it")
        if not self._detector.is_installed and len(sources) == 1:
            return sources[0], Detected(sources[0], 0.0)
        found = await self._detector.detect(asked.texts, [*sources, self._languages.find(models, target)])
        return found[0].language, found[0]

    def _is_same(self, source: str, target: str, caller: Caller | None) -> bool:
        """Return whether source and target are one language that no model is dedicated to."""
        models = self._generation.models(caller)
        is_one = self._languages.find(models, source) == self._languages.find(models, target)
        return is_one and not any(is_of_one_pair(model) and model.templates.is_able(source, target) for model in models)

    async def _answers(self, texts: Sequence[str], wanted: Wanted, exchange: Exchange) -> list[list[str]]:
        """Return each text's translation and alternatives, joined from its sentences."""
        pieces: list[list[tuple[str, bool]]] = [[] for _ in texts]
        owner = exchange.call.caller_or(exchange.http.remote or "")
        check = partial(self._generation.validator.check_source_length, model=wanted.model)
        found = _pieces(texts, self._generation.max_characters(wanted.model), check)
        for index, piece, is_translated in await self._slices.collect(found, owner):
            pieces[index].append((piece, is_translated))
        sentences = [piece for each in pieces for piece, is_translated in each if is_translated]
        num_kept = sum(len(piece.encode(errors="replace")) for each in pieces for piece, is_translated in each if not is_translated)
        translated = await self._translate_all(sentences, wanted, exchange, num_kept)
        answers, start = [], 0
        for each in pieces:
            end = start + sum(is_translated for _, is_translated in each)
            count = max(map(len, translated[start:end]), default=1)
            whole = [join_sentences(each, translated[start:end], index) for index in range(min(count, wanted.num_alternatives + 1))]
            answers.append(list(dict.fromkeys(whole)))
            start = end
        return answers

    async def _translate_all(
        self, sentences: Sequence[str], wanted: Wanted, exchange: Exchange, num_kept: int
    ) -> Sequence[list[str]]:
        """Return each sentence's answers, best first; `num_kept` bytes that stay as they are count toward the size limit."""
        call, loop = exchange.call, asyncio.get_running_loop()
        call.is_counted = False  # its sentences are counted
        items = ItemRecords(self._service.calls, call, own_ending)
        seconds, _ = self._generation.deadlines(call).time_left(call.arrival, exchange.remaining_seconds)
        end = None if seconds is None else loop.time() + seconds
        num_bytes = 0

        def count(number: int) -> None:
            nonlocal num_bytes
            num_bytes += number
            if num_bytes > self._max_bytes:
                raise InvalidRequest("q", f"answers have more than {self._max_bytes} bytes, max_message_bytes of the server")

        async def translate(index: int) -> list[str]:
            bind_contextvars(item=index)
            # The shared request id makes one model version answer all sentences.
            with items.item(call.request_id, is_part=True) as item:
                try:
                    remaining = None if end is None else end - loop.time()
                    generated = await self._generation.generate(wanted.request(sentences[index]), item, remaining, self._limit)
                finally:
                    call.model = item.model
            answers = [answer.text for answer in generated.answers]
            count(sum(len(answer.encode(errors="replace")) for answer in answers))
            return answers

        count(num_kept * (wanted.num_alternatives + 1))
        assert call.window is not None
        return await call.window.run_each(len(sentences), translate, _max_at_once(wanted, call.caller))


async def _not_offered(_: Exchange) -> NoReturn:
    raise HttpRefusal(HTTPStatus.FORBIDDEN, "files and suggestions are not taken here")


def _most_alternatives(model: LoadedModel, caller: Caller | None) -> int:
    most = None if caller is None else caller.limits.max_slots
    return min(model.max_slots_per_request, most or model.max_slots_per_request) - 1


def _max_at_once(wanted: Wanted, caller: Caller | None) -> int:
    """Return the sentences of a call to run or queue at once, within the caller's limits."""
    most = max(1, REQUESTS_PER_SLOT * wanted.model.max_slots // (wanted.num_beams or 1))
    return most if caller is None else min(most, caller.most_at_once or most)


def _check(asked: Asked) -> None:
    """Raise `InvalidRequest` for a missing field or unsupported format."""
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
    """Yield (text index, piece, whether to translate), None for an empty piece; `check` raises for a piece that is too long."""
    count = num_empty = 0
    for index, text in enumerate(texts):
        for piece, is_translated in split_sentences(text, max_characters):
            num_empty += not piece
            if is_translated:
                check(piece)
                count += 1
            if count > MAX_PIECES or num_empty > MAX_STOPS:
                raise InvalidRequest("q", f"more than {MAX_PIECES} sentences; send fewer at once")
            yield (index, piece, is_translated) if piece else None


def _translated(asked: Asked, answers: Sequence[Sequence[str]], detected: Detected | None) -> dict[str, Any]:
    """Return a response's content, in lists if `q` is a list."""
    best = [first for first, *_ in answers]
    content: dict[str, Any] = {"translatedText": best if asked.is_list else best[0]}
    if detected is not None:
        content["detectedLanguage"] = [detected._asdict()] * len(best) if asked.is_list else detected._asdict()
    if asked.alternatives:
        others = [[other for other in rest if other] for _, *rest in answers]
        content["alternatives"] = others if asked.is_list else others[0]
    return content
