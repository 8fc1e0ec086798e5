"""Transformers' settings of generation as a bundle's defaults: each field converted exactly, or named with the reason why not.

docs/api.md has both definitions. Transformers counts the decoder's start token and forced tokens among an answer's; requests here
count neither, so lengths change by as many.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from dragoman.model.generation import MAX_DEFAULT_SUPPRESSED_TOKENS, Defaults
from dragoman.model.importers.files import ForeignError, is_whole, shown, words

TRANSFORMERS_TOP_K: Final = 50  # tokens that Transformers draws from by default
# Values of a request that does not say: a default of the same value is none.
_REQUEST_DEFAULTS: Final[Mapping[str, Any]] = dict(
    **dict(num_beams=1, num_return_sequences=1, length_penalty=1.0, early_stopping=False, do_sample=False, temperature=1.0),
    **dict(top_k=0, top_p=1.0, repetition_penalty=1.0, min_new_tokens=0, no_repeat_ngram_size=0),
)
_TYPES: Final = {one.name: one.type for one in msgspec.structs.fields(Defaults)}
# Fields of ours under the same name, with the same meaning.
_SAME: Final = words("num_beams num_return_sequences length_penalty do_sample temperature top_p")
# Fields that change an answer and are not supported: the effect of each.
_UNSUPPORTED: Final = {
    "max_time": "a request's deadline",
    "stop_strings": "texts that end an answer",
    "use_mtp": "several tokens a step",
    "min_p": "draws above a share of the likeliest",
    "top_h": "draws within a share of the entropy",
    "typical_p": "draws of typical tokens",
    "epsilon_cutoff": "draws above a probability",
    "eta_cutoff": "draws above a probability that depends on the entropy",
    "encoder_repetition_penalty": "a penalty on what is not in the source",
    "encoder_no_repeat_ngram_size": "no n-grams of the source",
    "exponential_decay_length_penalty": "a growing wish to end",
    "sequence_bias": "biases on sequences",
    "token_healing": "another end of the prompt",
    "guidance_scale": "two prompts against each other",
    "watermarking_config": "a watermark",
    "penalty_alpha": "contrastive search",
    "dola_layers": "layers against each other",
    "diversity_penalty": "groups of beams that differ",
    "num_beam_groups": "groups of beams that differ",
    "constraints": "words that must come",
    "force_words_ids": "words that must come",
    "assistant_ensemble_weight": "two models together",
}
# With these values, fields of the table above do nothing in Transformers either.
_IDLE: Final = dict(
    **dict(typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0, encoder_repetition_penalty=1.0, encoder_no_repeat_ngram_size=0),
    **dict(guidance_scale=1, diversity_penalty=0.0, num_beam_groups=1, token_healing=False, use_mtp=False),
)
_SAMPLING_ONLY: Final = frozenset({"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"})
# Ways in which Transformers computes, stores or returns.
_NO_EFFECT: Final = frozenset(
    words(
        """
    use_cache cache_implementation cache_config max_cache_len output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind speculation_type
    compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size remove_invalid_values
    transformers_version _from_model_config _commit_hash
    """
    )
)
# Fields that rule out more than padding.
_RULES: Final = words("min_length min_new_tokens no_repeat_ngram_size repetition_penalty suppress_tokens begin_suppress_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that defaults are for; `num_forced` tokens begin every answer, and are among its most tokens."""

    pad_id: int
    eos_id: int
    decoder_start_id: int
    vocab_size: int
    max_target_tokens: int
    num_forced: int = 0


class Converted(NamedTuple):
    """A bundle's defaults, the treatment of padding (see `ModelConfig.padding`), and `field: result` for every field."""

    defaults: Defaults
    padding: str
    notes: list[str]


