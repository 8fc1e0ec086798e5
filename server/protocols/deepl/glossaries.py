"""DeepL's glossary endpoints, v2 for one pair of languages and v3 for several, and glossaries of translations.

Callers make glossaries, whose ids are UUIDs. Those in folders of models for one pair are listed beside them, with UUIDs too, and
cannot be changed.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

import msgspec
from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from dragoman.server.errors import InvalidRequest
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.protocols.http.forms import read_content
from dragoman.server.protocols.http.requests import Endpoint, Exchange, run_by_size
from dragoman.server.protocols.http.responses import HttpRefusal, json_response
from dragoman.server.protocols.json_text import one_line
from dragoman.server.protocols.libretranslate.languages import LibreLanguages, code_of
from dragoman.server.service.generate import Generation, is_of_one_pair
from dragoman.server.service.glossaries import ENTRY_FORMATS, on_glossary_thread, read_entries
from dragoman.server.service.glossary_store import (
    ID,
    Dictionary,
    Draft,
    Glossary,
    GlossaryLimit,
    GlossaryStore,
    Pair,
    entries_of,
    tsv_of,
)
from dragoman.server.service.languages import shown
from dragoman.server.service.requests import GenerateRequest, check_length
from dragoman.server.service.terms import TermIndex

TSV = "text/tab-separated-values"
# DeepL's.
QUOTA_EXCEEDED, MAX_NAME_BYTES, MAX_AT_ONCE = 456, 1024, 5

Models = Sequence[LoadedModel]
Told = Callable[[Glossary], dict[str, Any]]


class Entries(Struct, frozen=True, forbid_unknown_fields=True):
    """A dictionary of a request."""

    source_lang: str = ""
    target_lang: str = ""
    entries: str = ""
    entries_format: str = "tsv"


class AskedGlossary(Entries, frozen=True, forbid_unknown_fields=True):
    """A request about a glossary; in v2 its dictionary too."""

    name: str = ""
    dictionaries: list[Entries] = []
    auth_key: str = ""


class OfModel(NamedTuple):
    """A glossary of a model's folder."""

    id: str
    name: str
    model: LoadedModel

    @property
    def pair(self) -> Pair:
        """The languages of its model."""
        templates = self.model.templates
        return Pair(*(base_of(code_of(one)) for one in (*templates.source_languages, *templates.target_languages)))

    def described(self) -> Glossary | None:
        """Return its description; None if it cannot be used."""
        num_entries, changed = self.model.glossaries.describe(self.name)
        return Glossary(self.name, changed, (Dictionary(*self.pair, num_entries),), self.id) if num_entries else None


