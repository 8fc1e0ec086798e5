"""What answers which path of the HTTP port, and in whose manner it is said that nothing does."""

import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus

from aiohttp import HttpVersion10, web
from aiohttp.typedefs import Middleware

from dragoman.server.config import ServerConfig
from dragoman.server.protocols.console.engine import EngineEvents
from dragoman.server.protocols.console.models import ModelsData
from dragoman.server.protocols.console.page import ConsolePage
from dragoman.server.protocols.http import documents
from dragoman.server.protocols.http.middleware import Around
from dragoman.server.protocols.http.native import NativeApi, RepositoryApi
from dragoman.server.protocols.http.openinference import ROOT, InferenceApi, LifecycleApi
from dragoman.server.protocols.http.origins import Hosts, Origins
from dragoman.server.protocols.http.requests import Bodies, Endpoint, Manner
from dragoman.server.protocols.http.responses import HttpRefusal, NothingThere
from dragoman.server.protocols.libretranslate.api import LibreApi
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.service import Core

# What is sent with every answer: what it is nobody has to guess, and nobody keeps it.
HEADERS = {"Server": "dragoman", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}

# Paths of APIs that are not spoken here, KServe's V1 and DeepL's, and what is instead.
ELSEWHERE = (
    (re.compile(r"/v1/models/[^/]+:(predict|explain)"), "KServe's V2 answers at /v2/models/NAME/infer"),
    (re.compile(r"/v2/(translate|languages|usage|document|glossar|write)"), "LibreTranslate's API answers at /translate"),
)

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_application(
    config: ServerConfig, core: Core, native: NativeApi, operators: OperatorCalls | None, grpc_port: int | None
) -> web.Application:
    """Return the application with every protocol that the port speaks.

    Args:
        config: What is wanted.
        core: What answers.
        native: The native API, in whose manner is refused what is at no other protocol's path.
        operators: The way in for operators; None if there is none here.
        grpc_port: Where gRPC is answered, which the console tells; None for where it is set to be.
    """
    bodies = Bodies(config.max_message_bytes)
    around = Around(core, bodies)
    origins = Origins(config.http_allowed_origins)
    libre = LibreApi(core, config.max_message_bytes, origins)
    inference = InferenceApi(core, config.max_message_bytes, origins)
    manners: dict[str, Manner] = {endpoint.path: libre for endpoint in libre.endpoints()}

    def manner_of(path: str) -> Manner:
        is_inference = (path == ROOT or path.startswith(f"{ROOT}/")) and not _elsewhere(path)
        return inference if is_inference else manners.get(path, native)

    telling = _tell_http_errors(manner_of, Hosts(config.http_allowed_hosts))
    app = web.Application(middlewares=[telling, origins.middleware()], handler_args=None)
    add(app, around, native, native.endpoints())
    add(app, around, libre, libre.endpoints())
    add(app, around, inference, inference.endpoints())
    for path, answer in inference.probes():
        app.router.add_get(path, answer)
    if config.console:
        around_all = Around(core, bodies, None if operators is None else operators.calls)
        add(app, around_all, native, EngineEvents(core).endpoints())
        add(app, around_all, native, ModelsData(core, config.max_message_bytes).endpoints())
        ConsolePage(config.port if grpc_port is None else grpc_port, operators is not None).add_to(app)
    if operators is None:
        add(app, around, inference, inference.without_operators())
    else:
        around_operators = Around(core, bodies, operators.calls, is_for_all=False)
        add(app, around_operators, native, RepositoryApi(operators.carry_out).endpoints())
        add(app, around_operators, inference, LifecycleApi(operators.carry_out).endpoints())
    app.router.add_get(documents.PATH, documents.answer_document)
    app.router.add_get(documents.PAGE_PATH, documents.answer_page)
    app.on_response_prepare.extend((_add_headers, origins.add_headers))
    return app


def add(app: web.Application, around: Around, manner: Manner, endpoints: Iterable[Endpoint]) -> None:
    """Have an application answer at some endpoints."""
    for endpoint in endpoints:
        app.router.add_route(endpoint.method, endpoint.path, partial(around.serve, endpoint, manner))


def _tell_http_errors(manner_of: Callable[[str], Manner], hosts: Hosts) -> Middleware:
    """Return what says in a protocol's manner what aiohttp would in its own: that nothing is there, or not by this method or name.

    Args:
        manner_of: Returns the manner of a path, whether anything is there or not.
        hosts: Names that there are.
    """

    @web.middleware
    async def tell(request: web.Request, handler: Answering) -> web.StreamResponse:
        codings = request.headers.getall("Transfer-Encoding", ["chunked"])
        if request.version < HttpVersion10 or [coding.lower() for coding in codings] != ["chunked"]:
            raise web.HTTPBadRequest  # what speaks on the connection ends it
        if not hosts.has(request):
            refusal = HttpRefusal(HTTPStatus.MISDIRECTED_REQUEST, "Host: is none of the names in http_allowed_hosts")
            return manner_of(request.path).refuse(refusal, "")
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            instead = _elsewhere(request.path)
            refusal = NothingThere(instead)
            if isinstance(error, web.HTTPMethodNotAllowed) and not instead:
                allowed = ", ".join(sorted(error.allowed_methods))
                refusal = HttpRefusal(error.status, f"{request.method} is not for this path; {allowed} is", {"Allow": allowed})
        except web.HTTPException as error:
            refusal = HttpRefusal(error.status, HTTPStatus(error.status).phrase)
        return manner_of(request.path).refuse(refusal, "")

    return tell


def _elsewhere(path: str) -> str:
    """Return what is spoken instead of the API of a path; empty where it is of none."""
    return next((instead for pattern, instead in ELSEWHERE if pattern.match(path)), "")


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = HEADERS["Server"]
