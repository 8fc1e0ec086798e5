"""DeepL's API (https://developers.deepl.com; differences in docs/call.md)."""

import asyncio
import hmac
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import web
from msgspec.structs import replace

from dragoman.server.errors import InvalidRequest, LimitReached, NotReady, QueueFull, ServiceError
from dragoman.server.protocols.bulk import ItemRecords
from dragoman.server.protocols.deepl.glossaries import GlossaryApi
from dragoman.server.protocols.deepl.reading import Asked, read_request, read_upload
from dragoman.server.protocols.http.middleware import own_ending
from dragoman.server.protocols.http.requests import Endpoint, Exchange, peer_names, run_by_size
from dragoman.server.protocols.http.responses import DEEPL_ERRORS, HttpRefusal, file_response, json_response
from dragoman.server.protocols.libretranslate.languages import AUTO, LibreLanguages
from dragoman.server.protocols.v1.messages import MessageLimit
from dragoman.server.service.callers import RETRY_SECONDS
from dragoman.server.service.documents import Document, DocumentStore, digest_of
from dragoman.server.service.formats.fragments import DocumentTooLarge
from dragoman.server.service.formats.kinds import Imported, imported, media_type
from dragoman.server.service.glossary_store import GlossaryStore
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.sentences import on_thread
from dragoman.server.service.service import Service

log = structlog.get_logger("dragoman.deepl")

# DeepL's own number for accounts without a limit.
CHARACTER_LIMIT = 10**12
# Targets that clients name by region only.
REGIONS = {"en": {"EN-GB": "English (British)", "EN-US": "English (American)"}}
REGIONS["pt"] = {"PT-BR": "Portuguese (Brazilian)", "PT-PT": "Portuguese (European)"}