class GlossaryApi:
    """Glossary endpoints."""

    def __init__(self, generation: Generation, languages: LibreLanguages, store: GlossaryStore) -> None:
        self._generation, self._languages, self._store = generation, languages, store

    def endpoints(self, endpoint: Callable[..., Endpoint]) -> Iterable[Endpoint]:
        """Yield the endpoints."""
        paths: list[tuple[str, str, Callable[[Exchange], Awaitable[web.Response]]]] = [
            ("GET", "/v2/glossary-language-pairs", self.pairs),
            ("GET", "/v2/glossaries/{id}/entries", self.entries),
            ("GET", "/v3/glossaries/{id}/entries", self.entries_of_pair),
            ("PATCH", "/v3/glossaries/{id}", self.change),
            ("PUT", "/v3/glossaries/{id}/dictionaries", self.replace_dictionary),
            ("DELETE", "/v3/glossaries/{id}/dictionaries", self.delete_dictionary),
        ]
        for root, told in (("/v2/glossaries", told_v2), ("/v3/glossaries", told_v3)):
            paths += [("POST", root, partial(self.create, told)), ("GET", root, partial(self.all, told))]
            paths += [("GET", f"{root}/{{id}}", partial(self.show, told)), ("DELETE", f"{root}/{{id}}", self.delete)]
        for method, path, handler in paths:
            yield endpoint(method, path, handler, read=read_asked)

    async def pairs(self, exchange: Exchange) -> web.Response:
        """Return the pairs of languages that the caller's models translate."""
        told = [{"source_lang": pair.source, "target_lang": pair.target} for pair in sorted(self._pairs(self._models(exchange)))]
        return json_response({"supported_languages": told})

    async def create(self, told: Told, exchange: Exchange) -> web.Response:
        """Make a glossary."""
        asked: AskedGlossary = exchange.message
        if not asked.name.strip():
            raise InvalidRequest("name", "is missing")
        given = [asked] if told is told_v2 else asked.dictionaries
        if not given:
            raise InvalidRequest("dictionaries", "is missing or empty")
        response = json_response(told(await self._write(exchange, "", given)))
        response.set_status(HTTPStatus.CREATED)
        return response

    async def all(self, told: Told, exchange: Exchange) -> web.Response:
        """Return the glossaries of the caller and of its models."""
        owner, models = owner_of(exchange), self._models(exchange)

        def read() -> list[Glossary]:
            return [*self._store.all(owner), *filter(None, (each.described() for each in of_models(models)))]

        found = await on_glossary_thread(read)
        return json_response({"glossaries": [told(each) for each in found if told is told_v3 or len(each.dictionaries) == 1]})

    async def show(self, told: Told, exchange: Exchange) -> web.Response:
        """Return a glossary without its entries."""
        return json_response(told(await self._find(exchange, is_of_one=told is told_v2)))

    async def entries(self, exchange: Exchange) -> web.Response:
        """Return the entries of a glossary for one pair as TSV."""
        accepted = exchange.http.headers.get("Accept", TSV)
        if not any(kind in accepted for kind in (TSV, "text/*", "*/*")):
            raise HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Accept: entries are {TSV}")
        glossary = await self._find(exchange, is_of_one=True)
        tsv = await self._tsv(exchange, glossary.dictionaries[0].pair)
        return web.Response(body=tsv, content_type=TSV, charset="utf-8")

    async def entries_of_pair(self, exchange: Exchange) -> web.Response:
        """Return the entries of a dictionary."""
        pair = self._pair(exchange, exchange.message)
        tsv = await self._tsv(exchange, pair)
        told = {"source_lang": pair.source, "target_lang": pair.target, "entries": tsv.decode(), "entries_format": "tsv"}
        return await run_by_size(len(tsv), json_response, {"dictionaries": [told]})

    async def change(self, exchange: Exchange) -> web.Response:
        """Change the name of a glossary, and add entries to its dictionaries."""
        written = await self._write(exchange, id_of(exchange), exchange.message.dictionaries, is_added=True)
        return json_response(told_v3(written))

    async def replace_dictionary(self, exchange: Exchange) -> web.Response:
        """Replace the entries of a dictionary."""
        pair = self._pair(exchange, exchange.message)
        written = await self._write(exchange, id_of(exchange), [exchange.message])
        return json_response(next(_told(each) for each in written.dictionaries if each.pair == pair))

    async def delete_dictionary(self, exchange: Exchange) -> web.Response:
        """Remove a dictionary."""
        pair = self._pair(exchange, exchange.message)

        def remove(draft: Draft) -> None:
            if draft.contents.pop(pair, None) is None:
                raise no_glossary()

        if await on_glossary_thread(self._store.write, owner_of(exchange), id_of(exchange), remove) is None:
            raise no_glossary()
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def delete(self, exchange: Exchange) -> web.Response:
        """Remove a glossary."""
        if not await on_glossary_thread(self._store.delete, owner_of(exchange), id_of(exchange)):
            raise no_glossary()
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def applied(self, names: Sequence[str], request: GenerateRequest, exchange: Exchange, source: str) -> GenerateRequest:
        """Return a request with the terms of glossaries; `source` is its language as given.

        A name that is no UUID is that of a glossary of the request's model. Raises `InvalidRequest` for an unknown id, and one
        without these languages.
        """
        others = [name for name in names if ID.fullmatch(name) is None]
        if len(names) > MAX_AT_ONCE or len(others) > 1:
            raise InvalidRequest("glossary_ids", f"has at most {MAX_AT_ONCE} ids, one of which may be a name")
        if len(others) < len(names) and not source:
            raise InvalidRequest("source_language", "is needed where glossaries are given by id")
        owner, models = owner_of(exchange), self._models(exchange)
        pair = Pair(*(base_of(self._languages.find(models, each)) for each in (request.source_language, request.target_language)))

        def read() -> tuple[TermIndex, ...]:
            return tuple(self._index(owner, models, name, pair) for name in names if name not in others)

        return replace(request, glossary=others[0] if others else "", indexes=await on_glossary_thread(read))

    def _index(self, owner: str, models: Models, glossary_id: str, pair: Pair) -> TermIndex:
        if (index := self._store.index(owner, glossary_id, pair)) is not None:
            return index
        found = next((each for each in of_models(models) if each.id == glossary_id), None)
        if found is not None and found.pair == pair:
            return found.model.glossaries.find(found.name)
        is_known = found is not None or self._store.find(owner, glossary_id) is not None
        reason = f"has no entries from {pair.source.upper()} to {pair.target.upper()}" if is_known else "is not known"
        raise InvalidRequest("glossary", f"{shown(glossary_id)} {reason}")

    async def _write(self, exchange: Exchange, glossary_id: str, given: Sequence[Entries], *, is_added: bool = False) -> Glossary:
        """Write dictionaries of a request, and its name if it has one; `is_added` keeps the entries that a dictionary has."""
        name, owner, models = exchange.message.name, owner_of(exchange), self._models(exchange)
        if len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidRequest("name", f"has more than {MAX_NAME_BYTES} bytes")
        pairs = [self._pair(exchange, each) for each in given]
        if len(set(pairs)) < len(pairs):
            raise InvalidRequest("dictionaries", "has two for the same languages")
        if unable := set(pairs) - self._pairs(models):
            raise InvalidRequest("target_language", "no model translates from {} to {}".format(*map(shown, min(unable))))
        for each in given:
            if each.entries_format not in ENTRY_FORMATS:
                raise InvalidRequest("entries_format", f"{shown(each.entries_format)} is not one of {', '.join(ENTRY_FORMATS)}")

        def write() -> Glossary | None:
            read = [read_entries(each.entries, each.entries_format, *pair) for pair, each in zip(pairs, given, strict=True)]

            def change(draft: Draft) -> None:
                draft.name = name or draft.name
                for pair, entries in zip(pairs, read, strict=True):
                    before = entries_of(draft.contents[pair]) if is_added and pair in draft.contents else {}
                    draft.contents[pair] = tsv_of(before | entries)

            return self._store.write(owner, glossary_id, change)

        try:
            written = await on_glossary_thread(write)
        except GlossaryLimit as reached:
            raise HttpRefusal(QUOTA_EXCEEDED, reached.message) from None
        if written is None:
            raise no_glossary()
        return written

    async def _find(self, exchange: Exchange, *, is_of_one: bool) -> Glossary:
        """Return the glossary of the path's id, for v2 only with one dictionary."""
        glossary_id, owner, models = id_of(exchange), owner_of(exchange), self._models(exchange)

        def find() -> Glossary | None:
            found = self._store.find(owner, glossary_id)
            return found or next((each.described() for each in of_models(models) if each.id == glossary_id), None)

        found = await on_glossary_thread(find)
        if found is None or (is_of_one and len(found.dictionaries) != 1):
            raise no_glossary()
        return found

    async def _tsv(self, exchange: Exchange, pair: Pair) -> bytes:
        glossary_id, owner, models = id_of(exchange), owner_of(exchange), self._models(exchange)

        def read() -> bytes | None:
            if (own := self._store.entries(owner, glossary_id, pair)) is not None:
                return own
            found = (each for each in of_models(models) if each.id == glossary_id and each.pair == pair)
            return next((tsv_of(each.model.glossaries.read(each.name)) for each in found), None)

        if (tsv := await on_glossary_thread(read)) is None:
            raise no_glossary()
        return tsv

    def _models(self, exchange: Exchange) -> Models:
        return self._generation.models(exchange.call.caller)

    def _pairs(self, models: Models) -> set[Pair]:
        found = {Pair(base_of(one.code), base_of(target)) for one in self._languages.all(models) for target in one.targets}
        return {pair for pair in found if pair.source != pair.target}

    def _pair(self, exchange: Exchange, asked: Entries) -> Pair:
        """Return the languages of a dictionary, which may be in any spelling."""
        codes, models = [], self._models(exchange)
        for field, code in (("source_language", asked.source_lang), ("target_language", asked.target_lang)):
            if not code:
                raise InvalidRequest(field, "is missing")
            codes.append(base_of(self._languages.find(models, check_length(field, code)) or code))
        return Pair(*codes)


