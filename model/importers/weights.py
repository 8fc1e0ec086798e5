"""A foreign folder: its settings, and its tensors, mapped into memory, read one at a time, never unpickled as code."""

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dragoman.model.importers.files import (
    INDEX_SUFFIX,
    PICKLED,
    SAFETENSORS,
    ForeignError,
    Settings,
    is_empty,
    listed,
    load_object,
    refuse_other_folder,
    refuse_pointer,
    words,
)

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
# Refused wherever it has a value: the field of config.json, and why.
_UNSUPPORTED: Final = {
    "auto_map": "it needs code of its own (trust_remote_code), which is never run",
    "quantization_config": "its weights are quantised; import the model they were made from",
    **dict.fromkeys(words("num_experts num_local_experts encoder_sparse_step decoder_sparse_step"), "a mixture of experts"),
    "pruned_heads": "heads were taken out of some of its layers",
    "tie_encoder_decoder": "encoder and decoder share layers",
}
# Number formats that are read, each into single precision.
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_COMPILED: Final = "_orig_mod."  # taken off: before the names of a model that went through `torch.compile`
# Weights of other libraries, named in a refusal.
_OTHERS: Final = ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.npz", "model.ckpt.index")
_FORBIDDEN_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


class Shape(NamedTuple):
    """A tensor before it is read: its file, its number format as safetensors calls it (F16), its shape."""

    path: Path
    dtype: str
    size: tuple[int, ...]


class _Safetensors:
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, "pt")
        except (OSError, SafetensorError, ValueError) as error:
            raise ForeignError(f"{path}: {_reason(error)}") from error
        self.names: dict[str, str] = {name.removeprefix(_COMPILED): name for name in list(self._file.keys())}  # type: ignore[no-untyped-call]

    def describe(self, name: str) -> Shape:
        part = self._file.get_slice(self.names[name])
        return Shape(self.path, part.get_dtype(), tuple(part.get_shape()))

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self.names[name])
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
        self.names: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ForeignError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
            # One that repeats few numbers many times would take memory that the file does not have.
            is_plain = tensor.layout == torch.strided and not tensor.is_meta
            if not is_plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise ForeignError(f"{path}: {name} is not a plain tensor")
            self.names[name.removeprefix(_COMPILED)] = tensor.detach()

    def describe(self, name: str) -> Shape:
        tensor = self.names[name]
        return Shape(self.path, _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape))

    def read(self, name: str) -> Tensor:
        return self.names[name]


_File = _Safetensors | _Pickled


def _reason(error: Exception) -> str:
    """Return why a file of tensors cannot be read, in one sentence."""
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = str(error).strip()
    if "weights_only" in message or "Weights only" in message:
        found = _FORBIDDEN_GLOBAL.search(message)
        return f"holds pickled code{f' ({found[1]})' if found else ''}, which is never run"
    first = message.splitlines()[0] if message else type(error).__name__
    return first if len(first) < 300 else f"{first[:300]}..."