class DeepLApi:
    """Endpoints of DeepL's API; `max_message_bytes` limits the answers of a call together, and a document."""

    def __init__(
        self,
        service: Service,
        max_message_bytes: int,
        languages: LibreLanguages,
        documents: DocumentStore,
        glossaries: GlossaryStore,
    ) -> None:
        self._service, self._generation, self._limit = service, service.generation, MessageLimit(max_message_bytes)
        self._languages, self._documents = languages, documents
        self._glossaries = GlossaryApi(service.generation, languages, glossaries)
        self._num_characters: Counter[str] = Counter()  # translated in this process, by caller
        self._tasks: set[asyncio.Task[None]] = set()  # of documents

    def endpoints(self) -> Iterable[Endpoint]:
        """Return the endpoints."""
        endpoint = partial(Endpoint, errors=DEEPL_ERRORS, api_key=lambda asked: asked.auth_key)
        for method in ("GET", "POST"):
            yield endpoint(method, "/v2/languages", self.languages, read=read_request)
            yield endpoint(method, "/v2/usage", self.usage, read=read_request)
        yield from self._glossaries.endpoints(endpoint)
        yield endpoint("POST", "/v2/translate", self.translate, read=read_request, is_counted=True)
        yield endpoint("POST", "/v2/document", self.upload, read=read_upload)
        for end, handler in (("", self.document_status), ("/result", self.document_result)):
            yield endpoint("POST", f"/v2/document/{{id}}{end}", handler, read=read_request, is_open=True)

    async def translate(self, exchange: Exchange) -> web.Response:
        """Return the translations of the texts."""
        asked: Asked = exchange.message
        if not asked.texts:
            raise InvalidRequest("text", "is missing")
        source, request = await self._choose(asked, asked.texts, exchange)
        texts = asked.texts
        if request is not None:
            requests = [replace(request, text=text) for text in texts]
            answered = await self._generation.generate_all(requests, exchange.call, exchange.remaining_seconds, self._limit)
            texts = [generated.best.text for generated in answered]
        self._num_characters[_name_of(exchange)] += sum(map(len, asked.texts))
        shared = {"model_type_used": asked.model_type.removeprefix("prefer_")} if asked.model_type else {}
        shared["detected_source_language"] = source
        sizes = map(len, asked.texts)
        translations = [shared | {"text": text, "billed_characters": size} for text, size in zip(texts, sizes, strict=True)]
        return json_response({"translations": translations})

    async def languages(self, exchange: Exchange) -> web.Response:
        """Return the source or target languages of the models."""
        known = self._languages.all(self._generation.models(exchange.call.caller))
        if exchange.message.type != "target":
            return json_response([{"language": one.code.upper(), "name": one.name} for one in known if one.targets])
        written, targets = {target for one in known for target in one.targets}, dict[str, str]()
        for one in known:
            if one.code in written:
                targets |= REGIONS.get(one.code, {one.code.upper(): one.name})
        return json_response([{"language": code, "name": name, "supports_formality": False} for code, name in targets.items()])

    async def usage(self, exchange: Exchange) -> web.Response:
        """Return the characters translated for the caller by this process since its start."""
        return json_response({"character_count": self._num_characters[_name_of(exchange)], "character_limit": CHARACTER_LIMIT})

    async def upload(self, exchange: Exchange) -> web.Response:
        """Keep a document, begin to translate it, and return its id and key."""
        asked: Asked = exchange.message
        try:
            found = await on_thread(imported, asked.filename, asked.file, self._generation.texts.max_characters)
        except DocumentTooLarge as error:
            raise HttpRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error.message) from None
        if asked.output_format not in ("", found.kind):
            raise InvalidRequest("output_format", "is not the document's own")
        _, request = await self._choose(replace(asked, tag_handling=found.markup), found.texts, exchange)
        key = secrets.token_hex(32).upper()
        document = Document(asked.filename, found.num_characters, key, process=os.getpid(), began=time.time())
        if request is None or not found.texts:
            document, request = replace(document, status="done"), None
        content = b"" if request else found.content
        name = await run_by_size(len(content), self._documents.add, exchange.call.owner, document, content)
        if request is not None:
            request = replace(request, keep_placeholders=found.keep_placeholders)
            task = asyncio.create_task(self._translate_document(name, document, found, request, exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return json_response({"document_id": name, "document_key": key})

    async def document_status(self, exchange: Exchange) -> web.Response:
        """Return how far a document is; its remaining time is taken to be the time so far."""
        name, document = self._find(exchange)
        content: dict[str, Any] = {"document_id": name, "status": document.status}
        if document.status == "translating":
            content["seconds_remaining"] = max(1, round(time.time() - document.began))
        elif document.status == "done":
            content["billed_characters"] = document.num_characters
        elif document.status == "error":
            content |= {"error_message": document.error, "message": document.error}
        return json_response(content)

    async def document_result(self, exchange: Exchange) -> web.Response:
        """Return a translated document, once."""
        name, document = self._find(exchange)
        if document.is_running:
            raise NotReady("document: is not translated yet", RETRY_SECONDS)
        if document.status == "error":
            raise InvalidRequest("document", f"was not translated: {document.error}")
        if (content := await on_thread(self._documents.take, name)) is None:
            raise _no_document()
        return file_response(content, document.filename, media_type(document.filename))

    async def close(self, _: web.Application) -> None:
        """Cancel the translation of documents, as `on_shutdown`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _choose(self, asked: Asked, texts: Iterable[str], exchange: Exchange) -> tuple[str, GenerateRequest | None]:
        """Return DeepL's code of the source language, and the request without a text; None if the texts stay as they are."""
        if not asked.target_lang:
            raise InvalidRequest("target_lang", "is missing")
        caller, target = exchange.call.caller, asked.target_lang
        models = self._generation.models(caller)
        source, _ = await self._languages.source_of(models, list(texts), asked.source_lang or AUTO, target)
        code = self._languages.find(models, source).upper()
        if self._languages.is_same(models, source, target):
            return code, None
        request = asked.request(source, target)
        if asked.glossary_ids:
            request = await self._glossaries.applied(asked.glossary_ids, request, exchange, asked.source_lang)
        return code, replace(request, model=self._generation.model_for(request, caller).name)

    async def _translate_document(
        self, name: str, document: Document, found: Imported, request: GenerateRequest, exchange: Exchange
    ) -> None:
        """Translate a document as a request of its own; it waits while a limit or the queue refuses it."""
        items, limit, content = ItemRecords(self._service.calls, exchange.call, own_ending), self._limit, b""
        requests = [replace(request, text=text) for text in found.texts]
        while self._documents.find(name) is not None:
            try:
                with items.item(exchange.call.request_id, is_part=True) as call:
                    if document.status == "queued" and call.not_entered is None:
                        document = replace(document, status="translating", began=time.time())
                        self._documents.change(name, document)
                    generated = await self._generation.generate_all(requests, call, None, limit)
                content = await on_thread(found.written, [one.best.text for one in generated], request.target_language)
            except (LimitReached, QueueFull) as refused:
                await asyncio.sleep(refused.retry_after_seconds or RETRY_SECONDS)
                continue
            except ServiceError as error:
                document = replace(document, status="error", error=error.message)
            except Exception:
                log.exception("a document could not be translated")
                document = replace(document, status="error", error="internal error")
            else:
                document = replace(document, status="done")
                self._num_characters[_name_of(exchange)] += document.num_characters
            await run_by_size(len(content), self._documents.change, name, document, content)
            return

    def _find(self, exchange: Exchange) -> tuple[str, Document]:
        """Return the caller's document by the path's id and the key; limits of callers, which a document may fill, do not count."""
        name, callers = exchange.http.match_info["id"], self._service.callers
        caller = None if callers is None else callers.identify(exchange.metadata, peer_names(exchange.http))
        document = self._documents.find(name) if caller is None or name.startswith(digest_of(caller.name)) else None
        key: str = exchange.message.document_key
        if document is None or not document.key or not hmac.compare_digest(document.key.encode(), key.encode()):
            raise _no_document()
        return name, document


def _name_of(exchange: Exchange) -> str:
    return "" if exchange.call.caller is None else exchange.call.caller.name


def _no_document() -> HttpRefusal:
    return HttpRefusal(HTTPStatus.NOT_FOUND, "document: there is none of this id and key, or no longer")