async def read_asked(request: web.Request, body: bytes) -> AskedGlossary:
    """Decode a request; raise `InvalidRequest` if it is malformed."""
    content = await read_content(request, body)
    fields = dict(content)
    if len(fields) < len(content):
        raise InvalidRequest("body", "has a field more than once")
    try:
        return msgspec.convert(fields, AskedGlossary)
    except msgspec.ValidationError as error:
        raise InvalidRequest("body", one_line(error)) from None


def of_models(models: Models) -> Iterator[OfModel]:
    """Yield the glossaries of models for one pair; it reads folders."""
    for model in models:
        if is_of_one_pair(model):
            yield from (
                OfModel(str(uuid5(NAMESPACE_URL, f"{model.name}/{name}")), name, model) for name in model.glossaries.names()
            )


def base_of(code: str) -> str:
    """Return a language without its region, for all of which a glossary is."""
    return code.lower().partition("-")[0]


def owner_of(exchange: Exchange) -> str:
    """Return the owner of the caller's glossaries; without authentication all callers are one."""
    return "" if exchange.call.caller is None else exchange.call.caller.name


def id_of(exchange: Exchange) -> str:
    """Return the path's id."""
    return exchange.http.match_info["id"]


def no_glossary() -> HttpRefusal:
    """Return the refusal of an unknown glossary, and of a change to one of a model."""
    return HttpRefusal(HTTPStatus.NOT_FOUND, "glossary_id: the caller has none of this id and these languages")


def told_v2(glossary: Glossary) -> dict[str, Any]:
    """Return the description of a glossary with one dictionary."""
    return _named(glossary) | {"ready": True} | _told(glossary.dictionaries[0])


def told_v3(glossary: Glossary) -> dict[str, Any]:
    """Return the description of a glossary."""
    return _named(glossary) | {"dictionaries": [*map(_told, glossary.dictionaries)]}


def _named(glossary: Glossary) -> dict[str, Any]:
    created = datetime.fromtimestamp(glossary.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"glossary_id": glossary.id, "name": glossary.name, "creation_time": created}


def _told(dictionary: Dictionary) -> dict[str, Any]:
    return {"source_lang": dictionary.source, "target_lang": dictionary.target, "entry_count": dictionary.num_entries}
