"""What the command line calls the fields of a request: servers, and our own checks, name the fields."""

import re
from collections.abc import Iterable
from typing import Final

from dragoman.model.errors import InputError

# Options that are called otherwise than their fields.
_RENAMED: Final = {
    "do_sample": "--sample",
    "return_alternatives": "--alternatives",
    "return_log_probs": "--log-probs",
    "return_word_alignment": "--alignment",
    "source_language": "--from",
    "target_language": "--to",
    "timeout_seconds": "--timeout",
}
DENIABLE: Final = ("early_stopping", "do_sample", "special_tokens_in_text")
"""Fields that a model may have as its default, and an option denies."""
_SAME: Final = (
    "model",
    "model_version",
    "max_new_tokens",
    "truncate",
    "num_beams",
    "num_return_sequences",
    "length_penalty",
    "early_stopping",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "forced_prefix",
    "top_log_probs",
    "special_tokens_in_text",
    "alignment_layer",
    "concurrency",
    "token",
)
_FLAGS: Final = {name: f"--{name.replace('_', '-')}" for name in _SAME} | _RENAMED


def _one_of(names: Iterable[str]) -> str:
    return "|".join(sorted(names, key=len, reverse=True))


# A field that the message begins with, and the names within it that are no words of the language; not what it quotes.
_FIRST = re.compile(rf"^(?P<name>{_one_of(_FLAGS)})(?=: )")
_WITHIN = re.compile(rf"(?<![\w'\"./-])(?P<name>{_one_of(name for name in _FLAGS if '_' in name)})(?![\w'\"/-])")


def flag(field: str) -> str:
    """Return the flag of a field that has one.

    Raises:
        KeyError: If it has none.
    """
    return _FLAGS[field]


def denial(field: str) -> str:
    """Return the flag that denies a field of `DENIABLE`."""
    return flag(field).replace("--", "--no-", 1)


def in_flags(message: str) -> str:
    """Return a message about fields as one about flags."""
    return _WITHIN.sub(_flag_of, _FIRST.sub(_flag_of, message))


def refusal(label: str, message: str) -> InputError:
    """Return the error for what a server refused: of an option, which all texts share, or of a text.

    Args:
        label: What to call the text.
        message: The server's, about a field.
    """
    told = in_flags(message)
    return InputError(told if told.startswith("--") else f"{label}: {told}")


def _flag_of(found: re.Match[str]) -> str:
    return _FLAGS[found["name"]]
