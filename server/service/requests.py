"""Protocol-independent requests, checks of fields that need no model, and model defaults for absent fields.

Protocol adapters convert and type-check messages. docs/api.md defines the fields; None means absent. `validation.py` and
`search_options.py` check ranges and combinations.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, structs

from dragoman.model.generation import Defaults
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.errors import InvalidRequest

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest

Number = TypeVar("Number", int, float)

# Of names of models, versions and languages, and of ids.
MAX_CHARACTERS = 128
MAX_PRIORITY = 10
MAX_SUPPRESSED_TOKENS = 256
NO_DEFAULTS = Defaults()
# Search fields with defaults. Excluded: `max_new_tokens` and special tokens are decided earlier, suppressed tokens are added to
# the request's, and a forced end is no request field.
_OTHER_DEFAULTS = ("max_new_tokens", "suppressed_tokens", "is_end_forced", "special_tokens_in_text")
DEFAULT_FIELDS = tuple(name for name in Defaults.__struct_fields__ if name not in _OTHER_DEFAULTS)


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
