"""Console data: engine statistics as server-sent events, and models with their bundles' quality data as JSON."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from dragoman.server.models.loaded import LoadedModel
from dragoman.server.protocols.http.native import to_json
from dragoman.server.protocols.http.requests import Endpoint, Exchange
from dragoman.server.protocols.http.responses import JSON, NATIVE_ERRORS
from dragoman.server.protocols.v1.descriptions import Descriptions
from dragoman.server.service.sentences import on_thread
from dragoman.server.service.service import Service
from dragoman.v1 import generation_pb2

# A stream ends if its client takes no event for this long.
SEND_SECONDS = 10.0


class ConsoleData:
    """Endpoints of the console's Engine and Models tabs; they never include a request's text."""

    def __init__(self, service: Service, max_message_bytes: int) -> None:
        self._service = service
        self._descriptions = Descriptions(service.models, max_message_bytes)

    def endpoints(self) -> Iterable[Endpoint]:
        """Return the endpoints; `/console/engine` counts toward its caller's streams and does not delay a drain."""
        get = partial(Endpoint, "GET", errors=NATIVE_ERRORS, access="both")
        return (
            get("/console/engine", self.watch, is_awaited=False, has_items=True),
            get("/console/models", self.models),
        )

    async def watch(self, exchange: Exchange) -> web.StreamResponse:
        """Send statistics four times a second until the caller leaves, loses access, or the server drains."""
        response: web.StreamResponse | None = None
        async with aclosing(self._service.live_statistics.watch(exchange.call.caller, is_operator=exchange.is_operator)) as views:
            async for view in views:
                try:
                    async with asyncio.timeout(SEND_SECONDS):
                        response = await exchange.send_event(msgspec.json.encode(view).decode())
                except TimeoutError:
                    raise ConnectionResetError("the caller takes no events") from None
        assert response is not None
        response.force_close()
        return response

    async def models(self, exchange: Exchange) -> web.Response:
        """Return all versions of the models that the caller may use."""
        names = {model.name for model in self._service.generation.models(exchange.call.caller)}
        models = [(self._descriptions.of(model), model) for model in self._service.models.versions() if model.name in names]
        return web.Response(body=await on_thread(_write, models), content_type=JSON)


def _write(models: Sequence[tuple[generation_pb2.Model, LoadedModel]]) -> bytes:
    """Encode the models; run on a thread, as it reads model cards."""
    written = [{"model": msgspec.Raw(to_json(description).encode())} | _of_bundle(model) for description, model in models]
    return msgspec.json.encode({"models": written})


def _of_bundle(model: LoadedModel) -> dict[str, Any]:
    """Return the bundle's signed data beside the description."""
    manifest = model.manifest
    parity = _in_camel_case(msgspec.to_builtins(manifest.parity))
    return {
        "label": model.label,
        "isAsleep": model.is_asleep,
        "card": model.card() or None,
        "quality": parity.pop("quality", None),
        "parity": parity,
        "origin": _in_camel_case(msgspec.to_builtins(manifest.origin)),
        "limits": {
            "maxSourceTokens": manifest.max_source_tokens,
            "maxTargetTokens": manifest.max_target_tokens,
            "maxSlots": model.max_slots,
            "maxSlotsPerRequest": model.max_slots_per_request,
            "maxPriority": model.traits.max_priority,
        },
    }


def _in_camel_case(value: Any) -> Any:
    if isinstance(value, dict):
        return {_camel(name): _in_camel_case(part) for name, part in value.items()}
    return [_in_camel_case(part) for part in value] if isinstance(value, list) else value


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))
