"""Protocol-independent requests, model defaults for absent fields, checks of fields, and conversion to the engine's search options.

Protocol adapters convert and type-check messages. docs/api.md defines the fields; None means absent. An option that conflicts with
others is refused like one out of range; nothing is silently ignored. `validation.py` checks what needs the text's tokens.
"""

import secrets
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, structs

from dragoman.model.generation import Defaults
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine import messages
from dragoman.server.errors import InvalidRequest

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest

Number = TypeVar("Number", int, float)

# Of names of models, versions and languages, and of ids.
MAX_CHARACTERS = 128
MAX_PRIORITY = -messages.LOWEST_PRIORITY
# Ways to divide a text into segments; the first is none.
SPLITS = ("none", "sentences", "lines")
# Kinds of documents; the first is plain text.
MARKUPS = ("none", "html", "xml")
MAX_SUPPRESSED_TOKENS = 256
NO_DEFAULTS = Defaults()
# Search fields with defaults. Excluded: `max_new_tokens` and special tokens are decided earlier, suppressed tokens are added to
# the request's, and a forced end is no request field.
_OTHER_DEFAULTS = ("max_new_tokens", "suppressed_tokens", "is_end_forced", "special_tokens_in_text")
DEFAULT_FIELDS = tuple(name for name in Defaults.__struct_fields__ if name not in _OTHER_DEFAULTS)
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_LENGTH_PENALTY = 10
MAX_TOP_LOG_PROBS = 20
SEED_BITS = 64
SAMPLING_FIELDS = ("seed", "temperature", "top_p", "top_k")
NO_EFFECT = {"top_p": 1.0, "top_k": 0}


class Term(Struct, frozen=True, forbid_unknown_fields=True):
    """A term of the source and the alternatives for it in the answer; none to keep the term as it is."""

    source: str
    targets: tuple[str, ...] = ()
    case_sensitive: bool = False


class TagRules(Struct, frozen=True):
    """Rules for elements of a document by their names, beside those of its kind; adapters set them, no message has them."""

    untouched: frozenset[str] = frozenset()
    splitting: frozenset[str] = frozenset()  # they divide texts
    non_splitting: frozenset[str] = frozenset()  # they do not, unless they are splitting
    has_outline: bool = True  # whether other elements of XML divide texts by where they are

    def divides(self, name: str, is_block: bool) -> bool:
        """Return whether an element divides texts; `is_block` if it does by itself."""
        return name in self.splitting or (is_block and name not in self.non_splitting)


NO_RULES = TagRules()


class GenerateRequest(Struct, frozen=True):
    """A source text and generation options."""

    model: str = ""
    text: str = ""
    max_new_tokens: int | None = None
    truncate: bool = False
    request_id: str = ""
    priority: int = 0
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
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""
    special_tokens_in_text: bool | None = None
    split: str = ""
    no_cache: bool = False
    markup: str = ""
    keep_placeholders: bool = False
    translate_attributes: bool = False
    terms: tuple[Term, ...] = ()
    glossary: str = ""
    indexes: tuple[Any, ...] = ()  # `TermIndex`es of glossaries that the adapter has read
    tag_rules: TagRules = NO_RULES

    @property
    def has_log_probs(self) -> bool:
        """Whether the answer includes log-probabilities."""
        return self.return_log_probs or self.top_log_probs > 0


class ScoreRequest(Struct, frozen=True):
    """A source text and a given target."""

    model: str = ""
    text: str = ""
    target: str = ""
    request_id: str = ""
    priority: int = 0
    length_penalty: float | None = None
    return_alignment: bool = False
    return_word_alignment: bool = False
    alignment_layer: int | None = None
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""
    special_tokens_in_text: bool | None = None


