"""What a request means that does not say: a model's defaults, field by field.

A default stands in for a field that is absent, and is dropped, never refused, where it does not go with what the request asks for.
Only a penalty of beam search is refused without beams (`search_options.py`).
"""

from typing import TYPE_CHECKING, Any

from msgspec import structs

from dragoman.model.generation import Defaults
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine.messages import GREEDY, Sampling, SearchOptions
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.requests import GenerateRequest, ScoreRequest

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest

NONE = Defaults()
# Fields of a search that a default stands in for. The others: `max_new_tokens` and how a text is read are decided before, what is
# suppressed is suppressed beside the request's, and a forced end is no field of a request.
_OTHERS = ("max_new_tokens", "suppressed_tokens", "is_end_forced", "special_tokens_in_text")
FIELDS = tuple(name for name in Defaults.__struct_fields__ if name not in _OTHERS)
DRAWING = ("temperature", "top_k", "top_p")


def default_max_new_tokens(manifest: "Manifest") -> int:
    """Return how many tokens are generated at the most where a request does not say."""
    own = manifest.defaults.max_new_tokens
    return manifest.default_max_new_tokens if own is None else own


def has_special_tokens(request: GenerateRequest | ScoreRequest, manifest: "Manifest", tokenizers: Tokenizers) -> bool:
    """Return whether special tokens that the source names are read as these tokens.

    Raises:
        InvalidRequest: If that is asked of a model that has none.
    """
    asked, is_able = request.special_tokens_in_text, bool(tokenizers.special_tokens)
    if asked and not is_able:
        raise InvalidRequest("special_tokens_in_text", f"model {manifest.name} has no special tokens that a text may name")
    return is_able and bool(manifest.defaults.special_tokens_in_text if asked is None else asked)


def with_defaults(request: GenerateRequest, defaults: Defaults, max_new_tokens: int) -> GenerateRequest:
    """Return a request in which the model's defaults stand in for what it does not say, where they go with the rest.

    Args:
        request: What the caller sent.
        defaults: The model's.
        max_new_tokens: Tokens to generate at the most.
    """
    if defaults == NONE:
        return request
    filled: dict[str, Any] = {
        name: value for name in FIELDS if getattr(request, name) is None and (value := getattr(defaults, name)) is not None
    }
    if request.do_sample or request.return_alternatives:
        filled.pop("num_beams", None)
    num_beams: int = filled.get("num_beams", 1) if request.num_beams is None else request.num_beams
    if num_beams > 1 or request.return_alternatives:
        filled.pop("do_sample", None)
    do_sample = request.do_sample or filled.get("do_sample", False)
    stray = [] if do_sample else [*DRAWING]
    if num_beams == 1:
        stray.append("early_stopping")
    if request.return_alternatives or (not do_sample and filled.get("num_return_sequences", 1) > num_beams):
        stray.append("num_return_sequences")
    for name in stray:
        filled.pop(name, None)
    if "min_new_tokens" in filled:
        filled["min_new_tokens"] = min(filled["min_new_tokens"], max_new_tokens - 1)
    if defaults.suppressed_tokens:
        filled["suppressed_tokens"] = (*request.suppressed_tokens, *defaults.suppressed_tokens)
    return structs.replace(request, **filled)


def is_end_forced(request: GenerateRequest, defaults: Defaults, eos_id: int, max_new_tokens: int) -> bool:
    """Tell whether the last token that may come has to be end-of-sequence.

    That does not go with a request that suppresses it, nor with alternatives of one token, which would all be the end.
    """
    if not defaults.is_end_forced or eos_id in request.suppressed_tokens:
        return False
    return not (request.return_alternatives and max_new_tokens == 1)


def default_search(defaults: Defaults, target_prefix: list[int]) -> SearchOptions:
    """Return the options of a request that has none, before anything is known of how many tokens it may have.

    Args:
        defaults: The model's.
        target_prefix: Ids that every answer is forced to begin with.
    """

    def given(name: str, otherwise: Any) -> Any:
        value = getattr(defaults, name)
        return otherwise if value is None else value

    num_beams = given("num_beams", 1)
    sampling = Sampling(0, given("temperature", 1.0), given("top_k", 0), given("top_p", 1.0)) if defaults.do_sample else None
    options = SearchOptions(
        num_beams=num_beams,
        num_answers=given("num_return_sequences", 1),
        length_penalty=given("length_penalty", 1.0),
        is_stopped_early=given("early_stopping", False) and num_beams > 1,
        sampling=sampling,
        min_new_tokens=given("min_new_tokens", 0),
        repetition_penalty=given("repetition_penalty", 1.0),
        no_repeat_ngram_size=given("no_repeat_ngram_size", 0),
        suppressed_tokens=sorted(set(defaults.suppressed_tokens)),
        forced_prefix=target_prefix,
        num_forced=len(target_prefix),
        is_end_forced=defaults.is_end_forced,
    )
    return GREEDY if options == GREEDY else options
