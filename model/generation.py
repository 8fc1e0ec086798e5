"""Generation settings of a checkpoint, beside its weights: template around a text, languages, defaults. No torch.

Checkpoints and bundles hold these as JSON. The bounds are far beyond any model there is: with them a damaged or hostile file is
refused early. That ids are in the model's vocabulary is checked where the vocabulary is known.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Struct

MAX_LANGUAGES = 1024
MAX_LANGUAGE_NAMES = 64
MAX_NAME_CHARACTERS = 64
MAX_AFFIX_TOKENS = 64
MAX_TASK_CHARACTERS = 1024
MAX_DEFAULT_SUPPRESSED_TOKENS = 256
_MAX_ID = 1 << 24
_MAX_TOKENS = 1 << 20
_MAX_BEAMS = 1 << 16

TokenId = Annotated[int, Meta(ge=0, lt=_MAX_ID)]
Affix = Annotated[list[TokenId], Meta(max_length=MAX_AFFIX_TOKENS)]
# One line, that changes neither a terminal nor the direction of writing, and that can be written as UTF-8.
_LINE = r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]*\Z"
Label = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS, pattern=_LINE)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS, pattern=_LINE)]
Task = Annotated[str, Meta(max_length=MAX_TASK_CHARACTERS, pattern=r"\A[^\x00\ud800-\udfff]*\Z")]

_SEPARATORS = re.compile(r"[-_\s]+")
_PLACEHOLDER = re.compile(r"\{(source|target)\}")


class Affixes(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Tokens said to a model around a text.

    A source on the wire is: the target language's prefix, the source language's, the template's, the text, end-of-sequence, the
    template's suffix, the source language's. An answer begins with the template's target prefix, then the target language's.
    """

    source_prefix: Affix = []  # ids before a source's text
    source_suffix: Affix = []  # ids after its end-of-sequence
    target_prefix: Affix = []  # ids that every answer is forced to begin with
    decoder_start_id: TokenId | None = None  # first decoder token; None for the model's


class Language(Affixes, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A language a model reads or writes."""

    code: Name  # the model's name of it, for example `deu_Latn`
    # Every other spelling that means it, as `spelling` gives them, for example `de` and `german`.
    names: Annotated[list[Name], Meta(max_length=MAX_LANGUAGE_NAMES)] = []
    label: Label = ""  # name in a task, for example `German`; the code where empty

    def __post_init__(self) -> None:
        """Refuse names that no question would find.

        Raises:
            ValueError: Naming the first.
        """
        if not spelling(self.code):
            raise ValueError(f"language {self.code!r} has a code without letters")
        for name in self.names:
            if name != spelling(name):
                raise ValueError(f"language {self.code!r} has the name {name!r}, which must be written {spelling(name)!r}")


class Template(Affixes, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Tokens and text added around every source and answer."""

    task: Task = ""  # text before a source's own, for example `translate {source} to {target}: `, with the languages' labels

    def task_text(self, source: Language | None, target: Language | None) -> str:
        """Return the task for a pair of languages.

        Raises:
            ValueError: Naming the side whose language the task has a place for, and that is None.
        """
        sides = {"source": source, "target": target}

        def label(match: re.Match[str]) -> str:
            language = sides[match[1]]
            if language is None:
                raise ValueError(f"the task needs a {match[1]} language")
            return language.label or language.code

        return _PLACEHOLDER.sub(label, self.task)


class Languages(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The languages of a model."""

    # Those it reads; none where it is not told what it reads, and does not say.
    source: Annotated[list[Language], Meta(max_length=MAX_LANGUAGES)] = []
    target: Annotated[list[Language], Meta(max_length=MAX_LANGUAGES)] = []  # those it writes
    default_source: Label = ""  # code of the one that is read where a request does not say
    default_target: Label = ""  # code of the one that is written where a request does not say

    def __post_init__(self) -> None:
        """Refuse a spelling that means two languages, and a default that is none of them.

        Raises:
            ValueError: Naming it.
        """
        for side in ("source", "target"):
            languages: list[Language] = getattr(self, side)
            spellings(languages)
            default = getattr(self, f"default_{side}")
            if default and not any(language.code == default for language in languages):
                raise ValueError(f"default_{side} is {default!r}, which is no {side} language")


class Defaults(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Defaults of requests, which override them field by field; None is the default in docs/api.md."""

    # See docs/api.md, as for all that have the names of a request's fields.
    num_beams: Annotated[int, Meta(ge=1, le=_MAX_BEAMS)] | None = None
    # Taken where the request's own search gives as many.
    num_return_sequences: Annotated[int, Meta(ge=1, le=_MAX_BEAMS)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None  # of scores
    early_stopping: bool | None = None  # of beam search
    do_sample: bool | None = None  # draw tokens
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None  # of draws
    top_k: Annotated[int, Meta(ge=0, lt=_MAX_ID)] | None = None  # of draws
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None  # of draws
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None  # on log-probabilities
    # Not counting what the template and the language force.
    min_new_tokens: Annotated[int, Meta(ge=0, le=_MAX_TOKENS)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | None = None  # not counting it either
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=_MAX_TOKENS)] | None = None  # of the whole answer
    suppressed_tokens: Annotated[list[TokenId], Meta(max_length=MAX_DEFAULT_SUPPRESSED_TOKENS)] = []  # never generated
    is_end_forced: bool = False  # the last token that `max_new_tokens` allows is end-of-sequence, and worth 0
    special_tokens_in_text: bool | None = None  # special tokens that a source names are these tokens

    def __post_init__(self) -> None:
        """Refuse defaults that contradict each other, so that a request that says nothing can always be served.

        Raises:
            ValueError: Naming them.
        """
        beams, answers = self.num_beams or 1, self.num_return_sequences or 1
        if self.do_sample and beams > 1:
            raise ValueError(f"do_sample does not go with num_beams above 1, which is {beams}")
        if answers > beams and not self.do_sample:
            raise ValueError(f"num_return_sequences {answers} is more than num_beams, which is {beams}")
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) >= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} is not less than max_new_tokens, which is {self.max_new_tokens}"
            )


