"""The search options of a request: the table behind keywords of calls, flags of the command line, and errors that name a flag.

An option is added as a field of `Search`, with its sentence; `make client` adds it to `SearchOptions`, and a test compares both
with the contract. The server checks all values, and names the field that it refuses.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple, TypedDict, Unpack, get_type_hints

from dragoman.model.errors import InputError


class Term(NamedTuple):
    """A term of the source, and what the answer should have for it.

    Attributes:
        source: Words as in the text.
        targets: Alternatives, one of which should occur; none to keep the term as it is.
        case_sensitive: Whether upper and lower case must be as given.
    """

    source: str
    targets: Sequence[str] = ()
    case_sensitive: bool = False

    @classmethod
    def parse(cls, text: str) -> "Term":
        """Return the term of `source=target|target`; without `=`, to be kept as it is."""
        source, separator, targets = text.partition("=")
        return cls(source, tuple(targets.split("|")) if separator else ())


@dataclass(frozen=True, slots=True)
class Search:
    """Options of a request; without any it is searched for as the model's defaults say, which may be greedy search.

    None leaves a value to the model, whose defaults `ModelInfo.defaults` has. Where the model has none, those named here hold.

    Attributes:
        num_beams: Width of beam search; 1 is greedy or, with `do_sample`, sampling. Default 1.
        num_return_sequences: Number of answers: of the beams, of the samples, or alternatives. Default 1.
        length_penalty: Exponent of the length in a score. Default 1.
        early_stopping: End beam search as soon as `num_beams` hypotheses are finished. Default no.
        do_sample: Draw tokens at random instead of taking the likeliest. Default no.
        temperature: With `do_sample`: divisor of log-probabilities; with 0 nothing is drawn. Default 1.
        top_k: With `do_sample`: draw from the k likeliest tokens; 0 for all. Default 0.
        top_p: With `do_sample`: draw from the likeliest tokens that together have this probability. Default 1.
        seed: With `do_sample`: the same request with the same seed has the same answers. Default: the server picks one.
        min_new_tokens: Tokens before end-of-sequence may be generated. Default 0.
        repetition_penalty: Factor of the log-probabilities of tokens that the answer has already. Default 1.
        no_repeat_ngram_size: No sequence of this many tokens occurs twice in an answer; 0 for no such rule. Default 0.
        suppressed_tokens: Tokens that are never generated, beside those of the model's defaults.
        forced_prefix: Text that the answer starts with.
        return_alternatives: Answer with the `num_return_sequences` likeliest tokens after the prefix, each continued greedily.
        return_log_probs: Return log-probabilities of the generated tokens.
        top_log_probs: Return this many of the likeliest tokens at each position too.
        special_tokens_in_text: Read the names of special tokens in the text, such as `<hl>`, as these tokens. Default no.
        split: Divide the text into `sentences` or `lines`, each answered alone, or `none`. Default none.
        no_cache: Compute the answer even if the server has it, and do not keep it.
        markup: Kind of document, `html` or `xml`, whose tags stay around their words, or `none`. Default none.
        keep_placeholders: Keep placeholders, addresses and hashtags as they are. Default no.
        translate_attributes: With `markup`: translate `alt`, `title`, `placeholder` and `aria-label`, too. Default no.
        terms: Translations that the answer should have; from the command line as `source=target|target`, or `source` to keep it.
        glossary: Name of a glossary of the model, whose terms are added. Default: the model's.
    """

    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppressed_tokens: Sequence[int] = ()
    forced_prefix: str = ""
    return_alternatives: bool = False
    return_log_probs: bool = False
    top_log_probs: int = 0
    special_tokens_in_text: bool | None = None
    split: str = ""
    no_cache: bool = False
    markup: str = ""
    keep_placeholders: bool = False
    translate_attributes: bool = False
    terms: Sequence[Term] = ()
    glossary: str = ""


class SearchOptions(TypedDict, total=False):
    """The fields of `Search` as keywords of a call; the others are those of the call's `search`."""

    num_beams: int | None
    num_return_sequences: int | None
    length_penalty: float | None
    early_stopping: bool | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_new_tokens: int | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    suppressed_tokens: Sequence[int]
    forced_prefix: str
    return_alternatives: bool
    return_log_probs: bool
    top_log_probs: int
    special_tokens_in_text: bool | None
    split: str
    no_cache: bool
    markup: str
    keep_placeholders: bool
    translate_attributes: bool
    terms: Sequence[Term]
    glossary: str


