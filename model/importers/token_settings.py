"""Converters of the settings that name tokens; each returns what became of its field."""

from typing import Any, Final

from dragoman.model.importers.conversion import PLAIN, Conversion, is_whole, rules_out
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.generation_fields import shown

# Fields that rule out more than padding.
_RULES: Final = (
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
)


def suppress_tokens(conversion: Conversion, value: Any) -> str:
    """Take tokens that are never generated."""
    tokens = value if isinstance(value, list) else None
    if tokens is None or not all(is_whole(token) for token in tokens):
        return f"{shown(value)} is no list of tokens; left out"
    return _suppress(conversion, tokens)


def begin_suppress_tokens(conversion: Conversion, value: Any) -> str:
    """Take end-of-sequence, which no answer may be alone."""
    tokens = value if isinstance(value, list) else [value]
    others = [token for token in tokens if token != conversion.target.eos_id]
    if others:
        return f"{shown(value)}: tokens that only an answer's first cannot be are not offered here; left out"
    if not tokens:
        return "none"
    conversion.made["min_new_tokens"] = max(1, conversion.made.get("min_new_tokens", 0))
    return f"{shown(value)}, end-of-sequence: min_new_tokens is 1 at the least"


def bad_words_ids(conversion: Conversion, value: Any) -> str:
    """Take words of one token, and padding as the network has it."""
    if not isinstance(value, list) or not all(isinstance(word, list) and word and all(map(is_whole, word)) for word in value):
        return f"{shown(value)} is no list of lists of tokens; left out"
    tokens = [word[0] for word in value if len(word) == 1 and word[0] != conversion.target.eos_id]
    longer = sum(len(word) > 1 for word in value)
    became = [_suppress(conversion, tokens)] if tokens or not longer else []
    became += [f"{longer} of several tokens cannot be ruled out here; left out"] if longer else []
    return "; ".join(became)


def renormalize_logits(conversion: Conversion, value: Any) -> str:
    """Say what a softmax after the rules changes; that padding is left out of it is `defaults.padding`."""
    if value is not True:
        return f"{shown(value)}, no effect"
    rules = [name for name in _RULES if conversion.fields.get(name) and conversion.fields[name] != PLAIN.get(name)]
    words = conversion.fields.get("bad_words_ids")
    if isinstance(words, list) and any(word not in ([conversion.target.pad_id], [conversion.target.eos_id]) for word in words):
        rules.append("bad_words_ids")
    became = "padding is left out of the softmax" if rules_out(words, conversion.target.pad_id) else "no effect without rules"
    if not rules:
        return became
    return f"{became}; what {', '.join(rules)} rule out stays in it here, so that scores of beam search differ where they apply"


def forced_bos_token_id(conversion: Conversion, value: Any) -> str:
    """Say who says the first token."""
    return f"{shown(value)} begins every answer, said by the template or the target's language"


def forced_eos_token_id(conversion: Conversion, value: Any) -> str:
    """Take that the longest answers end with end-of-sequence."""
    if value not in (conversion.target.eos_id, [conversion.target.eos_id]):
        return f"{shown(value)} is not the model's end-of-sequence, {conversion.target.eos_id}; left out"
    conversion.made["is_end_forced"] = True
    return f"{shown(value)}: the last token that max_new_tokens allows is end-of-sequence"


def eos_token_id(conversion: Conversion, value: Any) -> str:
    """Say which token ends answers.

    Raises:
        ForeignError: If it is not the model's.
    """
    ends = value if isinstance(value, list) else [value]
    if conversion.target.eos_id not in ends:
        raise ForeignError(
            f"{conversion.path}: eos_token_id is {shown(value)}, the model's end-of-sequence {conversion.target.eos_id}"
        )
    others = [end for end in ends if end != conversion.target.eos_id]
    return f"{shown(value)}; answers end with {conversion.target.eos_id} only here" if others else f"{shown(value)}, the model's"


def pad_token_id(conversion: Conversion, value: Any) -> str:
    """Say what fills rows."""
    return (
        f"{shown(value)}, the model's" if value == conversion.target.pad_id else f"{shown(value)} only fills rows there; no effect"
    )


def bos_token_id(conversion: Conversion, value: Any) -> str:
    """Say that it is not used."""
    return f"{shown(value)}: decoder_start_token_id says what the decoder reads first"


def decoder_start_token_id(conversion: Conversion, value: Any) -> str:
    """Say who says what the decoder reads first."""
    return f"{shown(value)}, the model's" if value == conversion.target.decoder_start_id else f"{shown(value)}; see the template"


def _suppress(conversion: Conversion, tokens: list[int]) -> str:
    """Rule tokens out; padding is the network's matter."""
    known = {token for token in tokens if 0 <= token < conversion.target.vocab_size}
    conversion.suppressed |= known - {conversion.target.pad_id}
    became = [f"suppressed_tokens: {len(known - {conversion.target.pad_id})} of them"] if known - {conversion.target.pad_id} else []
    if conversion.target.pad_id in known:
        conversion.is_pad_masked = True
        became.append("padding is never generated")
    if len(known) < len(set(tokens)):
        became.append(f"{len(set(tokens)) - len(known)} are no tokens of the model")
    return "; ".join(became) or "none"
