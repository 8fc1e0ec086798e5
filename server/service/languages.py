"""Prompt templates and languages, and continuation of a given prefix."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from dragoman.export.fields import BundleError
from dragoman.model.generation import Language, Languages, around
from dragoman.model.languages import LanguageTable
from dragoman.model.text.tokenizer import Detokenizer, Tokenizer
from dragoman.server.engine.messages import Request, ScoreRequest, SearchOptions
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.defaults import default_search

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest


MAX_LANGUAGE_CHARACTERS = 128
# Of the languages that a refusal lists; a model may have hundreds, and a status travels in headers.
MAX_LISTED_CHARACTERS = 400
MAX_SHOWN_CHARACTERS = 32
# Pairs of languages that are remembered.
MAX_KEPT = 1024
READS, WRITES = "reads", "writes"


class Frame(Struct, frozen=True, eq=False):
    """What is around a text, and how it is searched for where the request does not say.

    Attributes:
        source_language: Code of the source's language; empty where the model is told none.
        target_language: Code of the answer's.
        task: Text before the source's own.
        source_prefix: Ids before the text; of a prompt, the start token is the first.
        source_suffix: Ids after it, of which end-of-sequence is the first, unless it is a prompt.
        target_prefix: Ids that every answer is forced to begin with.
        decoder_start_id: What the decoder is fed first, None for the model's; of a prompt, its last token is that.
        search: The options of a request that has none; the seed of a `Sampling` is to be drawn.
        num_around: Tokens around a text, end-of-sequence or the start token included.
        has_prompts: Whether a text is a prompt, which the answer goes on with.
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

    def framed(self, ids: Sequence[int]) -> tuple[list[int], int | None]:
        """Return a source as it is read, made of the ids of its text, and what the decoder is fed first; None for the model's."""
        whole = [*self.source_prefix, *ids, *self.source_suffix]
        return (whole[:-1], whole[-1]) if self.has_prompts else (whole, self.decoder_start_id)

    def before(self, request: Request | ScoreRequest) -> list[int]:
        """Return the ids that the answer's text goes on with: those of a prompt, or none where source and answer are two texts."""
        if not self.has_prompts:
            return []
        assert request.decoder_start_id is not None, "a prompt's last token"
        return [*request.source_ids, request.decoder_start_id]

    def num_source_tokens(self, source_ids: Sequence[int]) -> int:
        """Return how many tokens a source has, that of a prompt included which the decoder is fed first."""
        return len(source_ids) + self.has_prompts


