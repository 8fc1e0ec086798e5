"""`/openapi.json`, and `/docs`: a page without scripts on which to read it."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import Any

from aiohttp import web

from dragoman.server.protocols.http.openapi import document
from dragoman.server.service.sentences import on_thread

PATH, PAGE_PATH = "/openapi.json", "/docs"
# As console.css, which is not served where the console is off.
STYLE = """
:root { color-scheme: light dark;
  --paper: #faf9f6; --pane: #fff; --ink: #1d2322; --soft: #59625f; --line: #dedfd9; --accent: #0f6a66; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #131716; --pane: #1a1f1e; --ink: #e7eae7; --soft: #a0aaa5; --line: #2d3433; --accent: #66c7bd; } }
html { font: 100%/1.55 Inter, system-ui, -apple-system, "Segoe UI", sans-serif; background: var(--paper); color: var(--ink); }
body { max-width: 60rem; margin: 0 auto; padding: 1rem 1rem 4rem; overflow-wrap: break-word; }
a { color: var(--accent); }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 0; padding-top: 1rem; border-top: 1px solid var(--line); scroll-margin-top: 1rem; }
h2 code { font-weight: 650; color: var(--accent); }
p { margin: 0.6rem 0; max-width: 46rem; }
code { font: 0.9em ui-monospace, "SF Mono", Menlo, monospace; }
table { border-collapse: collapse; width: 100%; margin-top: 0.75rem; font-size: 0.9rem; background: var(--pane); }
table, tr { border: 1px solid var(--line); }
th, td { text-align: start; vertical-align: top; padding: 0.35rem 0.75rem; }
th { color: var(--soft); font-weight: 550; }
@media (max-width: 44rem) { table, tbody { display: block; } thead { display: none; }
  tr { display: block; padding: 0.35rem 0.75rem; }
  td { display: inline; padding: 0 0.5rem 0 0; } td:last-child { display: block; } }
"""
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def answer_document(_: web.Request) -> web.Response:
    """Return the document."""
    return web.Response(body=await on_thread(document), content_type="application/json")


async def answer_page(_: web.Request) -> web.Response:
    """Return the page."""
    return web.Response(text=await on_thread(page), content_type="text/html", headers={"Content-Security-Policy": POLICY})


@cache
def page() -> str:
    """Return the page."""
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
            for kind, content in operation["responses"]["200"]["content"].items():
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
    """Return the schema of a body or, of a body that is not JSON, its description."""
    return _inline(schema["description"]) if schema.get("type") == "string" else f"{_kind(schema)}."


def _kind(schema: dict[str, Any]) -> str:
    """Return the name of a schema, with a link to its description."""
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
    """Return a text as HTML; text between backticks becomes code."""
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(text.split("`")))
