"""What versions and labels may be called, and which version is the newer one."""

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from dragoman.export.fields import shown

MAX_CHARACTERS = 64
# A digit's run is a number, so that 10 comes after 9.
_RUNS = re.compile(r"[0-9]+|[^0-9]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_version_name(text: str) -> bool:
    """Return whether a version or a label can be called so."""
    return len(text) <= MAX_CHARACTERS and _NAME.fullmatch(text) is not None


def check_version_name(text: str) -> str:
    """Return a name that a version or a label can have: the characters of a model's name, at most 64 of them.

    Raises:
        ValueError: If it cannot be one.
    """
    if not is_version_name(text):
        rule = f"letters, digits, '.', '_' and '-', at most {MAX_CHARACTERS} of them, and begin with a letter or a digit"
        raise ValueError(f"{shown(text)} is no name of a version or a label: it must be {rule}")
    return text


VersionName = Annotated[
    str,
    AfterValidator(check_version_name),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$", "maxLength": MAX_CHARACTERS}),
]


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return what sorts names as people count: 1, 2, 10; v1.2.9, v1.2.10; 2024-01-05, 2024-11-01.

    Runs of digits are compared as numbers and come before anything else at their place; a name comes after what it begins with. Two
    names that differ in leading zeros only are in the order of their characters.
    """
    runs = tuple((0, int(run), "") if run[0] in "0123456789" else (1, 0, run) for run in _RUNS.findall(name))
    return runs, name
