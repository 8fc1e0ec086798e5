"""A JSON file of a foreign folder, read within bounds, which remembers what has been asked of it."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

from dragoman.model.files import open_regular, read_bounded
from dragoman.model.importers.errors import ForeignError

# `config.json` has a few kilobytes, a vocabulary of 256,000 tokens or the index of a thousand shards a few megabytes.
MAX_JSON_BYTES: Final = 128 * 2**20
MAX_CONFIG_BYTES: Final = 2**20
MAX_SIZE: Final = 2**24 - 1
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
T = TypeVar("T", bool, int, float, str)


class Settings:
    """The fields of a JSON object, each of its expected type; those that nobody asked for can be told apart afterwards.

    Attributes:
        path: Of the file.
        fields: What it says; the family's defaults beneath.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        """Take what `path` says."""
        self.path = path
        self.fields = dict(fields)
        self._stated = frozenset(fields)
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path, is_required: bool = True) -> Self:
        """Read a file of at most a megabyte; one that is not required may be missing, and says nothing then.

        Raises:
            ForeignError: If it cannot be read or is no JSON object.
        """
        if not is_required and not os.path.lexists(path):
            return cls(path, {})
        return cls(path, load_object(path, MAX_CONFIG_BYTES))

    def with_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Say what holds where the file is silent."""
        for name, value in defaults.items():
            self.fields.setdefault(name, value)

    def get(self, name: str, kind: type[T]) -> T:
        """Return a field.

        Raises:
            ForeignError: If it is missing, or of another type.
        """
        value = self.find(name, kind)
        if value is None:
            raise ForeignError(f"{self.path}: {name} is missing")
        return value

    def find(self, name: str, kind: type[T]) -> T | None:
        """Return a field, or None where it is missing or null.

        Raises:
            ForeignError: If it is of another type.
        """
        self._read.add(name)
        value = self.fields.get(name)
        if value is None:
            return None
        is_whole = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if not (isinstance(value, kind) or is_whole) or (isinstance(value, bool) and kind is not bool):
            raise ForeignError(f"{self.path}: {name} must be {_KINDS[kind]}, not {_shown(value)}")
        if kind is float and not _is_finite(value):
            raise ForeignError(f"{self.path}: {name} must be a finite number, not {_shown(value)}")
        return kind(value)

    def size(self, name: str, most: int = MAX_SIZE) -> int:
        """Return how many there are of something, or how wide it is.

        Raises:
            ForeignError: If it is missing, no whole number, or none that a model can have.
        """
        value = self.get(name, int)
        if not 0 < value <= most:
            raise ForeignError(f"{self.path}: {name} is {_shown(value)}, which is not between 1 and {most}")
        return value

    def take(self, name: str) -> Any:
        """Return a field of any type, or None."""
        self._read.add(name)
        return self.fields.get(name)

    @property
    def unread(self) -> dict[str, Any]:
        """The fields of the file that nobody has asked for."""
        return {name: value for name, value in self.fields.items() if name in self._stated and name not in self._read}


_KINDS: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond floating point
        return False


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ForeignError: If the file is missing, no regular one, too large, or no JSON object.
    """
    content = read(path, max_bytes)
    return cast("dict[str, Any]", _parsed(path, content, dict, "a JSON object"))


def load_list(path: Path) -> list[Any]:
    """Read a JSON array; raises as `load_object`."""
    return cast("list[Any]", _parsed(path, read(path, MAX_JSON_BYTES), list, "a JSON array"))


def read(path: Path, max_bytes: int) -> bytes:
    """Return what a regular file holds.

    Raises:
        ForeignError: If it is missing, no regular file, or holds more.
    """
    try:
        content = read_bounded(path, max_bytes)
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error
    _refuse_pointer(path, content)
    return content


def refuse_pointer(path: Path) -> None:
    """Refuse what Git leaves in a large file's place where its extension LFS is missing.

    Raises:
        ForeignError: Naming the file, and how it is fetched.
    """
    try:
        with open_regular(path) as file:
            _refuse_pointer(path, file.read(len(_POINTER)))
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error


def _refuse_pointer(path: Path, content: bytes) -> None:
    if content.startswith(_POINTER):
        raise ForeignError(f"{path}: Git LFS’s pointer to the file, not the file; `git lfs pull` fetches it")


def _parsed(path: Path, content: bytes, kind: Callable[..., Any], what: str) -> Any:
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ForeignError(f"{path}: nested too deeply") from error
    except ValueError as error:
        raise ForeignError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, cast("type", kind)):
        raise ForeignError(f"{path}: not {what}")
    return value
