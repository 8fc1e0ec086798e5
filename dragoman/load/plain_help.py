"""A command whose help is shown as it is written.

Typer reads help as markup of rich, in which `uniform:A:B` has an emoji and `[x]` is a style.
"""

from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

# A style that changes nothing stands in every colon, so that no two of them enclose the name of an emoji.
_COLON = ":[none][/none]"


class PlainCommand(TyperCommand):
    """A command whose own help and that of its options is plain text."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.rich_markup_mode is None:  # plain text already
            return
        self.help = plain(self.help)
        for parameter in self.params:
            text = getattr(parameter, "help", None)
            if text is not None:
                parameter.help = plain(text)  # type: ignore[attr-defined]


def plain(text: str | None) -> str | None:
    """Return markup that rich shows as this text."""
    return None if text is None else escape(text).replace(":", _COLON)
