"""The OpenAPI document of what HTTP answers, which `protos/openapi.py` writes, and a page to read it on, without any script."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from aiohttp import web

PATH, PAGE_PATH = "/openapi.json", "/docs"
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 0.9em/1.4 ui-monospace, monospace; }
pre { overflow: auto; padding: 0.75rem; border: 1px solid; border-radius: 0.4rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem 0.3rem 0; border-bottom: 1px solid #8885; }
h2 { margin-top: 2.5rem; } h2 code { font-size: 1em; }
"""
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def answer_document(_: web.Request) -> web.Response:
    """Answer with the document."""
    return web.Response(body=document(), content_type="application/json")


async def answer_page(_: web.Request) -> web.Response:
    """Answer with the page."""
    return web.Response(text=page(), content_type="text/html", headers={"Content-Security-Policy": POLICY})


@cache
def document() -> bytes:
    """Return the document, as it lies beside this file."""
    return files("dragoman.server.faces.http").joinpath("openapi.json").read_bytes()


@cache
def page() -> str:
    """Return the page."""
    told = json.loads(document())
    parts = [*_operations(told), *_schemas(told)]
    title = escape(told["info"]["title"])
    link = f'<p>For tools: <a href="{PATH}">{PATH[1:]}</a> (OpenAPI {escape(told["openapi"])}).</p>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}: HTTP API</title><style>{STYLE}</style></head><body><main><h1>{title}: HTTP API</h1>"
        f"{_paragraphs(told['info']['description'])}"
        f"{link}{''.join(parts)}</main></body></html>"
    )


def _operations(told: dict[str, Any]) -> Iterator[str]:
    for path, methods in told["paths"].items():
        for method, what in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>{_paragraphs(what['description'])}"
            for content in what.get("requestBody", {}).get("content", {}).values():
                yield f"<p>Body: {_told(content['schema'])}</p>"
            for kind, content in what["responses"]["200"]["content"].items():
                yield f"<p>Answer, <code>{escape(kind)}</code>: {_told(content['schema'])}</p>"
    responses = told["components"]["responses"].items()
    rows = [(escape(number), escape(one["description"])) for number, one in responses if number.isdecimal()]
    kinds = _kind({"$ref": "/Status"}), _kind({"$ref": "/InferenceError"})
    yield f"<h2>Errors</h2><p>Each is a {kinds[0]}, under <code>/v2</code> an {kinds[1]}.</p>{_table(('Status', ''), rows)}"
    headers = told["components"]["parameters"].values()
    rows = [(f"<code>{escape(one['name'])}</code>", escape(one["description"])) for one in headers]
    yield f"<h2>Headers of requests</h2>{_table(('Header', ''), rows)}"


def _schemas(told: dict[str, Any]) -> Iterator[str]:
    for name, schema in told["components"]["schemas"].items():
        yield f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>{_paragraphs(schema.get("description", ""))}'
        if "properties" in schema:
            fields = schema["properties"].items()
            rows = [(f"<code>{escape(field)}</code>", _kind(one), _inline(one.get("description", ""))) for field, one in fields]
            yield _table(("Field", "Kind", ""), rows)
        elif not schema.get("description"):
            yield "<p>" + ", ".join(f"<code>{escape(one)}</code>" for one in schema.get("enum", ())) + "</p>"


def _told(schema: dict[str, Any]) -> str:
    """Say what a body is: a kind of thing or, of what JSON does not tell, its description."""
    return _inline(schema["description"]) if schema.get("type") == "string" else f"{_kind(schema)}."


def _kind(schema: dict[str, Any]) -> str:
    """Name what a schema is, with a link to where it is described."""
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
    """Return a text with what stands between backticks as code."""
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(text.split("`")))
