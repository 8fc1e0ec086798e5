"""Settings of Transformers' generation on their way to a bundle's defaults: the model they are for, and what they became so far."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import msgspec

from dragoman.model.generation import Defaults
from dragoman.model.importers.generation_fields import shown

# What a request means that does not say: a default that says the same is none.
PLAIN: Final[Mapping[str, Any]] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
}
_KINDS: Final = {one.name: one.type for one in msgspec.structs.fields(Defaults)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that defaults are for.

    Attributes:
        pad_id: Of its network.
        eos_id: The one token that ends an answer.
        decoder_start_id: What its decoder reads first, where no language says otherwise.
        vocab_size: V.
        max_target_tokens: Most tokens of an answer, its forced ones among them.
        num_forced: Tokens that the template and the language force every answer to begin with.
    """

    pad_id: int
    eos_id: int
    decoder_start_id: int
    vocab_size: int
    max_target_tokens: int
    num_forced: int = 0


@dataclass(slots=True)
class Conversion:
    """What became of settings so far.

    Attributes:
        fields: The settings.
        target: The model they are for.
        path: Where they are from, for messages.
        made: Fields of `Defaults`.
        suppressed: Tokens that are never generated.
        is_pad_masked: Whether padding never is.
    """

    fields: Mapping[str, Any]
    target: Target
    path: object
    made: dict[str, Any] = field(default_factory=dict)
    suppressed: set[int] = field(default_factory=set)
    is_pad_masked: bool = False

    def make(self, name: str, value: Any) -> str:
        """Take a value for a field of ours, if it can have it; return what to say of it."""
        try:
            if isinstance(value, float) and not math.isfinite(value):
                raise msgspec.ValidationError("not a finite number")
            given = msgspec.convert(value, _KINDS[name])
        except ValueError as error:  # msgspec's own, or that of text that is no UTF-8
            return f"{shown(value)} cannot be said here ({error}); left out"
        if given != PLAIN.get(name):
            self.made[name] = given
        return shown(given)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value of a JSON file is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def rules_out(words: Any, token: int) -> bool:
    """Whether `bad_words_ids` rules out a token by itself."""
    return isinstance(words, list) and [token] in words
