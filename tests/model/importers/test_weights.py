"""Tensors of a foreign folder, in whatever files: the same numbers, mapped and not copied; nothing that runs code, or lies."""

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


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(6, 4), "a.bias": torch.randn(6), "b.weight": torch.randn(2, 3)}


def as_one(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def as_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    homes = {name: f"model-0000{i + 1}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for name, home in homes.items():
        save_file({name: tensors[name]}, folder / home)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": homes}))


def as_pickle(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def as_old_pickle(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_pickled_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    homes = {name: f"pytorch_model-{i}.bin" for i, name in enumerate(tensors)}
    for name, home in homes.items():
        torch.save({name: tensors[name]}, folder / home)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))


FORMS = (as_one, as_shards, as_pickle, as_old_pickle, as_pickled_shards)


@pytest.mark.parametrize("write", FORMS)
def test_every_form_holds_the_same(write: Callable[..., None], tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write(tmp_path, tensors)
    weights = Weights.open(tmp_path)
    assert len(weights) == 3
    assert weights.describe("a.weight").size == (6, 4)
    for name, tensor in tensors.items():
        assert weights.unread
        assert torch.equal(weights.read(name), tensor)
    assert (weights.unread, weights.dtypes) == ([], {"F32"})


@pytest.mark.parametrize("write", [as_one, as_shards, as_pickle, as_pickled_shards])
def test_single_precision_is_mapped_not_copied(
    write: Callable[..., None], tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write(tmp_path, tensors)
    read = [Weights.open(tmp_path).read(name) for name in tensors]
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    spans = [(int(start, 16), int(end, 16)) for start, end in maps]
    assert all(any(start <= tensor.data_ptr() < end for start, end in spans) for tensor in read)


@pytest.mark.parametrize("write", [as_one, as_pickle])
@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_halves_are_read_into_single_precision(
    write: Callable[..., None], dtype: torch.dtype, name: str, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write(tmp_path, {key: tensor.to(dtype) for key, tensor in tensors.items()})
    weights = Weights.open(tmp_path)
    for key, tensor in tensors.items():
        read = weights.read(key)
        assert read.dtype == torch.float32
        assert torch.equal(read, tensor.to(dtype).float())
    assert weights.dtypes == {name}


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
def test_what_is_no_number_is_named(number: float, name: str, dtype: torch.dtype, tmp_path: Path, tensors: Any) -> None:
    tensors["a.weight"][3, 2] = number
    as_one(tmp_path, {key: tensor.to(dtype) for key, tensor in tensors.items()})
    with pytest.raises(ForeignError, match=rf"model\.safetensors: a\.weight holds {name}"):
        Weights.open(tmp_path).read("a.weight")


class Code:
    """What a hostile file would have us run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_archive", [True, False])
def test_pickled_code_is_named_and_never_run(is_archive: bool, tmp_path: Path, tensors: Any) -> None:
    mark = tmp_path / "it-ran"
    torch.save(tensors | {"c": Code(mark)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    with pytest.raises(ForeignError, match=r"pytorch_model\.bin: holds pickled code( \(\w+\.mkdir\))?, which is never run$"):
        Weights.open(tmp_path)
    assert not mark.exists()


def test_a_bare_pickle_is_not_run_either(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Code(mark)))
    with pytest.raises(ForeignError, match=r"pytorch_model\.bin: "):
        Weights.open(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x80", b"not weights", bytes(4096), b"\xff" * 64])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ForeignError, match=f"^{re.escape(str(tmp_path / name))}: ") as caught:
        Weights.open(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize("cut", [9, 100, -1, -40])
@pytest.mark.parametrize("write", [as_one, as_pickle])
def test_a_truncated_file_is_named(write: Callable[..., None], cut: int, tmp_path: Path, tensors: Any) -> None:
    write(tmp_path, tensors)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ForeignError, match=f"^{re.escape(str(path))}: "):
        Weights.open(tmp_path)


def test_a_tensor_that_repeats_one_number_is_refused(tmp_path: Path) -> None:
    """A few bytes would take terabytes."""
    torch.save({"a": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ForeignError, match=r"pytorch_model\.bin: a is not a plain tensor"):
        Weights.open(tmp_path)


@pytest.mark.parametrize("content", [[torch.ones(2)], {"a": 3}, {5: torch.ones(2)}, {"a": torch.ones(2).to_sparse()}])
def test_what_is_no_table_of_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ForeignError, match=r"pytorch_model\.bin: .*(tensor|code)"):
        Weights.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path, tensors: Any) -> None:
    as_shards(tmp_path, tensors)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    expected = r"model-00002-of-00003\.safetensors: no such file, though model\.safetensors\.index\.json says that a\.bias is there"
    with pytest.raises(ForeignError, match=expected):
        Weights.open(tmp_path)


@pytest.mark.parametrize("shard", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", None, 7, ["x"]])
def test_an_index_that_leads_out_of_the_folder_is_refused(shard: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ForeignError, match=r"index\.json: a is said to be in .*, which is no file of the folder"):
        Weights.open(tmp_path)


@pytest.mark.parametrize("said", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[", "[1]", "[" * 100_000, "\xff"])
def test_an_index_that_is_none_is_refused(said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(said, encoding="latin-1")
    with pytest.raises(ForeignError, match=f"^{re.escape(str(path))}: "):
        Weights.open(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path, tensors: Any) -> None:
    as_shards(tmp_path, tensors)
    save_file({"other": torch.ones(1)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(ForeignError, match=r"model-00003-of-00003\.safetensors: b\.weight is missing"):
        Weights.open(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    for place, make in (("folder", os.mkdir), ("pipe", os.mkfifo), ("link", lambda path: os.symlink("nowhere", path))):
        (tmp_path / place).mkdir()
        make(tmp_path / place / name)
        with pytest.raises(ForeignError, match=rf"{name}: (not a regular file|a link to nothing)"):
            Weights.open(tmp_path / place)


def test_links_of_a_cache_are_followed(tmp_path: Path, tensors: Any) -> None:
    """The hub's cache has links where one expects files."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    as_shards(tmp_path / "blobs", tensors)
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    weights = Weights.open(tmp_path / "snapshot")
    assert all(torch.equal(weights.read(name), tensor) for name, tensor in tensors.items())


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=r"neither model\.safetensors nor pytorch_model\.bin$"):
        Weights.open(tmp_path)
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(ForeignError, match=r"only tf_model\.h5, which is not read here"):
        Weights.open(tmp_path)


def test_safetensors_come_before_pickles(tmp_path: Path, tensors: Any) -> None:
    as_one(tmp_path, tensors)
    (tmp_path / "pytorch_model.bin").write_bytes(b"whatever")
    assert Weights.open(tmp_path).path.name == "model.safetensors"


def test_tensors_are_compared_as_they_are_kept(tmp_path: Path) -> None:
    table = torch.randn(5, 3)
    torch.save(
        {"a": table, "b": table, "c": table.clone(), "d": table + 1, "e": table.half(), "f": table[:4]},
        tmp_path / "pytorch_model.bin",
    )
    weights = Weights.open(tmp_path)
    assert [weights.are_equal("a", name) for name in "abcdef"] == [True, True, True, False, False, False]


def test_a_zip_bomb_of_no_tensors_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    with pytest.raises(ForeignError, match=r"pytorch_model\.bin: "):
        Weights.open(tmp_path)


def test_reading_leaves_the_file_as_it_was(tmp_path: Path, tensors: Any) -> None:
    as_one(tmp_path, tensors)
    Weights.open(tmp_path).read("a.weight").zero_()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a.weight"], tensors["a.weight"])
