"""Special tokens that a text may name, where that is asked for; without asking, their names are text to every tokeniser."""

import re
from collections.abc import Callable, Iterable
from typing import Annotated

from msgspec import Meta, Struct

Id = Annotated[int, Meta(ge=0, lt=1 << 24)]
Encode = Callable[[str], list[int]]


class SpecialToken(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A token by its name.

    Attributes:
        content: The name.
        id: The model's id.
        lstrip: White space before the name belongs to it.
        rstrip: White space after it does.
        space_id: What white space before the name is otherwise; None for nothing.
    """

    content: Annotated[str, Meta(min_length=1, max_length=1024)]
    id: Id
    lstrip: bool = False
    rstrip: bool = False
    space_id: Id | None = None


def splitting(tokens: Iterable[SpecialToken], encode: Encode) -> Encode:
    """Return a function that encodes a text with these tokens; `encode` is given the text between them.

    Of names that begin at one place the longest counts, as in Transformers.
    """
    named = {token.content: token for token in tokens}
    pattern = re.compile("|".join(map(re.escape, sorted(named, key=len, reverse=True))) or r"(?!)")

    def encode_with_tokens(text: str) -> list[int]:
        ids, end, is_stripped = list[int](), 0, False
        for found in pattern.finditer(text):
            token, between = named[found[0]], text[end : found.start()]
            between = between.lstrip() if is_stripped else between
            between = between.rstrip() if token.lstrip else between
            ids += encode(between)
            if token.space_id is not None and between[-1:].isspace():
                ids.append(token.space_id)
            ids.append(token.id)
            end, is_stripped = found.end(), token.rstrip
        return ids + encode(text[end:].lstrip() if is_stripped else text[end:])

    return encode_with_tokens