def check_length(field: str, text: str) -> str:
    """Return a name or id unchanged; raise `InvalidRequest` if it is too long."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(field, f"{len(text)} characters; at most {MAX_CHARACTERS} are allowed")
    return text


def check_range(field: str, value: Number, least: Number, most: Number, limit: str = "") -> Number:
    """Return a number unchanged; raise `InvalidRequest` if it is not in `least` to `most`, which `limit` explains."""
    if not least <= value <= most:  # NaN is refused too
        found = f"{value:g}" if isinstance(value, float) else value
        raise InvalidRequest(field, f"{found} is not in {least} to {most}{limit and ', '}{limit}")
    return value


def check_num_suppressed(count: int) -> None:
    """Raise `InvalidRequest` if too many tokens are suppressed; adapters call this before converting them."""
    if count > MAX_SUPPRESSED_TOKENS:
        raise InvalidRequest("suppressed_tokens", f"{count} tokens; at most {MAX_SUPPRESSED_TOKENS} are allowed")


def default_max_new_tokens(manifest: "Manifest") -> int:
    """Return the model's default for `max_new_tokens`."""
    own = manifest.defaults.max_new_tokens
    return manifest.default_max_new_tokens if own is None else own


def has_special_tokens(request: GenerateRequest | ScoreRequest, manifest: "Manifest", tokenizers: Tokenizers) -> bool:
    """Return whether to parse special tokens in the source; raise `InvalidRequest` if requested and the model has none."""
    asked, is_able = request.special_tokens_in_text, bool(tokenizers.special_tokens)
    if asked and not is_able:
        raise InvalidRequest("special_tokens_in_text", f"model {manifest.name} has no special tokens that a text may name")
    return is_able and bool(manifest.defaults.special_tokens_in_text if asked is None else asked)


def with_defaults(request: GenerateRequest, defaults: Defaults, max_new_tokens: int) -> GenerateRequest:
    """Return the request with the model's defaults in absent fields; incompatible defaults are dropped, never refused."""
    if defaults == NO_DEFAULTS:
        return request
    filled: dict[str, Any] = {
        name: value for name in DEFAULT_FIELDS if getattr(request, name) is None and (value := getattr(defaults, name)) is not None
    }
    if request.do_sample or request.return_alternatives:
        filled.pop("num_beams", None)
    num_beams: int = filled.get("num_beams", 1) if request.num_beams is None else request.num_beams
    if num_beams > 1 or request.return_alternatives:
        filled.pop("do_sample", None)
    do_sample = request.do_sample or filled.get("do_sample", False)
    dropped = [] if do_sample else ["temperature", "top_k", "top_p"]
    if num_beams == 1:
        dropped.append("early_stopping")
    if request.return_alternatives or (not do_sample and filled.get("num_return_sequences", 1) > num_beams):
        dropped.append("num_return_sequences")
    for name in dropped:
        filled.pop(name, None)
    if "min_new_tokens" in filled:
        filled["min_new_tokens"] = min(filled["min_new_tokens"], max_new_tokens - 1)
    if defaults.suppressed_tokens:
        filled["suppressed_tokens"] = (*request.suppressed_tokens, *defaults.suppressed_tokens)
    return structs.replace(request, **filled)


def is_end_forced(request: GenerateRequest, defaults: Defaults, eos_id: int, max_new_tokens: int) -> bool:
    """Return whether the last possible token must be end-of-sequence; not if suppressed, nor for alternatives of one token."""
    if not defaults.is_end_forced or eos_id in request.suppressed_tokens:
        return False
    return not (request.return_alternatives and max_new_tokens == 1)


# Fields of a request that are no options of its search.
_OTHER_FIELDS = (
    *("model", "model_version", "text", "source_language", "target_language", "special_tokens_in_text"),
    *("request_id", "priority", "max_new_tokens", "truncate", "split", "no_cache"),
    *("markup", "keep_placeholders", "translate_attributes", "terms", "glossary", "indexes", "tag_rules"),
)
_options_of = attrgetter(*(name for name in GenerateRequest.__struct_fields__ if name not in _OTHER_FIELDS))
_NO_OPTIONS, _ONE_BEAM = _options_of(GenerateRequest()), _options_of(GenerateRequest(num_beams=1))


