"""Decoding of DeepL's requests: JSON, forms and query arguments."""

import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from msgspec import Struct

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.http.forms import read_content
from dragoman.server.protocols.json_text import one_line
from dragoman.server.service.languages import shown
from dragoman.server.service.requests import MARKUPS, NO_RULES, GenerateRequest, TagRules

# DeepL's own limit is 50; forms have fewer fields.
MAX_TEXTS = 1024
# `split` for each value of `split_sentences`; with `nonewlines` line breaks become spaces.
SPLITS = {"1": "sentences", "0": "none", "nonewlines": "sentences"}
# The first is ours.
TEXTS = ("model", "source_lang", "target_lang", "split_sentences", "model_type", "auth_key", "type", "tag_handling")
OF_DOCUMENTS = ("filename", "output_format", "document_key")
# Parameters that are read and change nothing; billed characters are always shown.
IGNORED = ("context", "preserve_formatting", "enable_beta_languages", "tag_handling_version", "show_billed_characters")
# Parameters that may be empty or have one of these values only: what they ask for is not offered.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "formality": ("default", "prefer_more", "prefer_less"),
    **dict.fromkeys(("style_id", "custom_instructions"), ()),
    **dict.fromkeys(("translation_memory_id", "translation_memory_threshold"), ()),
}
# Fields of `TagRules`.
TAGS = {"ignore_tags": "untouched", "splitting_tags": "splitting", "non_splitting_tags": "non_splitting"}
NO_OUTLINE = (False, "0", "false")
OUTLINES = ("", True, "1", "true", *NO_OUTLINE)
_NAME = re.compile(r"[^\W\d][\w:.-]*")
_LINE_BREAK = re.compile(r"\r\n|[\n\r\v\f\x85\u2028\u2029]")


class Asked(Struct, frozen=True):
    """A request; fields have DeepL's names, and are empty where it has none."""

    texts: Sequence[str] = ()
    source_lang: str = ""
    target_lang: str = ""
    split_sentences: str = "1"
    tag_handling: str = ""
    tag_rules: TagRules = NO_RULES
    glossary_ids: Sequence[str] = ()
    model_type: str = ""
    auth_key: str = ""
    document_key: str = ""
    model: str = ""  # our extension
    file: bytes = b""
    filename: str = ""
    output_format: str = ""
    type: str = "source"

    def request(self, source: str, target: str) -> GenerateRequest:
        """Return the request without a text."""
        return GenerateRequest(
            model=self.model,
            source_language=source,
            target_language=target,
            split=SPLITS[self.split_sentences],
            markup=self.tag_handling,
            tag_rules=self.tag_rules,
        )


async def read_request(request: web.Request, body: bytes) -> Asked:
    """Decode a request; raise `InvalidRequest` if it is malformed, or asks for what is not offered."""
    return to_asked(await read_content(request, body))


async def read_upload(request: web.Request, body: bytes) -> Asked:
    """Decode a request with a file; raises as `read_request`."""
    return to_asked(await read_content(request, body, has_file=True))


def to_asked(content: dict[str, Any] | Sequence[tuple[str, str]]) -> Asked:
    """Convert a message; raises as `read_request`."""
    if not isinstance(content, dict):
        content = _of_form(content)
    content = {name: value for name, value in content.items() if value is not None}
    for name in IGNORED:
        content.pop(name, None)
    for name, values in NEUTRAL.items():
        if (value := content.pop(name, "")) not in ("", [], *values):
            offered = f"; {', '.join(map(str, values))} are" if values else ""
            raise InvalidRequest(name, f"{shown(str(value))} is not offered{offered}")
    texts = content.pop("text", [])
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("text", "is neither a text nor a list of texts")
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest("text", f"{len(texts)} texts; at most {MAX_TEXTS} are translated at once")
    file = content.pop("file", b"")
    file = file if isinstance(file, bytes) else _text("file", file).encode(errors="replace")
    fields = {name: _text(name, content.pop(name)) for name in (*TEXTS, *OF_DOCUMENTS) if content.get(name, "") != ""}
    given = [value for name in ("glossary_id", "glossary_ids") if (value := content.pop(name, None))]
    glossaries = given[0] if given else []
    glossaries = glossaries.split(",") if isinstance(glossaries, str) else glossaries
    if len(given) > 1 or not isinstance(glossaries, list) or not all(isinstance(name, str) for name in glossaries):
        raise InvalidRequest("glossary_ids", "is neither a text nor a list of texts, or given beside glossary_id")
    rules = _tag_rules(content, fields.get("tag_handling", ""))
    if content := {name: value for name, value in content.items() if value != ""}:
        raise InvalidRequest(one_line(next(iter(content))), "is not known")
    if (split := fields.get("split_sentences", "1")) not in SPLITS:
        raise InvalidRequest("split_sentences", f"{shown(split)} is not one of {', '.join(SPLITS)}")
    texts = [_LINE_BREAK.sub(" ", text) for text in texts] if split == "nonewlines" else texts
    return Asked(texts, tag_rules=rules, glossary_ids=glossaries, file=file, **fields)


def _tag_rules(content: dict[str, Any], kind: str) -> TagRules:
    """Take the rules for tags from a message."""
    rules: dict[str, Any] = {}
    for field, rule in TAGS.items():
        value = content.pop(field, ())
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
            raise InvalidRequest(field, "is neither a text nor a list of texts")
        found = frozenset(name.strip() for name in listed if name.strip())
        if found and (kind in ("", MARKUPS[0]) or not all(map(_NAME.fullmatch, found))):
            raise InvalidRequest(field, "has names of tags, and goes with tag_handling")
        rules[rule] = frozenset(map(str.lower, found)) if kind == "html" else found
    if (outline := content.pop("outline_detection", "")) not in OUTLINES or (outline in NO_OUTLINE and kind != "xml"):
        raise InvalidRequest("outline_detection", "is true or false, which goes with tag_handling=xml")
    return TagRules(**rules, has_outline=outline not in NO_OUTLINE)


def _of_form(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of a form, in which the text may be repeated."""
    content: dict[str, Any] = {"text": [value for name, value in pairs if name == "text"]}
    for name, value in pairs:
        if name != "text" and content.setdefault(name, value) is not value:
            raise InvalidRequest(one_line(name), "is given more than once")
    return content


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, "is no text")
    return value
