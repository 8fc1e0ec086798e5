"""What the console's Models tab lives on: every version of every model, with what its bundle says of how good it is, as JSON.

Nothing here is known of a model but what its manifest says, which its signature stands for, and the card that the manifest lists.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from dragoman.server.protocols.http.native import JSON, to_json
from dragoman.server.protocols.http.requests import Endpoint, Exchange
from dragoman.server.protocols.v1.descriptions import Descriptions
from dragoman.server.service.ports import Model
from dragoman.server.service.sentences import on_thread
from dragoman.server.service.service import Core
from dragoman.v1 import generation_pb2

PATH = "/console/models"


class ModelsData:
    """Answers `/console/models`."""

    def __init__(self, core: Core, max_message_bytes: int) -> None:
        """Tell of the core's models.

        Args:
            core: What answers.
            max_message_bytes: Largest description of one that is sent.
        """
        self._models, self._generation = core.models, core.generation
        self._descriptions = Descriptions(core.models, max_message_bytes)

    def endpoints(self) -> Iterable[Endpoint]:
        """Return what it answers."""
        return (Endpoint("GET", PATH, self.answer),)

    async def answer(self, exchange: Exchange) -> web.Response:
        """Answer with all versions of the models that the caller may use."""
        names = {model.name for model in self._generation.models(exchange.call.caller)}
        seen = [model for model in self._models.versions() if model.name in names]
        told = [(self._descriptions.of(model), model) for model in seen]
        return web.Response(body=await on_thread(_write, told), content_type=JSON)


def _of_bundle(model: Model) -> dict[str, Any]:
    """Return what a bundle says beside the description."""
    parity = _told(model.manifest.parity)
    return {
        "label": model.label,
        "isAsleep": model.is_asleep,
        "card": model.card() or None,
        "quality": parity.pop("quality", None),
        "parity": parity,
        "origin": _told(model.manifest.origin),
        "limits": _limits(model),
    }


def _limits(model: Model) -> dict[str, int | None]:
    manifest = model.manifest
    return {
        "maxSourceTokens": manifest.max_source_tokens,
        "maxTargetTokens": manifest.max_target_tokens,
        "maxSlots": model.max_slots,
        "maxSlotsPerRequest": model.max_slots_per_request,
        "maxPriority": model.traits.max_priority,
    }


def _told(struct: msgspec.Struct) -> dict[str, Any]:
    """Return what a part of a manifest says, with names in camel case."""
    told: dict[str, Any] = _in_camel_case(msgspec.to_builtins(struct))
    return told


def _in_camel_case(value: Any) -> Any:
    if isinstance(value, dict):
        return {_camel(name): _in_camel_case(part) for name, part in value.items()}
    return [_in_camel_case(part) for part in value] if isinstance(value, list) else value


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _write(told: Iterable[tuple[generation_pb2.Model, Model]]) -> bytes:
    """Write all of it; beside others' work, for cards are read, and hundreds of languages take a while."""
    models = [{"model": msgspec.Raw(to_json(description).encode())} | _of_bundle(model) for description, model in told]
    return msgspec.json.encode({"models": models})
