"""LibreTranslate's API (https://docs.libretranslate.com; differences in docs/call.md).

Texts are divided into sentences; if one fails, the call fails.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn

from aiohttp import web
from msgspec.structs import replace

from dragoman.server.errors import InvalidRequest, NotReady
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.protocols.http.requests import Endpoint, Exchange, run_by_size
from dragoman.server.protocols.http.responses import LIBRETRANSLATE_ERRORS, HttpRefusal, file_response, json_response
from dragoman.server.protocols.libretranslate.languages import ALIASES, Detected, Known, LibreLanguages
from dragoman.server.protocols.libretranslate.reading import Asked, read_file, read_request
from dragoman.server.protocols.v1.messages import MessageLimit
from dragoman.server.service.callers import RETRY_SECONDS, Caller
from dragoman.server.service.documents import Document, DocumentStore
from dragoman.server.service.formats.kinds import KINDS, imported, media_type
from dragoman.server.service.languages import shown
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.sentences import on_thread
from dragoman.server.service.service import Service

# Typing delay of LibreTranslate's page.
FRONTEND_MILLISECONDS = 500
# `markup` of requests by format.
FORMATS = {"": "none", "text": "none", "html": "html"}


class Wanted(NamedTuple):
    """Model, languages in any spelling, and number of answers beside the best."""

    model: LoadedModel
    source: str
    target: str
    num_alternatives: int = 0
    markup: str = ""
    keeps_placeholders: bool = False

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
            split="sentences",
            markup=self.markup,
            keep_placeholders=self.keeps_placeholders,
        )


class LibreTranslateApi:
    """Endpoints of LibreTranslate's API; `max_message_bytes` limits the answers of a call together."""

    def __init__(self, service: Service, max_message_bytes: int, languages: LibreLanguages, documents: DocumentStore) -> None:
        self._service, self._generation = service, service.generation
        self._limit = MessageLimit(max_message_bytes)
        self._languages, self._documents = languages, documents

    def endpoints(self) -> Iterable[Endpoint]:
        """Return the endpoints."""
        endpoint = partial(Endpoint, errors=LIBRETRANSLATE_ERRORS)
        reading = partial(endpoint, "POST", api_key=lambda asked: asked.api_key)
        return (
            reading("/translate", self.translate, read=read_request, is_counted=True),
            reading("/translate_file", self.translate_file, read=read_file, is_counted=True),
            endpoint("GET", "/download_file/{file}", self.download_file, is_open=True),
            reading("/detect", self.detect, read=read_request),
            endpoint("GET", "/languages", self.languages, is_open=True),
            endpoint("GET", "/frontend/settings", self.settings, is_open=True),
            endpoint("GET", "/health", self.health, is_open=True, is_awaited=False),
            endpoint("POST", "/suggest", _not_offered, is_open=True),
        )

    async def translate(self, exchange: Exchange) -> web.Response:
        """Return the translations of the texts."""
        asked: Asked = exchange.message
        _check_texts(asked)
        return json_response(_translated(asked, *await self._translate(asked, exchange)))

    async def translate_file(self, exchange: Exchange) -> web.Response:
        """Translate a file and return the address of its translation, which is found by anyone who knows it."""
        asked: Asked = exchange.message
        found = await on_thread(imported, asked.filename, asked.file, self._generation.texts.max_characters)
        wanted = replace(asked, texts=found.texts, alternatives=0, format="html" if found.markup == "html" else "text")
        translated, _ = await self._translate(wanted, exchange, keeps_placeholders=found.keep_placeholders)
        content = await on_thread(found.written, [text for text, *_ in translated], asked.target)
        document = Document(asked.filename, found.num_characters, status="done")
        name = await run_by_size(len(content), self._documents.add, exchange.call.owner, document, content)
        return json_response({"translatedFileUrl": f"{exchange.http.url.origin()}/download_file/{name}.{found.kind}"})

    async def download_file(self, exchange: Exchange) -> web.Response:
        """Return a translated file."""
        name = exchange.http.match_info["file"].partition(".")[0]
        document = self._documents.find(name)
        content = None if document is None or document.key else await on_thread(self._documents.content, name)
        if document is None or content is None:
            raise HttpRefusal(HTTPStatus.NOT_FOUND, "there is no such file, or no longer")
        return file_response(content, document.filename, media_type(document.filename))

    async def _translate(
        self, asked: Asked, exchange: Exchange, *, keeps_placeholders: bool = False
    ) -> tuple[list[list[str]], Detected | None]:
        """Return each text's translation and alternatives, and the detection if the source is `auto`."""
        caller = exchange.call.caller
        _check(asked)
        if not asked.texts:  # of a file
            return [], None
        models, target = self._generation.models(caller), ALIASES.get(asked.target.lower(), asked.target)
        source = ALIASES.get(asked.source.lower(), asked.source)
        source, detected = await self._languages.source_of(models, asked.texts, source, target)
        if self._languages.is_same(models, source, target):
            return [[text] for text in asked.texts], detected
        request = GenerateRequest(model=asked.model, source_language=source, target_language=target)
        model = self._generation.model_for(request, caller)
        if asked.alternatives > (most := _most_alternatives(model, caller)):
            raise InvalidRequest("alternatives", f"{asked.alternatives} is more than {most}, which model {model.name} can give")
        wanted = Wanted(model, source, target, asked.alternatives, FORMATS[asked.format], keeps_placeholders)
        return await self._answers(asked, wanted, exchange), detected

    async def detect(self, exchange: Exchange) -> web.Response:
        """Return the likeliest languages of a text, among those of the models."""
        asked: Asked = exchange.message
        _check_texts(asked)
        codes = [known.code for known in self._known(exchange)]
        return json_response([found._asdict() for found in await self._languages.detector.detect(asked.texts, codes)])

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
                "charLimit": self._generation.texts.max_characters,
                "filesTranslation": True,
                "frontendTimeout": FRONTEND_MILLISECONDS,
                "keyRequired": is_closed,
                "language": {
                    side: {"code": each.code if each else "", "name": each.name if each else ""}
                    for side, each in (("source", source), ("target", target))
                },
                "suggestions": False,
                "supportedFilesFormat": [f".{kind}" for kind in KINDS],
            }
        )

    async def health(self, _: Exchange) -> web.Response:
        """Report readiness, as `/readyz` does."""
        if not self._service.is_ready:
            raise NotReady("the server is not ready", RETRY_SECONDS)
        return json_response({"status": "ok"})

    def _known(self, exchange: Exchange) -> list[Known]:
        return self._languages.all(self._generation.models(exchange.call.caller))

    async def _answers(self, asked: Asked, wanted: Wanted, exchange: Exchange) -> list[list[str]]:
        """Return each text's translation and alternatives, without duplicates."""
        requests = [wanted.request(text) for text in asked.texts]
        remaining = exchange.remaining_seconds
        answered = await self._generation.generate_all(requests, exchange.call, remaining, self._limit)
        return [list(dict.fromkeys(answer.text for answer in generated.answers)) for generated in answered]


async def _not_offered(_: Exchange) -> NoReturn:
    raise HttpRefusal(HTTPStatus.FORBIDDEN, "suggestions are disabled on this server")


def _most_alternatives(model: LoadedModel, caller: Caller | None) -> int:
    most = None if caller is None else caller.limits.max_slots
    return min(model.max_slots_per_request, most or model.max_slots_per_request) - 1


def _check(asked: Asked) -> None:
    """Raise `InvalidRequest` for a missing field or unsupported format."""
    for field in ("source", "target"):
        if not getattr(asked, field):
            raise InvalidRequest(field, "is missing")
    if asked.format not in FORMATS:
        raise InvalidRequest("format", f"{shown(asked.format)} is not supported")


def _check_texts(asked: Asked) -> None:
    if not asked.texts:
        raise InvalidRequest("q", "is missing")


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
