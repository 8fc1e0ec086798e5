"""Bounds of a manifest's fields, far beyond any real model, and messages for values outside them.

With them a damaged or hostile manifest is refused before anything is made of it.
"""

import json
from typing import Annotated, Literal

from msgspec import Meta

from dragoman.model.card import MAX_DOMAIN_CHARACTERS
from dragoman.model.errors import InputError

MAX_LAYERS = 512
MAX_WIDTH = 1 << 16
MAX_VOCABULARY = 1 << 24
MAX_TOKENS = 1 << 20
MAX_FILES = 1024
MAX_PATH_CHARACTERS = 255
MAX_PATH_PARTS = 8
MAX_BUNDLE_BYTES = 1 << 40
MAX_GRAPH_BYTES = (1 << 31) - 1  # limit of a protobuf message
MAX_SAMPLES_BYTES = 1 << 22
MAX_COPY_BYTES = 1 << 28
"""Weights of a bundle that a scorer has a copy of, where they are not shared. Larger ones it reads as they are in the bundle's
mapped files: a pair of 30 tokens takes a tenth to a quarter longer then, and sums have another order than of a copy."""
MAX_NAME_CHARACTERS = 128
# Keys and values of self-attention and of cross-attention, for every layer.
MAX_CACHES = 4 * MAX_LAYERS
MAX_CACHE_AXES = 6
# No graph has more inputs or outputs than a decode step with so many caches.
MAX_TENSORS = MAX_CACHES + 8

Precision = Literal["fp32", "int8", "fp16", "bf16"]
CachePrecision = Literal["int8"]
WeightBits = Literal[7, 8]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
Vocabulary = Annotated[int, Meta(ge=1, le=MAX_VOCABULARY)]
TokenId = Annotated[int, Meta(ge=0, lt=MAX_VOCABULARY)]
Length = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Total = Annotated[int, Meta(ge=0, le=1 << 53)]
Difference = Annotated[float, Meta(ge=0, le=1e9)]
Change = Annotated[float, Meta(ge=-1e9, le=1e9)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Version = Annotated[str, Meta(max_length=64, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._+-]*\Z")]
TensorName = Annotated[str, Meta(max_length=64, pattern=r"\A[a-z0-9_]+\Z")]
TensorList = Annotated[list[TensorName], Meta(max_length=MAX_TENSORS)]
# One line, that changes neither a terminal nor the direction of writing, and that can be written as UTF-8.
Line = Annotated[
    str,
    Meta(max_length=MAX_DOMAIN_CHARACTERS, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]*\Z"),
]

_MAX_SHOWN_NAMES = 5


class BundleError(InputError):
    """A bundle that cannot be served; the message names the file and says why."""


def listed(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + more


def shown(given: object) -> str:
    """Return what a message may say of something given."""
    if isinstance(given, dict | list):
        return "an object" if isinstance(given, dict) else "a list"
    return one_line(json.dumps(given), 80)


def tellable(text: str) -> str:
    """Return a text that messages can hold, which the name of a file need not be."""
    return text.encode(errors="backslashreplace").decode()


def one_line(text: str, max_characters: int = 400) -> str:
    """Return a text as one line of printable ASCII, without its middle if it is too long for a message."""
    text = "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in _shortened(text, max_characters))
    return _shortened(text, max_characters)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"
