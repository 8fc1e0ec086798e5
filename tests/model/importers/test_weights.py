"""Tensors of a foreign folder, in whatever files: the same numbers, mapped and not copied; no file runs code, or lies."""

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.weights import Weights

ONE, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(6, 4), "a.bias": torch.randn(6), "b.weight": torch.randn(2, 3)}


def as_one(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / ONE)


def as_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    homes = {name: f"model-0000{i + 1}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for name, home in homes.items():
        save_file({name: tensors[name]}, folder / home)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": homes}))


def as_pickle(folder: Path, tensors: Any, is_archive: bool = True) -> None:
    torch.save(tensors, folder / PICKLE, _use_new_zipfile_serialization=is_archive)


def as_old_pickle(folder: Path, tensors: Any) -> None:
    as_pickle(folder, tensors, is_archive=False)


def as_pickled_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    homes = {name: f"pytorch_model-{i}.bin" for i, name in enumerate(tensors)}
    for name, home in homes.items():
        torch.save({name: tensors[name]}, folder / home)
    (folder / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": homes}))


@pytest.mark.parametrize("write", [as_one, as_shards, as_pickle, as_old_pickle, as_pickled_shards])
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_every_form_holds_the_same(
    write: Callable[..., None], dtype: torch.dtype, name: str, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    """Single precision is mapped, not copied; halves are read into single precision. Links of the hub's cache are followed."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs", {key: tensor.to(dtype) for key, tensor in tensors.items()})
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    weights = Weights.open(tmp_path / "snapshot")
    assert len(weights) == 3 and weights.describe("a.weight").size == (6, 4)
    read = {}
    for key, tensor in tensors.items():
        assert weights.unread
        read[key] = weights.read(key)
        assert read[key].dtype == torch.float32 and torch.equal(read[key], tensor.to(dtype).float())
    assert (weights.unread, weights.dtypes) == ([], {name})
    if dtype == torch.float32 and write is not as_old_pickle:
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        spans = [(int(start, 16), int(end, 16)) for start, end in maps]
        assert all(any(start <= tensor.data_ptr() < end for start, end in spans) for tensor in read.values())


def test_reading_leaves_the_file_as_it_was_and_safetensors_come_first(tmp_path: Path, tensors: Any) -> None:
    as_one(tmp_path, tensors)
    (tmp_path / PICKLE).write_bytes(b"whatever")
    weights = Weights.open(tmp_path)
    weights.read("a.weight").zero_()
    assert weights.path.name == ONE and torch.equal(load_file(tmp_path / ONE)["a.weight"], tensors["a.weight"])


def test_tensors_are_compared_as_they_are_kept(tmp_path: Path) -> None:
    table = torch.randn(5, 3)
    as_pickle(tmp_path, {"a": table, "b": table, "c": table.clone(), "d": table + 1, "e": table.half(), "f": table[:4]})
    weights = Weights.open(tmp_path)
    assert [weights.are_equal("a", name) for name in "abcdef"] == [True, True, True, False, False, False]


@pytest.mark.parametrize("write", [as_one, as_pickle])
@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.int64, "I64|int64"), (torch.float64, "F64|float64"), (torch.float8_e4m3fn, "F8_E4M3|float8_e4m3fn")]
)
def test_other_numbers_are_no_weights(
    write: Callable[..., None], dtype: torch.dtype, said: str, tmp_path: Path, tensors: Any
) -> None:
    write(tmp_path, tensors | {"a.weight": torch.ones(6, 4).to(dtype)})
    with pytest.raises(ForeignError, match=rf"(safetensors|bin): a\.weight is of type ({said}); weights are F32, F16, BF16$"):
        Weights.open(tmp_path).read("a.weight")


@pytest.mark.parametrize(("number", "name"), [(torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_that_is_no_number_is_named(number: float, name: str, dtype: torch.dtype, tmp_path: Path, tensors: Any) -> None:
    tensors["a.weight"][3, 2] = number
    as_one(tmp_path, {key: tensor.to(dtype) for key, tensor in tensors.items()})
    with pytest.raises(ForeignError, match=rf"model\.safetensors: a\.weight holds {name}"):
        Weights.open(tmp_path).read("a.weight")


class Code:
    """The code of a hostile file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickled_code_is_named_and_never_run(tmp_path: Path, tensors: Any) -> None:
    mark = tmp_path / "it-ran"
    for is_archive in (True, False):
        as_pickle(tmp_path, tensors | {"c": Code(mark)}, is_archive)
        with pytest.raises(ForeignError, match=r"pytorch_model\.bin: holds pickled code( \(\w+\.mkdir\))?, which is never run$"):
            Weights.open(tmp_path)
    (tmp_path / PICKLE).write_bytes(pickle.dumps(Code(mark)))
    with pytest.raises(ForeignError, match=r"pytorch_model\.bin: "):
        Weights.open(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x80", b"not weights", bytes(4096), b"\xff" * 64, 9, 100, -1, -40, "zip"])
@pytest.mark.parametrize("name", [ONE, PICKLE])
def test_a_damaged_file_is_named_in_one_line(name: str, content: bytes | int | str, tmp_path: Path, tensors: Any) -> None:
    """Garbage, a file that is cut, and an archive of zeros instead of tensors."""
    path = tmp_path / name
    if isinstance(content, int):
        (as_one if name == ONE else as_pickle)(tmp_path, tensors)
        path.write_bytes(path.read_bytes()[:content])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(10**6))
    with pytest.raises(ForeignError, match=f"^{re.escape(str(path))}: ") as caught:
        Weights.open(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": torch.ones(1).expand(10**6, 10**6)}, "a is not a plain tensor"),  # a few bytes would take terabytes
        ([torch.ones(2)], "(tensor|code)"),
        ({"a": 3}, "(tensor|code)"),
        ({5: torch.ones(2)}, "(tensor|code)"),
        ({"a": torch.ones(2).to_sparse()}, "(tensor|code)"),
    ],
)
def test_a_pickle_without_a_table_of_tensors_is_refused(content: Any, said: str, tmp_path: Path) -> None:
    as_pickle(tmp_path, content)
    with pytest.raises(ForeignError, match=rf"pytorch_model\.bin: .*{said}"):
        Weights.open(tmp_path)


def test_a_shard_that_is_missing_or_lacks_a_tensor_is_named(tmp_path: Path, tensors: Any) -> None:
    as_shards(tmp_path, tensors)
    save_file({"other": torch.ones(1)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(ForeignError, match=r"model-00003-of-00003\.safetensors: b\.weight is missing"):
        Weights.open(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ForeignError, match=r"model-00002-of-00003\.safetensors: no such file, though .*index\.json .* a\.bias"):
        Weights.open(tmp_path)


@pytest.mark.parametrize("shard", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", None, 7, ["x"]])
def test_an_index_that_leads_out_of_the_folder_is_refused(shard: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ForeignError, match=r"index\.json: a is said to be in .*, which is no file of the folder"):
        Weights.open(tmp_path)


@pytest.mark.parametrize("said", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[", "[1]", "[" * 100_000, "\xff"])
def test_an_index_that_is_none_is_refused(said: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(said, encoding="latin-1")
    with pytest.raises(ForeignError, match=f"^{re.escape(str(tmp_path / INDEX))}: "):
        Weights.open(tmp_path)


@pytest.mark.parametrize("name", [ONE, PICKLE])
def test_weights_must_be_a_file(name: str, tmp_path: Path) -> None:
    for place, make in (("folder", os.mkdir), ("pipe", os.mkfifo), ("link", lambda path: os.symlink("nowhere", path))):
        (tmp_path / place).mkdir()
        make(tmp_path / place / name)
        with pytest.raises(ForeignError, match=rf"{name}: (not a regular file|a link to nothing)"):
            Weights.open(tmp_path / place)


def test_a_folder_without_weights_names_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=r"neither model\.safetensors nor pytorch_model\.bin$"):
        Weights.open(tmp_path)
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(ForeignError, match=r"only tf_model\.h5, which is not read here"):
        Weights.open(tmp_path)