def convert(fields: Mapping[str, Any], target: Target, path: object = "generation_config.json") -> Converted:
    """Convert the settings of `generate`, as `generation_fields` gives them, field by field; `path` is their file, for messages.

    Raises:
        ForeignError: If answers would end with another token than the model's end-of-sequence.
    """
    conversion = _Conversion(fields, target, path)
    notes = [f"{name}: {_converted(conversion, name, value)}" for name, value in fields.items() if name not in _NO_EFFECT]
    if without := [name for name in fields if name in _NO_EFFECT]:
        notes.append(f"{', '.join(without)}: no effect on answers")
    notes += _unstated(conversion)
    notes += _without_contradictions(conversion)
    defaults = msgspec.convert({**conversion.made, "suppressed_tokens": sorted(conversion.suppressed)}, Defaults)
    is_renormalized = fields.get("renormalize_logits") is True  # a softmax after the rules leaves padding out
    padding = "predicted" if not conversion.is_pad_masked else "excluded" if is_renormalized else "masked"
    return Converted(defaults, padding, notes)


@dataclass(slots=True)
class _Conversion:
    """Settings, and their results so far: fields of `Defaults`, tokens that are never generated, whether padding is one."""

    fields: Mapping[str, Any]
    target: Target
    path: object
    made: dict[str, Any] = field(default_factory=dict)
    suppressed: set[int] = field(default_factory=set)
    is_pad_masked: bool = False

    def make(self, name: str, value: Any) -> str:
        """Take a value for a field of ours, if it can have it; return a note."""
        try:
            if isinstance(value, float) and not math.isfinite(value):
                raise msgspec.ValidationError("not a finite number")
            given = msgspec.convert(value, _TYPES[name])
        except ValueError as error:  # msgspec's own, or that of text that is no UTF-8
            return f"{shown(value)} cannot be said here ({error}); left out"
        if given != _REQUEST_DEFAULTS.get(name):
            self.made[name] = given
        return shown(given)

    def rules_out(self, token: int) -> bool:
        """Return whether `bad_words_ids` rules out a token by itself."""
        words = self.fields.get("bad_words_ids")
        return isinstance(words, list) and [token] in words

    def suppress(self, tokens: list[int]) -> str:
        """Rule tokens out, padding by way of the network; return a note."""
        known = {token for token in tokens if 0 <= token < self.target.vocab_size}
        others = known - {self.target.pad_id}
        self.suppressed |= others
        notes = [f"suppressed_tokens: {len(others)} of them"] if others else []
        if others != known:
            self.is_pad_masked = True
            notes.append("padding is never generated")
        if len(known) < len(set(tokens)):
            notes.append(f"{len(set(tokens)) - len(known)} are no tokens of the model")
        return "; ".join(notes) or "none"


def _converted(conversion: _Conversion, name: str, value: Any) -> str:
    """Convert one field, and return its result."""
    if value is None:
        return "null, as if it were not there"
    if name in _CONVERTERS:
        return _CONVERTERS[name](conversion, value)
    if name in _SAME:
        return conversion.make(name, value)
    if name not in _UNSUPPORTED:
        return f"{shown(value)} is not known here; left out"
    if name in _IDLE and value == _IDLE[name]:
        return f"{shown(value)}, no effect"
    if name in _SAMPLING_ONLY and conversion.fields.get("do_sample") is not True:
        return f"{shown(value)} ({_UNSUPPORTED[name]}) has no effect without do_sample"
    return f"{shown(value)}: {_UNSUPPORTED[name]}: not offered here; left out"


def _unstated(conversion: _Conversion) -> list[str]:
    """Take Transformers' values of missing fields, where a request here means something else."""
    fields, notes = conversion.fields, []
    if fields.get("do_sample") is True and fields.get("top_k") is None:
        taken = conversion.make("top_k", min(TRANSFORMERS_TOP_K, conversion.target.vocab_size))
        notes.append(f"top_k: not said; {taken}, as there")
    if fields.get("max_length") is None and fields.get("max_new_tokens") is None:
        notes.append("max_length: not said; Transformers stops after 20 tokens, here a bundle's own default is the limit")
    return notes


def _without_contradictions(conversion: _Conversion) -> list[str]:
    """Leave out fields that contradict each other, and name them."""
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


def _early_stopping(conversion: _Conversion, value: Any) -> str:
    if value == "never":
        return "'never' is not offered here; false, which ends a search where no live hypothesis wins as things stand"
    return conversion.make("early_stopping", value)