class Frames:
    """Those of one model."""

    def __init__(self, manifest: "Manifest") -> None:
        """Take what a bundle says of generation.

        Raises:
            BundleError: If the model is told a task that needs a language of a side which has none.
        """
        self._manifest = manifest
        languages = manifest.languages or Languages()
        self._sides = {
            READS: LanguageTable(languages.source, languages.default_source),
            WRITES: LanguageTable(languages.target, languages.default_target),
        }
        self._codes = {READS: [x.code for x in languages.source], WRITES: [x.code for x in languages.target]}
        self._frames: dict[tuple[str, str], Frame] = {}
        for side, count in (("source", len(languages.source)), ("target", len(languages.target))):
            if not count and f"{{{side}}}" in manifest.template.task:
                raise BundleError(f"model {manifest.name}: the task of its template needs a {side} language, but there is none")
        #: Those that it reads and those that it writes, by code.
        self.source_languages = sorted(languages.source, key=_code)
        self.target_languages = sorted(languages.target, key=_code)
        told = {READS: (languages.source, "{source}"), WRITES: (languages.target, "{target}")}
        #: Sides of which a request has to name a language: what it names is said to the model, and there is no default.
        self._needed = {
            side
            for side, (choice, place) in told.items()
            if choice and self._sides[side].default is None and (place in manifest.template.task or any(map(_is_said, choice)))
        }
        self._default = self._frame(self._sides[READS].default, self._sides[WRITES].default) if not self._needed else None

    @property
    def default_source_language(self) -> str:
        """Code of the language of a source that a request says nothing of; empty where it has to, or there is none."""
        return _code(self._sides[READS].default)

    @property
    def default_target_language(self) -> str:
        """The same of answers."""
        return _code(self._sides[WRITES].default)

    def find(self, source_language: str = "", target_language: str = "") -> Frame:
        """Return the frame for two languages, by any of their spellings; empty for the model's default.

        Raises:
            InvalidRequest: If the model has no such language, or needs one that is not said.
        """
        if not (source_language or target_language) and self._default is not None:
            return self._default
        source = self._language("source_language", source_language, READS)
        target = self._language("target_language", target_language, WRITES)
        key = (_code(source), _code(target))
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= MAX_KEPT:
                self._frames.clear()
            frame = self._frames[key] = self._frame(source, target)
        return frame

    def reads(self, asked: str) -> Language | None:
        """Return the language that the model is told of a source, by any of its spellings; None where it is told no such."""
        return self._sides[READS].find(asked)

    def writes(self, asked: str) -> Language | None:
        """Return the same of answers."""
        return self._sides[WRITES].find(asked)

    def is_able(self, source_language: str, target_language: str) -> bool:
        """Whether the model writes a language and reads another, by any of their spellings; empty for one that need not be said."""
        if self.writes(target_language) is None:
            return False
        return self.reads(source_language) is not None if source_language else READS not in self._needed

    def _language(self, field: str, asked: str, verb: str) -> Language | None:
        """Return one side's language, None where the model is told none."""
        check_language(field, asked)
        table, codes, name = self._sides[verb], self._codes[verb], self._manifest.name
        if not asked:
            if verb in self._needed:
                raise InvalidRequest(field, f"is missing; model {name} {verb} {listed(codes)}")
            return table.default
        if not codes:
            raise InvalidRequest(field, f"model {name} says no languages that it {verb}, so a request cannot choose one")
        if (language := table.find(asked)) is None:
            shown = ascii(asked[:MAX_SHOWN_CHARACTERS])
            raise InvalidRequest(field, f"{shown} is no language that model {name} {verb}, which are {listed(codes)}")
        return language

    def _frame(self, source: Language | None, target: Language | None) -> Frame:
        """Put together what the template and two languages say."""
        template, defaults = self._manifest.template, self._manifest.defaults
        said = around(template, source, target, self._manifest.eos_id)
        source_prefix, source_suffix, start = said.source_prefix, said.source_suffix, said.decoder_start_id
        if self._manifest.has_prompts:
            first = self._manifest.decoder_start_id if start is None else start
            source_prefix, source_suffix, start = [first, *source_prefix], source_suffix[1:], None
        return Frame(
            source_language=_code(source),
            target_language=_code(target),
            task=template.task_text(source, target),
            source_prefix=source_prefix,
            source_suffix=source_suffix,
            target_prefix=said.target_prefix,
            decoder_start_id=start,
            search=default_search(defaults, said.target_prefix),
            num_around=len(source_prefix) + len(source_suffix),
            has_prompts=self._manifest.has_prompts,
        )


def check_language(field: str, asked: str) -> str:
    """Return what is asked for as it is.

    Raises:
        InvalidRequest: If no language can be called so.
    """
    if len(asked) > MAX_LANGUAGE_CHARACTERS:
        raise InvalidRequest(field, f"{len(asked)} characters; at most {MAX_LANGUAGE_CHARACTERS} are allowed")
    return asked


def _is_said(language: Language) -> bool:
    """Tell whether the model is told anything of a language, beside what a task may."""
    affixes = (language.source_prefix, language.source_suffix, language.target_prefix)
    return any(affixes) or language.decoder_start_id is not None


def _code(language: Language | None) -> str:
    return "" if language is None else language.code


def listed(codes: Sequence[str], max_characters: int = MAX_LISTED_CHARACTERS) -> str:
    """Return codes side by side, and how many more there are than are shown."""
    shown: list[str] = []
    num_characters = 0
    for code in codes:
        num_characters += len(code) + 2
        if shown and num_characters > max_characters:
            return f"{', '.join(shown)} and {len(codes) - len(shown)} more"
        shown.append(code)
    return ", ".join(shown)


GUARDS = ("a", ".", "0", "\n")
"""Texts to encode a continuation after, of which one at least has no token in common with it."""


def encode_after(tokenizer: Tokenizer, before: Sequence[int], text: str) -> list[int]:
    """Return the ids of a text that follows others, as it would be encoded in the middle of a text.

    Args:
        tokenizer: Of both.
        before: Ids that it follows; where they have no text, it is encoded as one that stands alone.
        text: It.
    """
    if text and tokenizer.decode(before):
        for guard in GUARDS:
            first, whole = tokenizer.encode(guard), tokenizer.encode(guard + text)
            if whole[: len(first)] == first:
                return whole[len(first) :]
    return tokenizer.encode(text)


def detokenizer_after(tokenizer: Tokenizer, before: Sequence[int]) -> Detokenizer:
    """Return what gives the text of ids that follow others."""
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(before)
    return detokenizer


def decode_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids that follow others."""
    detokenizer = detokenizer_after(tokenizer, before)
    return detokenizer.push(ids) + detokenizer.finish()
