"""Files of a foreign folder but for its tensors: JSON read within bounds, names of weight files, folders of other programs."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeGuard, TypeVar

from dragoman.model.errors import InputError
from dragoman.model.files import open_regular, read_given

# `config.json` has a few kilobytes, a vocabulary of 256,000 tokens or the index of a thousand shards a few megabytes.
MAX_JSON_BYTES: Final = 128 * 2**20
MAX_CONFIG_BYTES: Final = 2**20
MAX_SIZE: Final = 2**24 - 1
SAFETENSORS: Final = "model.safetensors"
PICKLED: Final = "pytorch_model.bin"
INDEX_SUFFIX: Final = ".index.json"  # after either, where weights are in several files
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_KINDS: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_SCRIPT: Final = "convert it with the script of its family in Transformers 4 (models/*/convert_*_to_pytorch.py), and import that"
# Files that are there together, of which the first is named, what writes them, and what to do.
_OTHER_FOLDERS: Final = (
    (("checkpoint-*/config.json",), "what a Trainer wrote while it trained", "import one of its checkpoints, for example {}"),
    (("snapshots/*/config.json",), "a repository in the cache of the hub", "import {}, or the repository by its name"),
    (("model.bin", "*vocabulary.*"), "a model of CTranslate2", "import the checkpoint that it was converted from"),
    (("*.onnx",), "graphs of ONNX", "import the checkpoint that they were exported from"),
    (("onnx/*.onnx",), "graphs of ONNX", "import the checkpoint that they were exported from"),
    (("dict.*.txt", "*.pt"), "a model of fairseq", _SCRIPT),
    (("*.npz", "*.yml"), "a model of Marian itself", _SCRIPT),
)
T = TypeVar("T", bool, int, float, str)


class ForeignError(InputError):
    """A checkpoint of another library that cannot be imported; the message names the file and the cause, on one line.

    All functions of this package raise it that read a folder, or settings of one.
    """

    def __init__(self, message: object) -> None:
        """Take the message; line breaks of a library's message become spaces."""
        super().__init__(" ".join(str(message).split()))


class Settings:
    """Fields of a JSON object over the family's defaults, each of its expected type; records which of them have been read."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        """Take the fields of `path`."""
        self.path = path
        self.fields = dict(fields)
        self._stated = frozenset(fields)
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path, is_required: bool = True) -> Self:
        """Read a file of at most a megabyte; one that is not required may be missing, and has no fields then."""
        if not is_required and not os.path.lexists(path):
            return cls(path, {})
        return cls(path, load_object(path, MAX_CONFIG_BYTES))

    def with_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Add fields that the file lacks."""
        self.fields |= {name: value for name, value in defaults.items() if name not in self.fields}

    def get(self, name: str, kind: type[T]) -> T:
        """Return a field; raise `ForeignError` if it is missing, or of another type."""
        value = self.find(name, kind)
        if value is None:
            raise ForeignError(f"{self.path}: {name} is missing")
        return value

    def find(self, name: str, kind: type[T]) -> T | None:
        """Return a field, or None where it is missing or null; raise `ForeignError` if it is of another type."""
        value = self.take(name)
        if value is None:
            return None
        if not (isinstance(value, kind) or (kind is float and is_whole(value))) or (isinstance(value, bool) and kind is not bool):
            raise ForeignError(f"{self.path}: {name} must be {_KINDS[kind]}, not {shown(value)}")
        if kind is float and not _is_finite(value):
            raise ForeignError(f"{self.path}: {name} must be a finite number, not {shown(value)}")
        return kind(value)

    def size(self, name: str, most: int = MAX_SIZE) -> int:
        """Return a count or a width; raise `ForeignError` if it is missing, no whole number, or not between 1 and `most`."""
        value = self.get(name, int)
        if not 0 < value <= most:
            raise ForeignError(f"{self.path}: {name} is {shown(value)}, which is not between 1 and {most}")
        return value

    def take(self, name: str) -> Any:
        """Return a field of any type, or None."""
        self._read.add(name)
        return self.fields.get(name)

    @property
    def unread(self) -> dict[str, Any]:
        """Fields of the file that have not been read."""
        return {name: value for name, value in self.fields.items() if name in self._stated and name not in self._read}


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value of a JSON file is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_empty(value: Any) -> bool:
    """Return whether a field's value is null, false, zero or empty."""
    return value in (None, False, 0, "") or value == [] or value == {}


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond floating point
        return False


def shown(value: Any, most: int = 60) -> str:
    """Return a value as a message has it: on one line, as JSON writes null and booleans, cut to `most` characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def words(text: str) -> tuple[str, ...]:
    """Return the words of a table."""
    return tuple(text.split())


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names for a message: the first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def load_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object; raise `ForeignError` if the file is missing, no regular one, too large, or no JSON object."""
    content = read(path, max_bytes)
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ForeignError(f"{path}: nested too deeply") from error
    except ValueError as error:
        raise ForeignError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ForeignError(f"{path}: not a JSON object")
    return value


def load_object_if_any(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is missing has no fields."""
    return load_object(path) if path.exists() else {}


def read(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file; raise `ForeignError` if it is missing, no regular file, or larger."""
    content = read_given(path, max_bytes, ForeignError)
    _refuse_pointer(path, content)
    return content


def refuse_pointer(path: Path) -> None:
    """Refuse the pointer that Git leaves in place of a large file without its extension LFS."""
    try:
        with open_regular(path) as file:
            _refuse_pointer(path, file.read(len(_POINTER)))
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error


def _refuse_pointer(path: Path, content: bytes) -> None:
    if content.startswith(_POINTER):
        raise ForeignError(f"{path}: Git LFS’s pointer to the file, not the file; `git lfs pull` fetches it")


def refuse_other_folder(folder: Path) -> None:
    """Raise `ForeignError` for a folder of another program, naming the program, and what to import in its place."""
    for patterns, what, mend in _OTHER_FOLDERS:
        found = [max(folder.glob(pattern), key=lambda path: (len(str(path)), path), default=None) for pattern in patterns]
        if found[0] is not None and all(found):
            raise ForeignError(f"{folder}: {what} ({found[0].relative_to(folder)}); {mend.format(found[0].parent)}")
