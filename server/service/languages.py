"""Prompt templates: text and ids around a source by the request's languages, and encoding of continued texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from dragoman.export.fields import BundleError
from dragoman.model.generation import Language, Languages, LanguageTable, around
from dragoman.model.text.tokenizer import Detokenizer, Tokenizer
from dragoman.server.engine.messages import Request, ScoreRequest, SearchOptions
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.requests import check_length, default_options

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest

# For languages listed in an error: a model may have hundreds, and gRPC status travels in headers.
MAX_LISTED_CHARACTERS = 400
MAX_SHOWN_CHARACTERS = 32
# Templates cached for a model, by language pair.
MAX_KEPT = 1024
READS, WRITES = "reads", "writes"
# Contexts for encoding a continuation; with most tokenisers at least one shares no token with it.
GUARDS = ("a", ".", "0", "\n")


class PromptTemplate(Struct, frozen=True, eq=False):
    """Text and ids around a source, and the default search options.

    Attributes:
        source_language: Language code; empty if the model takes none.
        task: Text before the source text.
        source_prefix: Ids before the text; for a prompt, beginning with the start token.
        source_suffix: Ids after the text, beginning with end-of-sequence unless the text is a prompt.
        target_prefix: Ids forced at the start of every answer.
        decoder_start_id: First decoder input; None for the model's own, or for a prompt (its last token).
        search: Search options of a request without any; the seed of a `Sampling` is drawn for each request.
        num_around: Tokens around a text, end-of-sequence or the start token included.
        has_prompts: Whether the answer continues the text (decoder-only models).
    """

    source_language: str
    target_language: str
    task: str
    source_prefix: Sequence[int]
    source_suffix: Sequence[int]
    target_prefix: list[int]
    decoder_start_id: int | None
    search: SearchOptions
    num_around: int
    has_prompts: bool = False

    def surround(self, ids: Sequence[int]) -> tuple[list[int], int | None]:
        """Return the source ids `[S]` for the ids of a text, and the first decoder input (None for the model's own)."""
        whole = [*self.source_prefix, *ids, *self.source_suffix]
        return (whole[:-1], whole[-1]) if self.has_prompts else (whole, self.decoder_start_id)

    def before(self, request: Request | ScoreRequest) -> list[int]:
        """Return the ids of the prompt that the answer continues; empty without prompts."""
        if not self.has_prompts:
            return []
        assert request.decoder_start_id is not None, "a prompt's last token"
        return [*request.source_ids, request.decoder_start_id]

    def num_source_tokens(self, source_ids: Sequence[int]) -> int:
        """Return the number of source tokens; for a prompt, including the first decoder input."""
        return len(source_ids) + self.has_prompts


class PromptTemplates:
    """Templates of one model, and the languages that it reads and writes, by code."""

    def __init__(self, manifest: "Manifest") -> None:
        """Read a manifest; raise `BundleError` if the task names a language of a side that has none."""
        self._manifest = manifest
        languages = manifest.languages or Languages()
        self._sides = {
            READS: LanguageTable(languages.source, languages.default_source),
            WRITES: LanguageTable(languages.target, languages.default_target),
        }
        self._codes = {READS: [x.code for x in languages.source], WRITES: [x.code for x in languages.target]}
        self._templates: dict[tuple[str, str], PromptTemplate] = {}
        for side, count in (("source", len(languages.source)), ("target", len(languages.target))):
            if not count and f"{{{side}}}" in manifest.template.task:
                raise BundleError(f"model {manifest.name}: the task of its template needs a {side} language, but there is none")
        self.source_languages = sorted(languages.source, key=_code)
        self.target_languages = sorted(languages.target, key=_code)
        # Sides whose language a request must name: the model needs it, and there is no default.
        self._needed = {
            side
            for side, choice, place in ((READS, languages.source, "{source}"), (WRITES, languages.target, "{target}"))
            if choice and self._sides[side].default is None and (place in manifest.template.task or any(map(_is_given, choice)))
        }
        self._default = self._make(self._sides[READS].default, self._sides[WRITES].default) if not self._needed else None

    @property
    def default_source_language(self) -> str:
        """Code of the default source language; empty if there is none."""
        return _code(self._sides[READS].default)

    @property
    def default_target_language(self) -> str:
        """Code of the default target language; empty if there is none."""
        return _code(self._sides[WRITES].default)

    def find(self, source_language: str = "", target_language: str = "") -> PromptTemplate:
        """Return the template for two languages in any spelling, "" for defaults; raise `InvalidRequest` if unknown or missing."""
        if not (source_language or target_language) and self._default is not None:
            return self._default
        source = self._language("source_language", source_language, READS)
        target = self._language("target_language", target_language, WRITES)
        key = (_code(source), _code(target))
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MAX_KEPT:
                self._templates.clear()
            template = self._templates[key] = self._make(source, target)
        return template

    def reads(self, asked: str) -> Language | None:
        """Return a source language by any of its spellings; None if unknown."""
        return self._sides[READS].find(asked)

    def writes(self, asked: str) -> Language | None:
        """Return a target language by any of its spellings; None if unknown."""
        return self._sides[WRITES].find(asked)

    def is_able(self, source_language: str, target_language: str) -> bool:
        """Return whether the model translates this pair; an empty source language is unspecified."""
        if self.writes(target_language) is None:
            return False
        return self.reads(source_language) is not None if source_language else READS not in self._needed

    def _language(self, field: str, asked: str, verb: str) -> Language | None:
        """Return the language of one side, None if the model takes none."""
        check_length(field, asked)
        table, codes, name = self._sides[verb], self._codes[verb], self._manifest.name
        if not asked:
            if verb in self._needed:
                raise InvalidRequest(field, f"is missing; model {name} {verb} {listed(codes)}")
            return table.default
        if not codes:
            raise InvalidRequest(field, f"model {name} says no languages that it {verb}, so a request cannot choose one")
        if (language := table.find(asked)) is None:
            raise InvalidRequest(field, f"{shown(asked)} is no language that model {name} {verb}, which are {listed(codes)}")
        return language

    def _make(self, source: Language | None, target: Language | None) -> PromptTemplate:
        template = self._manifest.template
        given = around(template, source, target, self._manifest.eos_id)
        source_prefix, source_suffix, start = given.source_prefix, given.source_suffix, given.decoder_start_id
        if self._manifest.has_prompts:
            first = self._manifest.decoder_start_id if start is None else start
            source_prefix, source_suffix, start = [first, *source_prefix], source_suffix[1:], None
        return PromptTemplate(
            source_language=_code(source),
            target_language=_code(target),
            task=template.task_text(source, target),
            source_prefix=source_prefix,
            source_suffix=source_suffix,
            target_prefix=given.target_prefix,
            decoder_start_id=start,
            search=default_options(self._manifest, given.target_prefix),
            num_around=len(source_prefix) + len(source_suffix),
            has_prompts=self._manifest.has_prompts,
        )


def shown(language: str) -> str:
    """Return a language quoted for an error."""
    return ascii(language[:MAX_SHOWN_CHARACTERS])


def listed(codes: Sequence[str], max_characters: int = MAX_LISTED_CHARACTERS) -> str:
    """Return codes separated by commas, cut to a length, with the number of omitted codes."""
    kept: list[str] = []
    num_characters = 0
    for code in codes:
        num_characters += len(code) + 2
        if kept and num_characters > max_characters:
            return f"{', '.join(kept)} and {len(codes) - len(kept)} more"
        kept.append(code)
    return ", ".join(kept)


def encode_after(tokenizer: Tokenizer, before: Sequence[int], text: str) -> list[int]:
    """Return the ids of a text that continues `before`, encoded as in the middle of a text.

    Tokenisers may add or strip a space at the start of a text; a space at the seam belongs to the continuation, as in "The dog" and
    " runs". If `before` has no text, the text is encoded on its own.
    """
    return encode_within(tokenizer, text) if text and tokenizer.decode(before) else tokenizer.encode(text)


def encode_within(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text in the middle of another."""
    for guard in GUARDS:
        first, whole = tokenizer.encode(guard), tokenizer.encode(guard + text)
        if whole[: len(first)] == first:
            return whole[len(first) :]
    return tokenizer.encode(text)


def detokenizer_after(tokenizer: Tokenizer, before: Sequence[int]) -> Detokenizer:
    """Return a detokeniser for ids that continue `before`."""
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(before)
    return detokenizer


def decode_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids that continue `before`."""
    if not before:
        return tokenizer.decode(ids)
    detokenizer = detokenizer_after(tokenizer, before)
    return detokenizer.push(ids) + detokenizer.finish()


def _is_given(language: Language) -> bool:
    """Return whether the model takes ids for a language, besides the task's text."""
    affixes = (language.source_prefix, language.source_suffix, language.target_prefix)
    return any(affixes) or language.decoder_start_id is not None


def _code(language: Language | None) -> str:
    return "" if language is None else language.code
