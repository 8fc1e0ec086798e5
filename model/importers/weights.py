"""The tensors of a foreign folder, whatever files they are in: mapped into memory, read one at a time, never unpickled as code."""

import contextlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.settings import load_object, refuse_pointer
from dragoman.model.importers.weight_files import COMPILED, INDEX_SUFFIX, OTHERS, PICKLED, SAFETENSORS, refuse_other_folder

# What is read: each becomes single precision.
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_FORBIDDEN_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


class _File(Protocol):
    """One file of tensors."""

    path: Path

    def names(self) -> list[str]:
        """Of its tensors."""
        ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a tensor's number format, as safetensors calls it, and its shape."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor, mapped where that can be."""
        ...


class _Safetensors:
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, "pt")
        except (OSError, SafetensorError, ValueError) as error:
            raise ForeignError(f"{path}: {_reason(error)}") from error
        self._names: dict[str, str] = {name.removeprefix(COMPILED): name for name in list(self._file.keys())}  # type: ignore[no-untyped-call]

    def names(self) -> list[str]:
        return list(self._names)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        part = self._file.get_slice(self._names[name])
        return part.get_dtype(), tuple(part.get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._names[name])
        return tensor


class _Pickled:
    """A file of `torch.save`, of which nothing is unpickled but tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Files from before PyTorch 1.6 are no archives, and cannot be mapped.
            state = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # a damaged pickle can fail in any way
            raise ForeignError(f"{path}: {_reason(error)}") from error
        if not isinstance(state, Mapping):
            raise ForeignError(f"{path}: holds a {type(state).__name__}, not a table of tensors")
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ForeignError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
            _refuse_larger_than_storage(path, name, tensor)
            self._tensors[name.removeprefix(COMPILED)] = tensor.detach()

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        tensor = self._tensors[name]
        return _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _refuse_larger_than_storage(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor that repeats few numbers many times: it would take memory that the file does not have."""
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    if not is_plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ForeignError(f"{path}: {name} is not a plain tensor")


def _reason(error: Exception) -> str:
    """Return why a file of tensors cannot be read, in one sentence."""
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = str(error)
    if "weights_only" in message or "Weights only" in message:
        found = _FORBIDDEN_GLOBAL.search(message)
        what = f" ({found[1]})" if found else ""
        return f"holds pickled code{what}, which is never run"
    first = message.strip().splitlines()[0] if message.strip() else type(error).__name__
    return first if len(first) < 300 else f"{first[:300]}..."


@dataclass(frozen=True, slots=True)
class Shape:
    """What a tensor is, before it is read.

    Attributes:
        path: Its file.
        dtype: As safetensors calls it, for example F16.
        size: Its shape.
    """

    path: Path
    dtype: str
    size: tuple[int, ...]


