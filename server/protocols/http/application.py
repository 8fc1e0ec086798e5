"""The aiohttp application of the HTTP port: all protocols' endpoints, and HTTP errors in the format of the path's protocol."""

import re
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import HttpVersion10, web

from dragoman.server.config import ServerConfig
from dragoman.server.protocols.console.data import ConsoleData
from dragoman.server.protocols.console.page import ConsolePage
from dragoman.server.protocols.deepl.api import DeepLApi
from dragoman.server.protocols.http import documents
from dragoman.server.protocols.http.middleware import Middleware
from dragoman.server.protocols.http.native import NativeApi, repository_endpoints
from dragoman.server.protocols.http.openinference import ROOT, InferenceApi
from dragoman.server.protocols.http.origins import Handler, Origins, is_allowed_host
from dragoman.server.protocols.http.responses import (
    NATIVE_ERRORS,
    OPENINFERENCE_ERRORS,
    ErrorFormat,
    HttpRefusal,
    PathNotFound,
)
from dragoman.server.protocols.libretranslate.api import LibreTranslateApi
from dragoman.server.protocols.libretranslate.languages import LibreLanguages
from dragoman.server.protocols.openai.api import OpenAiApi
from dragoman.server.protocols.openai.batches import BatchApi
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.batch_store import BatchStore
from dragoman.server.service.documents import DocumentStore
from dragoman.server.service.glossary_store import GlossaryStore
from dragoman.server.service.service import Service

# Headers of every response: no media type sniffing, no caching.
HEADERS = {"Server": "dragoman", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
# Paths of KServe's V1 and of DeepL's API that are not served, and what is.
ELSEWHERE = (
    (re.compile(r"/v1/models/[^/]+:(predict|explain)"), "KServe's V2 answers at /v2/models/NAME/infer"),
    (
        re.compile(r"/v[23]/(write|style_rules|translation_memories)"),
        "DeepL's texts and documents are translated",
    ),
)


def make_application(
    config: ServerConfig,
    service: Service,
    operators: OperatorCalls | None,
    grpc_port: int,
    store: DocumentStore,
    glossaries: GlossaryStore,
    batch_store: BatchStore | None,
) -> web.Application:
    """Return the application; `operators` is None without the admin service over HTTP, and the console shows `grpc_port`."""
    max_bytes, origins = config.max_message_bytes, Origins(config.http_allowed_origins)
    native, languages = NativeApi(service, max_bytes), LibreLanguages()
    libretranslate = LibreTranslateApi(service, max_bytes, languages, store)
    deepl = DeepLApi(service, max_bytes, languages, store, glossaries)
    inference, openai = InferenceApi(service, max_bytes), OpenAiApi(service, max_bytes)
    batches = BatchApi(service, max_bytes, batch_store)
    others = (*libretranslate.endpoints(), *openai.endpoints(), *batches.endpoints(), *deepl.endpoints())
    formats = {endpoint.path: endpoint.errors for endpoint in others}
    errors = HttpErrors(frozenset(config.http_allowed_hosts), formats)
    app = web.Application(middlewares=[errors.handle, origins.answer_preflight], handler_args=None)
    middleware = Middleware(service, max_bytes, origins, operators)
    middleware.add(app, *native.endpoints(), *others, *inference.endpoints(operators))
    app.on_startup.append(batches.start)
    app.on_shutdown.extend((batches.close, deepl.close))
    for path, probe in inference.probes():
        app.router.add_get(path, probe)
    if operators is not None:
        middleware.add(app, *repository_endpoints(operators))
    if config.console:
        middleware.add(app, *ConsoleData(service, max_bytes).endpoints())
        ConsolePage(grpc_port, operators is not None).add_to(app)
    for path in documents.PATHS:
        app.router.add_get(path, documents.answer_document)
    app.router.add_get(documents.PAGE_PATH, documents.answer_page)
    app.on_response_prepare.extend((_add_headers, origins.add_headers))
    return app


class HttpErrors:
    """Middleware that refuses disallowed hosts and ambiguous requests, and formats aiohttp's errors as the path's protocol does."""

    def __init__(self, hosts: frozenset[str], formats: Mapping[str, ErrorFormat]) -> None:
        """Take the allowed host names, and the formats of paths that are neither the native API's nor Open Inference's."""
        self._hosts = hosts
        self._formats = {path.partition("{")[0]: errors for path, errors in formats.items()}

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serve a request as `aiohttp.web.middleware`."""
        codings = request.headers.getall("Transfer-Encoding", ["chunked"])
        if request.version < HttpVersion10 or [coding.lower() for coding in codings] != ["chunked"]:
            raise web.HTTPBadRequest  # the protocol handler closes the connection
        if is_allowed_host(request, self._hosts):
            try:
                return await handler(request)
            except web.HTTPException as error:
                refusal = _refusal(request, error)
        else:
            refusal = HttpRefusal(HTTPStatus.MISDIRECTED_REQUEST, "Host: is none of the names in http_allowed_hosts")
        return self._format(request.path).response(refusal)

    def _format(self, path: str) -> ErrorFormat:
        for known, errors in self._formats.items():
            if path == known or (known.endswith("/") and path.startswith(known)):
                return errors
        is_inference = (path == ROOT or path.startswith(f"{ROOT}/")) and not _elsewhere(path)
        return OPENINFERENCE_ERRORS if is_inference else NATIVE_ERRORS


def _refusal(request: web.Request, error: web.HTTPException) -> HttpRefusal:
    instead = _elsewhere(request.path)
    if isinstance(error, web.HTTPMethodNotAllowed) and not instead:
        allowed = ", ".join(sorted(error.allowed_methods))
        return HttpRefusal(error.status, f"{request.method} is not for this path; {allowed} is", {"Allow": allowed})
    if isinstance(error, web.HTTPNotFound | web.HTTPMethodNotAllowed):
        return PathNotFound(instead)
    return HttpRefusal(error.status, HTTPStatus(error.status).phrase)


def _elsewhere(path: str) -> str:
    return next((instead for pattern, instead in ELSEWHERE if pattern.match(path)), "")


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = HEADERS["Server"]
