"""What an import says at its end: what was found, what was made of it, what is ignored and why."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Report:
    """Sentences in four groups, in the order they were said.

    Attributes:
        found: What the folder has.
        translated: What became of it, where that is not plain.
        ignored: What it says that has no effect here, and why.
        checked: What was compared, and the figures.
    """

    found: list[str] = field(default_factory=list)
    translated: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    def ignore(self, file: str, fields: Iterable[tuple[str, Any]], reason: str) -> None:
        """Name fields of a file that have no effect, with their values."""
        named = ", ".join(f"{name} {_brief(value)}" for name, value in fields)
        if named:
            self.ignored.append(f"{file}: {named}: {reason}")

    def lines(self) -> list[str]:
        """Return the report, a group after the other, those with nothing left out."""
        groups = {"found": self.found, "translated": self.translated, "ignored": self.ignored, "checked": self.checked}
        return [f"{name + ':':<12}{line}" for name, lines in groups.items() for line in lines]


def _brief(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