class Weights:
    """The tensors of a folder by name.

    Attributes:
        path: The one file, or the index of several.
        dtypes: The number formats that tensors had which were read.
    """

    def __init__(self, path: Path, homes: Mapping[str, _File]) -> None:
        """Take which file each tensor is in; see `Weights.open`."""
        self.path = path
        self.dtypes: set[str] = set()
        self._homes = homes
        self._read: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> "Weights":
        """Find a folder's weights, in the order that Transformers looks: safetensors, its shards, `pytorch_model.bin`, its shards.

        Raises:
            ForeignError: If there are none, or they cannot be read; names the file.
        """
        for name, kind in ((SAFETENSORS, _Safetensors), (PICKLED, _Pickled)):
            path = folder / name
            if path.exists() or path.is_symlink():
                _refuse_irregular(path)
                file: _File = kind(path)
                return cls(path, dict.fromkeys(file.names(), file))
            index = folder / f"{name}{INDEX_SUFFIX}"
            if index.exists() or index.is_symlink():
                return cls(index, _shards(index, kind))
        refuse_other_folder(folder)
        others = [name for name in OTHERS if (folder / name).exists()]
        instead = f", only {listed(others)}, which is not read here" if others else ""
        raise ForeignError(f"{folder}: there is neither {SAFETENSORS} nor {PICKLED}{instead}")

    def __contains__(self, name: str) -> bool:
        """Tell whether there is such a tensor."""
        return name in self._homes

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._homes)

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that nobody has taken or passed over."""
        return sorted(self._homes.keys() - self._read)

    def describe(self, name: str) -> Shape:
        """Return what a tensor is."""
        file = self._homes[name]
        return Shape(file.path, *file.describe(name))

    def pass_over(self, name: str) -> None:
        """Count a tensor as read that is not needed."""
        self._read.add(name)

    def are_equal(self, name: str, other: str) -> bool:
        """Tell whether two tensors hold the same numbers; a tensor equals itself."""
        if name == other:
            return True
        first, second = (self.describe(each) for each in (name, other))
        if first.dtype != second.dtype or first.size != second.size or first.dtype not in _DTYPES:
            return False
        tensors = [self._homes[each].read(each) for each in (name, other)]
        return tensors[0].data_ptr() == tensors[1].data_ptr() or torch.equal(*tensors)

    def read(self, name: str) -> Tensor:
        """Return a tensor in single precision; one that has it already is not copied.

        Raises:
            ForeignError: If it is of no kind that weights have, or not all of it are numbers; names its file.
        """
        found = self.describe(name)
        if found.dtype not in _DTYPES:
            raise ForeignError(f"{found.path}: {name} is of type {found.dtype}; weights are {', '.join(_DTYPES)}")
        try:
            tensor = self._homes[name].read(name)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ForeignError(f"{found.path}: {name}: {_reason(error)}") from error
        if tensor.numel():
            low, high = (bound.item() for bound in tensor.aminmax())  # of these NaN is one where there is any
            if not (-torch.inf < low and high < torch.inf):
                raise ForeignError(f"{found.path}: {name} holds {'infinity' if low == low else 'NaN'}, which is no weight")
        self._read.add(name)
        self.dtypes.add(found.dtype)
        return tensor.float().contiguous()


def _refuse_irregular(path: Path) -> None:
    if not path.is_file():
        reason = "a link to nothing" if path.is_symlink() and not path.exists() else "not a regular file"
        raise ForeignError(f"{path}: {reason}")
    refuse_pointer(path)


def _shards(index: Path, kind: Any) -> dict[str, _File]:
    """Open the shards that an index names; each must lie in the folder, and hold what the index says."""
    table = load_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ForeignError(f"{index}: weight_map is missing")
    files: dict[str, _File] = {}
    homes: dict[str, _File] = {}
    for name, shard in ((name.removeprefix(COMPILED), shard) for name, shard in table.items()):
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise ForeignError(f"{index}: {name} is said to be in {shard!r}, which is no file of the folder")
        if shard not in files:
            _refuse_missing(index, name, shard)
            refuse_pointer(index.parent / shard)
            files[shard] = kind(index.parent / shard)
        homes[name] = files[shard]
    for shard, file in files.items():
        held = set(file.names())
        for name in (name for name, home in homes.items() if home is file):
            if name not in held:
                raise ForeignError(f"{index.parent / shard}: {name} is missing, though {index.name} says it is there")
    return homes


def _is_file_name(text: str) -> bool:
    """Tell the name of a file from a path that leads elsewhere."""
    return text not in ("", ".", "..") and not set(text) & set("/\\\0")


def _refuse_missing(index: Path, name: str, shard: str) -> None:
    path = index.parent / shard
    with contextlib.suppress(OSError):
        if path.is_file():
            return
    raise ForeignError(f"{path}: no such file, though {index.name} says that {name} is there")


def listed(names: Iterator[str] | list[str], most: int = 3) -> str:
    """Return names for a message: the first few, and how many more there are."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
