"""Converters of the settings that say how an answer is searched for, and how long it is; each returns what became of its field."""

from typing import Any, Final

from dragoman.model.importers.conversion import Conversion, is_whole, rules_out
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.generation_fields import shown

_START_TOKENS: Final = 1


def early_stopping(conversion: Conversion, value: Any) -> str:
    """Take when beam search ends."""
    if value == "never":
        return "'never' is not offered here; false, which ends a search where no live hypothesis wins as things stand"
    return conversion.make("early_stopping", value)


def top_k(conversion: Conversion, value: Any) -> str:
    """Take how many tokens are drawn from."""
    return conversion.make("top_k", min(value, conversion.target.vocab_size) if is_whole(value) else value)


def repetition_penalty(conversion: Conversion, value: Any) -> str:
    """Take the penalty where both mean the same: in beam search.

    Raises:
        ForeignError: If it is one of another search, which no request could have.
    """
    if value == 1:
        return "1, no effect"
    made, beams = conversion.make("repetition_penalty", value), conversion.fields.get("num_beams")
    if "repetition_penalty" in conversion.made and (not is_whole(beams) or beams < 2):
        raise ForeignError(
            f"{conversion.path}: repetition_penalty {shown(value)} without beams changes logits by their sign, which is not "
            "offered here; set it to 1, or num_beams to 2 at the least"
        )
    start, target = conversion.target.decoder_start_id, conversion.target
    if start == target.pad_id and rules_out(conversion.fields.get("bad_words_ids"), start):
        return made
    what = "end-of-sequence" if start == target.eos_id else "padding" if start == target.pad_id else f"token {start}"
    return f"{made}; there it counts the decoder's start token, too, so that {what} is penalised from the first step on"


def no_repeat_ngram_size(conversion: Conversion, value: Any) -> str:
    """Take the n-grams that occur once."""
    if is_whole(value) and value > conversion.target.max_target_tokens:
        return f"{shown(value)}, no effect in answers as short as the model's"
    made = conversion.make("no_repeat_ngram_size", value)
    start, target = conversion.target.decoder_start_id, conversion.target
    if value == 1:
        return f"{made}; there the decoder's start token, {start}, can never be generated either"
    if not is_whole(value) or value < 1 or start == target.eos_id or rules_out(conversion.fields.get("bad_words_ids"), start):
        return made
    return f"{made}; there n-grams that begin with the decoder's start token, {start}, count too, should it be generated"


def max_length(conversion: Conversion, value: Any) -> str:
    """Take the longest answer, its start and forced tokens counted."""
    if conversion.fields.get("max_new_tokens") is not None:
        return f"{shown(value)} does not count beside max_new_tokens"
    return _most(conversion, value, _START_TOKENS + conversion.target.num_forced)


def max_new_tokens(conversion: Conversion, value: Any) -> str:
    """Take the longest answer, its forced tokens counted."""
    return _most(conversion, value, conversion.target.num_forced)


def min_length(conversion: Conversion, value: Any) -> str:
    """Take the shortest answer, its start and forced tokens counted."""
    if conversion.fields.get("min_new_tokens") is not None:
        return f"{shown(value)} does not count beside min_new_tokens"
    return _least(conversion, value, _START_TOKENS + conversion.target.num_forced)


def min_new_tokens(conversion: Conversion, value: Any) -> str:
    """Take the shortest answer, its forced tokens counted."""
    return _least(conversion, value, conversion.target.num_forced)


def _most(conversion: Conversion, value: Any, counted: int) -> str:
    """Take the longest answer, of which so many tokens do not count here."""
    if not is_whole(value) or value - counted < 1:
        return f"{shown(value)} leaves no token to generate; left out"
    room = conversion.target.max_target_tokens - conversion.target.num_forced
    most = min(value - counted, room)
    made = conversion.make("max_new_tokens", most)
    cut = f", for which the model has room, in place of {value - counted}" if most < value - counted else ""
    return f"{value}: max_new_tokens {made}{cut}; {_without(counted)}"


def _least(conversion: Conversion, value: Any, counted: int) -> str:
    if not is_whole(value) or value < 0:
        return f"{shown(value)} is no number of tokens; left out"
    least = max(0, value - counted, conversion.made.get("min_new_tokens", 0))
    return f"{value}: min_new_tokens {conversion.make('min_new_tokens', least)}; {_without(counted)}"


def _without(counted: int) -> str:
    return f"there {counted} more are counted, of start and forced tokens" if counted else "counted as here"