class Weights:
    """Tensors of a folder by name; `path` is the one file, or the index of several."""

    def __init__(self, path: Path, homes: Mapping[str, _File]) -> None:
        """Take the file of each tensor; see `Weights.open`."""
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
        kinds: tuple[tuple[str, type[_File]], ...] = ((SAFETENSORS, _Safetensors), (PICKLED, _Pickled))
        for name, kind in kinds:
            path, index = folder / name, folder / f"{name}{INDEX_SUFFIX}"
            if os.path.lexists(path):
                if not path.is_file():
                    is_dangling = path.is_symlink() and not path.exists()
                    raise ForeignError(f"{path}: {'a link to nothing' if is_dangling else 'not a regular file'}")
                refuse_pointer(path)
                file = kind(path)
                return cls(path, dict.fromkeys(file.names, file))
            if os.path.lexists(index):
                return cls(index, _shards(index, kind))
        refuse_other_folder(folder)
        others = [name for name in _OTHERS if (folder / name).exists()]
        instead = f", only {listed(others)}, which is not read here" if others else ""
        raise ForeignError(f"{folder}: there is neither {SAFETENSORS} nor {PICKLED}{instead}")

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return name in self._homes

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._homes)

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that have been neither read nor passed over."""
        return sorted(self._homes.keys() - self._read)

    def describe(self, name: str) -> Shape:
        """Return a tensor's file, number format and shape."""
        return self._homes[name].describe(name)

    def pass_over(self, name: str) -> None:
        """Count a tensor as read that is not needed."""
        self._read.add(name)

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors hold the same numbers; a tensor equals itself."""
        if name == other:
            return True
        first, second = self.describe(name), self.describe(other)
        if first[1:] != second[1:] or first.dtype not in _DTYPES:
            return False
        tensors = [self._homes[each].read(each) for each in (name, other)]
        return tensors[0].data_ptr() == tensors[1].data_ptr() or torch.equal(*tensors)

    def read(self, name: str) -> Tensor:
        """Return a tensor in single precision; one that has it already is not copied."""
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


def _shards(index: Path, kind: type[_File]) -> dict[str, _File]:
    """Open the shards that an index names; each must lie in the folder, and hold the tensors that the index says."""
    table = load_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ForeignError(f"{index}: weight_map is missing")
    files: dict[str, _File] = {}
    homes: dict[str, _File] = {}
    for name, shard in ((name.removeprefix(_COMPILED), shard) for name, shard in table.items()):
        if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\\0"):
            raise ForeignError(f"{index}: {name} is said to be in {shard!r}, which is no file of the folder")
        path = index.parent / shard
        if shard not in files:
            if not os.path.isfile(path):
                raise ForeignError(f"{path}: no such file, though {index.name} says that {name} is there")
            refuse_pointer(path)
            files[shard] = kind(path)
        homes[name] = files[shard]
    for name, file in homes.items():
        if name not in file.names:
            raise ForeignError(f"{file.path}: {name} is missing, though {index.name} says it is there")
    return homes


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest source and answer, tokens around them included, that the user asks for; None for those of the checkpoint."""

    max_source_tokens: int | None = None
    max_target_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """A folder of another library: its path, three JSON files, of which the last two may have no fields, and its tensors."""

    path: Path
    config: Settings
    generation: Settings
    tokenizer: Settings
    weights: Weights

    @property
    def is_of_bytes(self) -> bool:
        """Whether its tokens are bytes: ByT5."""
        stated = self.tokenizer.find("tokenizer_class", str) or self.config.find("tokenizer_class", str)
        return stated == "ByT5Tokenizer"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a folder's settings, and find its weights; none is read yet.

        Raises:
            ForeignError: Naming the file, and what is missing, damaged or not supported.
        """
        config = _read_config(path)
        generation = Settings.load(path / "generation_config.json", is_required=False)
        tokenizer = Settings.load(path / TOKENIZER_CONFIG, is_required=False)
        return cls(path, config, generation, tokenizer, Weights.open(path))


def _read_config(path: Path) -> Settings:
    """Read a folder's `config.json`; refuse fields that no family here has."""
    if not path.is_dir():
        raise ForeignError(f"{path}: {'not a directory' if path.exists() else 'No such file or directory'}")
    if (path / "adapter_config.json").exists():
        raise ForeignError(
            f"{path / 'adapter_config.json'}: an adapter; merge it into its model (merge_and_unload), and import that"
        )
    if not os.path.lexists(path / "config.json"):
        refuse_other_folder(path)
    config = Settings.load(path / "config.json")
    if "model_type" not in config.fields:
        refuse_other_folder(path)
        if "format_version" in config.fields:
            raise ForeignError(f"{config.path}: a checkpoint of ours already; export it as it is")
    for name, reason in _UNSUPPORTED.items():
        if not is_empty(config.take(name)):
            raise ForeignError(f"{config.path}: {name}: {reason}")
    if config.find("is_encoder_decoder", bool) is False:
        raise ForeignError(f"{config.path}: is_encoder_decoder is false: a model without an encoder, or without a decoder")
    if config.find("is_decoder", bool):
        raise ForeignError(f"{config.path}: is_decoder is true: a decoder without its encoder")
    return config