def search_options(
    request: GenerateRequest,
    manifest: "Manifest",
    max_slots: int,
    max_new_tokens: int,
    prefix_ids: Sequence[int],
    default: messages.SearchOptions,
) -> messages.SearchOptions:
    """Return a request's search options; if it has none, `default` of `default_options` (`messages.GREEDY` for most models).

    `max_slots` limits one request, `prefix_ids` are the tokens of `forced_prefix`. Raises `InvalidRequest`, naming field and limit.
    """
    if request.temperature == 0:  # greedy, as in vLLM
        request = structs.replace(request, do_sample=False, **dict.fromkeys(SAMPLING_FIELDS))
    asked = _options_of(request)
    if asked == _NO_OPTIONS or (asked == _ONE_BEAM and manifest.defaults == NO_DEFAULTS):
        return _limited(default, max_new_tokens)
    return _options(request, manifest, max_slots, max_new_tokens, [*default.forced_prefix, *prefix_ids], default.num_forced)


def default_options(manifest: "Manifest", target_prefix: list[int]) -> messages.SearchOptions:
    """Return the options of a request without any, for the longest answer; the seed of a `Sampling` is drawn for each request."""
    return _options(GenerateRequest(), manifest, sys.maxsize, manifest.max_target_tokens, target_prefix, len(target_prefix))


def _options(
    request: GenerateRequest,
    manifest: "Manifest",
    max_slots: int,
    max_new_tokens: int,
    forced_prefix: list[int],
    num_forced: int,  # by the template
) -> messages.SearchOptions:
    defaults = manifest.defaults
    is_forced = is_end_forced(request, defaults, manifest.eos_id, max_new_tokens)
    has_penalty = request.repetition_penalty is not None
    request = with_defaults(request, defaults, max_new_tokens)
    num_beams = 1 if request.num_beams is None else request.num_beams
    check_range("num_beams", num_beams, 1, max_slots, f"max_slots_per_request of model {manifest.name}")
    _check_combination(request, num_beams)
    # The repetition penalty differs with and without beams, in Transformers too.
    penalty = defaults.repetition_penalty or 1
    is_of_beams = penalty != 1 and (defaults.num_beams or 1) > 1
    if is_of_beams and not has_penalty and num_beams == 1 and not request.return_alternatives:
        raise InvalidRequest("repetition_penalty", f"has to be said without beams: the model's, {penalty:g}, is one of beam search")
    options = messages.SearchOptions(
        num_beams=num_beams,
        num_answers=_check_num_answers(request, manifest, max_slots, num_beams),
        length_penalty=check_length_penalty(request),
        is_stopped_early=bool(request.early_stopping),
        sampling=_sampling(request, manifest) if request.do_sample else None,
        has_alternatives=request.return_alternatives,
        min_new_tokens=_check_min_new_tokens(request, max_new_tokens),
        repetition_penalty=_positive("repetition_penalty", request.repetition_penalty, MAX_REPETITION_PENALTY),
        no_repeat_ngram_size=check_range(
            "no_repeat_ngram_size",
            request.no_repeat_ngram_size or 0,
            *(0, manifest.max_target_tokens, f"max_target_tokens of model {manifest.name}"),
        ),
        suppressed_tokens=_check_suppressed_tokens(request, manifest),
        forced_prefix=forced_prefix,
        num_top_log_probs=check_range("top_log_probs", request.top_log_probs, 0, MAX_TOP_LOG_PROBS),
        num_forced=num_forced,
        is_end_forced=is_forced,
    )
    return messages.GREEDY if options == messages.GREEDY else options