def _top_k(conversion: _Conversion, value: Any) -> str:
    return conversion.make("top_k", min(value, conversion.target.vocab_size) if is_whole(value) else value)


def _repetition_penalty(conversion: _Conversion, value: Any) -> str:
    """Take the penalty of beam search; refuse that of another search, which no request here could have."""
    if value == 1:
        return "1, no effect"
    made, beams = conversion.make("repetition_penalty", value), conversion.fields.get("num_beams")
    if "repetition_penalty" in conversion.made and (not is_whole(beams) or beams < 2):
        why = "changes logits by their sign, which is not offered here; set it to 1, or num_beams to 2 at the least"
        raise ForeignError(f"{conversion.path}: repetition_penalty {shown(value)} without beams {why}")
    start, target = conversion.target.decoder_start_id, conversion.target
    if start == target.pad_id and conversion.rules_out(start):
        return made
    what = "end-of-sequence" if start == target.eos_id else "padding" if start == target.pad_id else f"token {start}"
    return f"{made}; there it counts the decoder's start token, too, so that {what} is penalised from the first step on"


def _no_repeat_ngram_size(conversion: _Conversion, value: Any) -> str:
    if is_whole(value) and value > conversion.target.max_target_tokens:
        return f"{shown(value)}, no effect in answers as short as the model's"
    made = conversion.make("no_repeat_ngram_size", value)
    start = conversion.target.decoder_start_id
    if value == 1:
        return f"{made}; there the decoder's start token, {start}, can never be generated either"
    if not is_whole(value) or value < 1 or start == conversion.target.eos_id or conversion.rules_out(start):
        return made
    return f"{made}; there n-grams that begin with the decoder's start token, {start}, count too, should it be generated"


def _longest(conversion: _Conversion, value: Any, start_tokens: int = 0) -> str:
    """Take the length of the longest answer, in which forced tokens and so many start tokens are counted."""
    if start_tokens and conversion.fields.get("max_new_tokens") is not None:
        return f"{shown(value)} does not count beside max_new_tokens"
    counted, forced = start_tokens + conversion.target.num_forced, conversion.target.num_forced
    if not is_whole(value) or value - counted < 1:
        return f"{shown(value)} leaves no token to generate; left out"
    wanted, room = value - counted, conversion.target.max_target_tokens - forced
    made = conversion.make("max_new_tokens", min(wanted, room))
    cut = f", for which the model has room, in place of {wanted}" if room < wanted else ""
    return f"{value}: max_new_tokens {made}{cut}; {_counted(counted)}"


def _shortest(conversion: _Conversion, value: Any, start_tokens: int = 0) -> str:
    """Take the length of the shortest answer, in which forced tokens and so many start tokens are counted."""
    if start_tokens and conversion.fields.get("min_new_tokens") is not None:
        return f"{shown(value)} does not count beside min_new_tokens"
    if not is_whole(value) or value < 0:
        return f"{shown(value)} is no number of tokens; left out"
    counted = start_tokens + conversion.target.num_forced
    least = max(0, value - counted, conversion.made.get("min_new_tokens", 0))
    return f"{value}: min_new_tokens {conversion.make('min_new_tokens', least)}; {_counted(counted)}"


def _counted(number: int) -> str:
    return f"there {number} more are counted, of start and forced tokens" if number else "counted as here"


def _suppress_tokens(conversion: _Conversion, value: Any) -> str:
    if not isinstance(value, list) or not all(map(is_whole, value)):
        return f"{shown(value)} is no list of tokens; left out"
    return conversion.suppress(value)


def _begin_suppress_tokens(conversion: _Conversion, value: Any) -> str:
    """Take end-of-sequence, which no answer may be alone."""
    tokens = value if isinstance(value, list) else [value]
    if any(token != conversion.target.eos_id for token in tokens):
        return f"{shown(value)}: tokens that only an answer's first cannot be are not offered here; left out"
    if not tokens:
        return "none"
    conversion.made["min_new_tokens"] = max(1, conversion.made.get("min_new_tokens", 0))
    return f"{shown(value)}, end-of-sequence: min_new_tokens is 1 at the least"