def around(template: Template, source: Language | None, target: Language | None, eos_id: int) -> Affixes:
    """Return what is said to a model around a text, in the order of `Affixes`; end-of-sequence is the suffix's first token.

    Args:
        template: The model's.
        source: The text's language; None where the model is told none, as of the answer's.
        target: The answer's.
        eos_id: Token that ends the text.
    """
    source_prefix, source_suffix = list(template.source_prefix), [eos_id, *template.source_suffix]
    target_prefix, start = list(template.target_prefix), template.decoder_start_id
    if source is not None:
        source_prefix = [*source.source_prefix, *source_prefix]
        source_suffix += source.source_suffix
    if target is not None:
        source_prefix = [*target.source_prefix, *source_prefix]
        target_prefix += target.target_prefix
        start = start if target.decoder_start_id is None else target.decoder_start_id
    return Affixes(source_prefix=source_prefix, source_suffix=source_suffix, target_prefix=target_prefix, decoder_start_id=start)


def num_forced(template: Template, languages: Languages | None) -> int:
    """Return how many tokens an answer may be forced to begin with."""
    written = [] if languages is None else languages.target
    return len(template.target_prefix) + max((len(language.target_prefix) for language in written), default=0)


def spelling(name: str) -> str:
    """Return how a name of a language is compared: in lower case, with single "_" between its parts."""
    return cased_spelling(name.casefold())


def cased_spelling(code: str) -> str:
    """Return how codes of languages are compared of which a model has several that differ in case only."""
    return _SEPARATORS.sub("_", code).strip("_")


def spellings(languages: Iterable[Language]) -> tuple[dict[str, Language], dict[str, Language | None]]:
    """Return the language of each code, as `cased_spelling` gives it, and of each spelling: None for one that several codes share.

    Raises:
        ValueError: Naming a spelling that means two.
    """
    codes: dict[str, Language] = {}
    for language in languages:
        other = codes.setdefault(cased_spelling(language.code), language)
        if other is not language:
            raise ValueError(f"{cased_spelling(other.code)!r} means two languages: {other.code!r} and {language.code!r}")
    counts = Counter(map(spelling, codes))
    table: dict[str, Language | None] = {name: None for name, count in counts.items() if count > 1}
    for language in codes.values():
        for name in dict.fromkeys((spelling(language.code), *language.names)):
            known = table.setdefault(name, language)
            if known is not None and known is not language:
                raise ValueError(f"{name!r} means two languages: {known.code!r} and {language.code!r}")
    return codes, table


_REGION = re.compile(r"[a-z]{2}|[0-9]{3}")
_MAX_ASKED_CHARACTERS = 128


class LanguageTable:
    """One side's languages of one model, to be asked by any of their spellings; made once a model."""

    def __init__(self, languages: Sequence[Language], default: str = "") -> None:
        """Take `Languages.source` and `default_source`, or those of the target.

        Raises:
            ValueError: If a spelling means two languages, or the default none.
        """
        self._codes, self._spellings = spellings(languages)
        by_code = {language.code: language for language in languages}
        if default and default not in by_code:
            raise ValueError(f"{default!r} is none of the languages")
        only = languages[0] if len(languages) == 1 else None
        #: The language of a request that does not say; None where it has to.
        self.default: Language | None = by_code[default] if default else only

    def find(self, asked: str) -> Language | None:
        """Return the language that is asked for, None where the model has none.

        Case and separators do not matter, but case does where codes differ in nothing else. A region, two letters or three digits,
        is left out where the model does not tell it apart (`de-AT` is `de`), a script never is.
        """
        if len(asked) > _MAX_ASKED_CHARACTERS:
            return None
        if (language := self._codes.get(cased_spelling(asked))) is not None:
            return language
        wanted = spelling(asked)
        if wanted in self._spellings:
            return self._spellings[wanted]
        first, *rest = wanted.split("_")
        without_region = [part for part in rest if _REGION.fullmatch(part) is None]
        return self._spellings.get("_".join([first, *without_region])) if len(without_region) < len(rest) else None