def check_length_penalty(request: GenerateRequest | ScoreRequest, default: float | None = None) -> float:
    """Return the request's length penalty, else the default, else 1; raise `InvalidRequest` if out of range."""
    if request.length_penalty is None:
        return 1.0 if default is None else default
    return check_range("length_penalty", request.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


def _limited(search: messages.SearchOptions, max_new_tokens: int) -> messages.SearchOptions:
    """Return the default options for an answer of at most `max_new_tokens`, with a seed."""
    if search.sampling is not None:
        search = structs.replace(search, sampling=structs.replace(search.sampling, seed=secrets.randbits(SEED_BITS)))
    if search.min_new_tokens >= max_new_tokens:
        search = structs.replace(search, min_new_tokens=max_new_tokens - 1)
    return search


def _check_combination(request: GenerateRequest, num_beams: int) -> None:
    """Check that the options are of one kind of search."""
    if num_beams > 1 and request.do_sample:
        raise InvalidRequest("do_sample", f"does not go with num_beams above 1, which is {num_beams}")
    if num_beams > 1 and request.return_alternatives:
        raise InvalidRequest("return_alternatives", f"does not go with num_beams above 1, which is {num_beams}")
    if request.do_sample and request.return_alternatives:
        raise InvalidRequest("return_alternatives", "does not go with do_sample")
    if request.early_stopping and num_beams == 1:
        raise InvalidRequest("early_stopping", "goes with num_beams above 1 only")
    if not request.do_sample:
        for name in SAMPLING_FIELDS:
            if getattr(request, name) not in (None, NO_EFFECT.get(name)):
                raise InvalidRequest(name, "goes with do_sample only")


def _check_num_answers(request: GenerateRequest, manifest: "Manifest", max_slots: int, num_beams: int) -> int:
    if request.num_return_sequences is None:
        return 1
    count = request.num_return_sequences
    if num_beams > 1:
        limit, name = num_beams, "num_beams"
    elif request.do_sample or request.return_alternatives:
        limit, name = max_slots, f"max_slots_per_request of model {manifest.name}"
    else:
        limit, name = 1, "unless num_beams is at least as many, or do_sample or return_alternatives is set"
    check_range("num_return_sequences", count, 1, limit, name)
    choices = min(manifest.target_vocab_size - len(set(request.suppressed_tokens)), manifest.num_choices)
    if request.return_alternatives and count > choices:
        raise InvalidRequest(
            "num_return_sequences", f"{count} alternatives, but model {manifest.name} has {choices} tokens to choose"
        )
    return count


def _sampling(request: GenerateRequest, manifest: "Manifest") -> messages.Sampling:
    """Return the sampling options, with a random seed if the request has none."""
    temperature, top_p = _positive("temperature", request.temperature, MAX_TEMPERATURE), _positive("top_p", request.top_p, 1.0)
    limit = f"target_vocab_size of model {manifest.name}"
    top_k = check_range("top_k", request.top_k or 0, 0, manifest.target_vocab_size, limit)
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
    return messages.Sampling(check_range("seed", seed, 0, 2**SEED_BITS - 1), temperature, top_k, top_p)


def _positive(field: str, value: float | None, most: float) -> float:
    """Return a number above 0, by default 1."""
    if value is not None and not 0 < value <= most:
        raise InvalidRequest(field, f"{value:g} is not above 0 and at most {most:g}")
    return 1.0 if value is None else value


def _check_min_new_tokens(request: GenerateRequest, max_new_tokens: int) -> int:
    count = request.min_new_tokens or 0
    if count < 0:
        raise InvalidRequest("min_new_tokens", f"{count} is negative")
    if count >= max_new_tokens:
        raise InvalidRequest("min_new_tokens", f"{count} is not less than max_new_tokens, which is {max_new_tokens}")
    return count


def _check_suppressed_tokens(request: GenerateRequest, manifest: "Manifest") -> list[int]:
    """Return the tokens sorted and unique; at least one other must be left, even before end-of-sequence is allowed."""
    if not request.suppressed_tokens:
        return []
    tokens = sorted(set(request.suppressed_tokens))
    vocabulary = manifest.target_vocab_size
    for token in (tokens[0], tokens[-1]):
        if not 0 <= token < vocabulary:
            where = f"0 to {vocabulary - 1}, the target vocabulary of model {manifest.name}"
            raise InvalidRequest("suppressed_tokens", f"{token} is not in {where}")
    num_left = vocabulary - len(tokens)
    if request.min_new_tokens and manifest.eos_id not in tokens:
        num_left -= 1
    if num_left < 1:
        raise InvalidRequest("suppressed_tokens", f"they leave no token of the {vocabulary} that model {manifest.name} has")
    return tokens
