"""Which tokens are names of something, to a model, and not text: typed by a user, they stay the characters they are."""

import re
from typing import Final

SPACE: Final = "▁"

_NAME = re.compile(rf"{SPACE}?(<[^\s<>{SPACE}]+>|\[[^\s\[\]{SPACE}]+\]|>>[^\s<>{SPACE}]+<<)")


def is_name(piece: str) -> bool:
    """Whether a token looks like the name of something rather than like text: `<2de>`, `[MASK]`, `>>fra<<`."""
    return _NAME.fullmatch(piece) is not None
