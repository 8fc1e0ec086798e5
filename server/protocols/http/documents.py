"""`/openapi.json`, and `/docs`: the same as a page without scripts."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from aiohttp import web

from dragoman.server.protocols.http.openapi import document
from dragoman.server.service.sentences import on_thread

PATH, PAGE_PATH = "/openapi.json", "/docs"
PATHS = (PATH, "/spec")  # the second is LibreTranslate's
STYLE = files("dragoman.server.protocols.console").joinpath("assets", "docs.css").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def answer_document(_: web.Request) -> web.Response:
    """Return the OpenAPI document."""
    return web.Response(body=await on_thread(document), content_type="application/json")


async def answer_page(_: web.Request) -> web.Response:
    """Return the documentation page."""
    return web.Response(text=await on_thread(page), content_type="text/html", headers={"Content-Security-Policy": POLICY})


@cache
def page() -> str:
    """Return the documentation page as HTML."""
    spec = json.loads(document())
    parts = [*_operations(spec), *_schemas(spec)]
    title = escape(spec["info"]["title"])
    link = f'<p>For tools: <a href="{PATH}">{PATH[1:]}</a> (OpenAPI {escape(spec["openapi"])}).</p>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}: HTTP API</title><style>{STYLE}</style></head><body><main><h1>{title}: HTTP API</h1>"
        f"{_paragraphs(spec['info']['description'])}"
        f"{link}{''.join(parts)}</main></body></html>"
    )


def _operations(spec: dict[str, Any]) -> Iterator[str]:
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>{_paragraphs(operation['description'])}"
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield f"<p>Body: {_body(content['schema'])}</p>"
            for kind, content in next(iter(operation["responses"].values())).get("content", {}).items():
                yield f"<p>Response, <code>{escape(kind)}</code>: {_body(content['schema'])}</p>"
    responses = spec["components"]["responses"].items()
    rows = [(escape(number), escape(one["description"])) for number, one in responses if number.isdecimal()]
    kinds = _kind({"$ref": "/Status"}), _kind({"$ref": "/InferenceError"})
    yield f"<h2>Errors</h2><p>Each is a {kinds[0]}, under <code>/v2</code> an {kinds[1]}.</p>{_table(('Status', 'Meaning'), rows)}"
    headers = spec["components"]["parameters"].values()
    rows = [(f"<code>{escape(one['name'])}</code>", escape(one["description"])) for one in headers]
    yield f"<h2>Headers of requests</h2>{_table(('Header', 'Meaning'), rows)}"


def _schemas(spec: dict[str, Any]) -> Iterator[str]:
    for name, schema in spec["components"]["schemas"].items():
        yield f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>{_paragraphs(schema.get("description", ""))}'
        if "properties" in schema:
            fields = schema["properties"].items()
            rows = [(f"<code>{escape(field)}</code>", _kind(one), _inline(one.get("description", ""))) for field, one in fields]
            yield _table(("Field", "Kind", "Meaning"), rows)
        elif not schema.get("description"):
            yield "<p>" + ", ".join(f"<code>{escape(one)}</code>" for one in schema.get("enum", ())) + "</p>"


def _body(schema: dict[str, Any]) -> str:
    """Return a body's schema or, if it is not JSON, its description."""
    return _inline(schema["description"]) if schema.get("type") == "string" else f"{_kind(schema)}."


def _kind(schema: dict[str, Any]) -> str:
    """Return a schema's name, linked to its description."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "oneOf" in schema:
        return " or ".join(map(_kind, schema["oneOf"]))
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}" if schema["items"] else "list"
    encoding = schema.get("contentEncoding")
    return escape(schema.get("format", schema["type"]) + (f", {encoding}" if encoding else ""))


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{_inline(part)}</p>" for part in text.split("\n\n") if part)


def _inline(text: str) -> str:
    """Return text as HTML, with backticks as code."""
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(text.split("`")))
