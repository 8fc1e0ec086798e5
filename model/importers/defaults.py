"""Transformers' settings of generation as a bundle's defaults: each field converted exactly, or named with the reason why not.

docs/api.md has both definitions. Transformers counts the decoder's start token and forced tokens among an answer's; requests here
count neither, so lengths change by as many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dragoman.model.generation import MAX_DEFAULT_SUPPRESSED_TOKENS, Defaults
from dragoman.model.importers import search_settings, token_settings
from dragoman.model.importers.conversion import Conversion, Target
from dragoman.model.importers.generation_fields import shown
from dragoman.model.importers.generation_tables import BEYOND, ELSEWHERE, IDLE, SAMPLING_ONLY

TRANSFORMERS_TOP_K: Final = 50  # what draws are made from there, where nothing is said
# Fields of ours under the same name, with the same meaning.
_NUMBERS: Final = frozenset({"num_beams", "num_return_sequences", "length_penalty", "do_sample", "temperature", "top_p"})
_CONVERTERS: Final[Mapping[str, Callable[[Conversion, Any], str]]] = {
    "early_stopping": search_settings.early_stopping,
    "top_k": search_settings.top_k,
    "repetition_penalty": search_settings.repetition_penalty,
    "no_repeat_ngram_size": search_settings.no_repeat_ngram_size,
    "max_length": search_settings.max_length,
    "max_new_tokens": search_settings.max_new_tokens,
    "min_length": search_settings.min_length,
    "min_new_tokens": search_settings.min_new_tokens,
    "suppress_tokens": token_settings.suppress_tokens,
    "begin_suppress_tokens": token_settings.begin_suppress_tokens,
    "bad_words_ids": token_settings.bad_words_ids,
    "renormalize_logits": token_settings.renormalize_logits,
    "forced_bos_token_id": token_settings.forced_bos_token_id,
    "forced_eos_token_id": token_settings.forced_eos_token_id,
    "eos_token_id": token_settings.eos_token_id,
    "pad_token_id": token_settings.pad_token_id,
    "bos_token_id": token_settings.bos_token_id,
    "decoder_start_token_id": token_settings.decoder_start_token_id,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What became of the settings.

    Attributes:
        defaults: The bundle's.
        padding: How the network predicts padding; see `ModelConfig.padding`.
        notes: `field: what became of it`, for every field; those that say nothing of answers in one line.
    """

    defaults: Defaults
    padding: str
    notes: list[str]


def convert(fields: Mapping[str, Any], target: Target, path: object = "generation_config.json") -> Converted:
    """Convert the settings of `generate`, field by field.

    Args:
        fields: By name, as `generation_fields` gives them.
        target: The model they are for.
        path: Where they are from, for messages.

    Raises:
        ForeignError: If answers would end with another token than the model's end-of-sequence.
    """
    conversion = Conversion(fields, target, path)
    notes = [f"{name}: {_became(conversion, name, value)}" for name, value in fields.items() if name not in ELSEWHERE]
    if elsewhere := [name for name in fields if name in ELSEWHERE]:
        notes.append(f"{', '.join(elsewhere)}: no effect on answers")
    notes += _what_is_not_said(conversion)
    notes += _without_contradictions(conversion)
    defaults = msgspec.convert({**conversion.made, "suppressed_tokens": sorted(conversion.suppressed)}, Defaults)
    return Converted(defaults=defaults, padding=_padding(conversion), notes=notes)


def _became(conversion: Conversion, name: str, value: Any) -> str:
    """Convert one field, and return what became of it."""
    if value is None:
        return "null, as if it were not there"
    if name in _CONVERTERS:
        return _CONVERTERS[name](conversion, value)
    if name in _NUMBERS:
        return conversion.make(name, value)
    if name not in BEYOND:
        return f"{shown(value)} is not known here; left out"
    if name in IDLE and value == IDLE[name]:
        return f"{shown(value)}, no effect"
    if name in SAMPLING_ONLY and conversion.fields.get("do_sample") is not True:
        return f"{shown(value)} ({BEYOND[name]}) has no effect without do_sample"
    return f"{shown(value)}: {BEYOND[name]}: not offered here; left out"


def _what_is_not_said(conversion: Conversion) -> list[str]:
    """Say what Transformers takes where a field is missing, where that is not what a request means here."""
    fields, notes = conversion.fields, []
    if fields.get("do_sample") is True and fields.get("top_k") is None:
        taken = conversion.make("top_k", min(TRANSFORMERS_TOP_K, conversion.target.vocab_size))
        notes.append(f"top_k: not said; {taken}, as there")
    if fields.get("max_length") is None and fields.get("max_new_tokens") is None:
        notes.append("max_length: not said; Transformers stops after 20 tokens, here a bundle's own default is the limit")
    return notes


def _without_contradictions(conversion: Conversion) -> list[str]:
    """Leave out what contradicts itself, and name it."""
    made, notes = conversion.made, []
    beams, answers = made.get("num_beams", 1), made.get("num_return_sequences", 1)
    if beams > 1 and made.pop("do_sample", False):
        notes.append("do_sample: drawing within beam search is not offered here; it is beam search without")
    if answers > beams and not made.get("do_sample"):
        del made["num_return_sequences"]
        notes.append(f"num_return_sequences: {answers} are more than num_beams, {beams}; left out")
    room = conversion.target.max_target_tokens - conversion.target.num_forced
    most, least = made.get("max_new_tokens", room), made.get("min_new_tokens", 0)
    if least >= most:
        made["min_new_tokens"] = most - 1
        notes.append(f"min_new_tokens: {least} is not less than the most tokens there can be, {most}; {most - 1}")
    if len(conversion.suppressed) > MAX_DEFAULT_SUPPRESSED_TOKENS:
        many = f"{len(conversion.suppressed)} tokens; at most {MAX_DEFAULT_SUPPRESSED_TOKENS} can be ruled out"
        notes.append(f"suppress_tokens, bad_words_ids: {many}; left out")
        conversion.suppressed.clear()
    return notes


def _padding(conversion: Conversion) -> str:
    """Return how the network predicts padding: a softmax after the rules leaves it out."""
    if not conversion.is_pad_masked:
        return "predicted"
    return "excluded" if conversion.fields.get("renormalize_logits") is True else "masked"