def _bad_words_ids(conversion: _Conversion, value: Any) -> str:
    """Take words of one token, and padding as the network has it."""
    if not isinstance(value, list) or not all(isinstance(word, list) and word and all(map(is_whole, word)) for word in value):
        return f"{shown(value)} is no list of lists of tokens; left out"
    tokens = [word[0] for word in value if len(word) == 1 and word[0] != conversion.target.eos_id]
    longer = sum(len(word) > 1 for word in value)
    notes = [conversion.suppress(tokens)] if tokens or not longer else []
    notes += [f"{longer} of several tokens cannot be ruled out here; left out"] if longer else []
    return "; ".join(notes)


def _renormalize_logits(conversion: _Conversion, value: Any) -> str:
    """Note the effects of a softmax after the rules; `convert` leaves padding out of it."""
    if value is not True:
        return f"{shown(value)}, no effect"
    fields, target = conversion.fields, conversion.target
    rules = [name for name in _RULES if fields.get(name) and fields[name] != _REQUEST_DEFAULTS.get(name)]
    words = fields.get("bad_words_ids")
    if isinstance(words, list) and any(word not in ([target.pad_id], [target.eos_id]) for word in words):
        rules.append("bad_words_ids")
    note = "padding is left out of the softmax" if conversion.rules_out(target.pad_id) else "no effect without rules"
    if not rules:
        return note
    return f"{note}; what {', '.join(rules)} rule out stays in it here, so that scores of beam search differ where they apply"


def _forced_eos_token_id(conversion: _Conversion, value: Any) -> str:
    eos_id = conversion.target.eos_id
    if value not in (eos_id, [eos_id]):
        return f"{shown(value)} is not the model's end-of-sequence, {eos_id}; left out"
    conversion.made["is_end_forced"] = True
    return f"{shown(value)}: the last token that max_new_tokens allows is end-of-sequence"


def _eos_token_id(conversion: _Conversion, value: Any) -> str:
    ends, eos_id = value if isinstance(value, list) else [value], conversion.target.eos_id
    if eos_id not in ends:
        raise ForeignError(f"{conversion.path}: eos_token_id is {shown(value)}, the model's end-of-sequence {eos_id}")
    is_only = all(end == eos_id for end in ends)
    return f"{shown(value)}, the model's" if is_only else f"{shown(value)}; answers end with {eos_id} only here"


def _noted(conversion: _Conversion, value: Any, note: str, of_model: str = "") -> str:
    """Change nothing: return the value, then a note, unless the value is the model's."""
    is_models = bool(of_model) and value == getattr(conversion.target, of_model)
    return shown(value) + (", the model's" if is_models else note)


_CONVERTERS: Final[Mapping[str, Callable[[_Conversion, Any], str]]] = {
    "early_stopping": _early_stopping,
    "top_k": _top_k,
    "repetition_penalty": _repetition_penalty,
    "no_repeat_ngram_size": _no_repeat_ngram_size,
    "max_length": partial(_longest, start_tokens=1),
    "max_new_tokens": _longest,
    "min_length": partial(_shortest, start_tokens=1),
    "min_new_tokens": _shortest,
    "suppress_tokens": _suppress_tokens,
    "begin_suppress_tokens": _begin_suppress_tokens,
    "bad_words_ids": _bad_words_ids,
    "renormalize_logits": _renormalize_logits,
    "forced_bos_token_id": partial(_noted, note=" begins every answer, said by the template or the target's language"),
    "forced_eos_token_id": _forced_eos_token_id,
    "eos_token_id": _eos_token_id,
    "pad_token_id": partial(_noted, note=" only fills rows there; no effect", of_model="pad_id"),
    "bos_token_id": partial(_noted, note=": decoder_start_token_id says what the decoder reads first"),
    "decoder_start_token_id": partial(_noted, note="; see the template", of_model="decoder_start_id"),
}
# Fields of the length, the width and the search of an answer, in any version of Transformers.
ANSWER_FIELDS: Final = frozenset({*_CONVERTERS, *_SAME, *_UNSUPPORTED, "remove_invalid_values"})