AS_THE_MODEL_DOES: Final = Search()
SEARCH_FIELDS: Final = tuple(field.name for field in fields(Search))


def with_options(search: Search, **options: Unpack[SearchOptions]) -> Search:
    """Return the search with these of its fields replaced; raises `TypeError` for an unknown one, or for no `Search`."""
    if not isinstance(search, Search):
        raise TypeError(f"search: a Search is wanted, not {search!r}")
    for name in options.keys() - set(SEARCH_FIELDS):
        meant = difflib.get_close_matches(name, SEARCH_FIELDS, n=1)
        raise TypeError(f"unexpected keyword argument {name!r}" + "".join(f"; is {other!r} meant?" for other in meant))
    return replace(search, **options) if options else search


# Flags that are called otherwise than their fields.
_RENAMED: Final = {
    "do_sample": "--sample",
    "return_alternatives": "--alternatives",
    "return_log_probs": "--log-probs",
    "return_word_alignment": "--alignment",
    "source_language": "--from",
    "target_language": "--to",
    "terms": "--term",
    "timeout_seconds": "--timeout",
}
# Fields beside those of `Search` that messages name.
_OTHERS: Final = ("model", "model_version", "max_new_tokens", "truncate", "alignment_layer", "concurrency", "token")
FLAG_FIELDS: Final = tuple(name for name in SEARCH_FIELDS if name != "suppressed_tokens")
"""Fields of `Search` that have a flag."""
DENIABLE: Final = tuple(name for name, kind in get_type_hints(Search).items() if kind == bool | None)
"""Fields that a model may have as its default, and a flag denies."""
_FLAGS: Final = {name: f"--{name.replace('_', '-')}" for name in (*FLAG_FIELDS, *_OTHERS)} | _RENAMED


def _one_of(names: Iterable[str]) -> str:
    return "|".join(sorted(names, key=len, reverse=True))


# A field that the message begins with, and the names within it that are no words of the language; not what it quotes.
_FIRST = re.compile(rf"^(?P<name>{_one_of(_FLAGS)})(?=: )")
_WITHIN = re.compile(rf"(?<![\w'\"./-])(?P<name>{_one_of(name for name in _FLAGS if '_' in name)})(?![\w'\"/-])")


def flag(field: str) -> str:
    """Return the flag of a field; raises `KeyError` if it has none."""
    return _FLAGS[field]


def denial(field: str) -> str:
    """Return the flag that denies a field of `DENIABLE`."""
    return flag(field).replace("--", "--no-", 1)


def flag_help(field: str) -> str:
    """Return the sentence about a field of `Search`, naming flags; empty if Python runs without docstrings."""
    found = re.search(rf"^ +{field}: (.+)$", Search.__doc__ or "", re.MULTILINE)
    return in_flags(found[1].replace("`", "")) if found else ""


def in_flags(message: str) -> str:
    """Return a message about fields as one about flags."""
    return _WITHIN.sub(_flag_of, _FIRST.sub(_flag_of, message))


def refusal(label: str, message: str) -> InputError:
    """Return the error for a server's refusal of an option, which all texts share, or of the text with this label."""
    told = in_flags(message)
    return InputError(told if told.startswith("--") else f"{label}: {told}")


def _flag_of(found: re.Match[str]) -> str:
    return _FLAGS[found["name"]]
