"""Tensors of a foreign folder, in whatever files, mapped and not copied, without running code; and files fetched from the hub."""

import json
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.hub import fetch, is_name
from dragoman.model.importers.weights import Weights

ONE, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(6, 4), "a.bias": torch.randn(6), "b.weight": torch.randn(2, 3)}


def as_one(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / ONE)


def as_shards(folder: Path, tensors: dict[str, torch.Tensor], save: Any = save_file, index: str = INDEX) -> None:
    stem, kind = ("model", "safetensors") if index == INDEX else ("pytorch_model", "bin")
    homes = {name: f"{stem}-0000{i + 1}-of-00003.{kind}" for i, name in enumerate(tensors)}
    for name, home in homes.items():
        save({name: tensors[name]}, folder / home)
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": homes}))


def as_pickle(folder: Path, tensors: Any, is_archive: bool = True) -> None:
    torch.save(tensors, folder / PICKLE, _use_new_zipfile_serialization=is_archive)


def as_old_pickle(folder: Path, tensors: Any) -> None:
    as_pickle(folder, tensors, is_archive=False)


def as_pickled_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    as_shards(folder, tensors, torch.save, f"{PICKLE}.index.json")


@pytest.mark.parametrize("write", [as_one, as_shards, as_pickle, as_old_pickle, as_pickled_shards])
@pytest.mark.parametrize(
    ("dtype", "name", "prefix"), [(torch.float32, "F32", ""), (torch.float16, "F16", "_orig_mod."), (torch.bfloat16, "BF16", "")]
)
def test_every_form_holds_the_same(
    write: Callable[..., None], dtype: torch.dtype, name: str, prefix: str, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    """Single precision is mapped, not copied; halves are read into single precision. Links of the hub's cache are followed.

    A model that `torch.compile` was asked for has a prefix before its names, which is taken off.
    """
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs", {prefix + key: tensor.to(dtype) for key, tensor in tensors.items()})
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


def test_reading_leaves_the_file_as_it_was_safetensors_come_first_and_tensors_are_compared(tmp_path: Path, tensors: Any) -> None:
    as_one(tmp_path, tensors)
    (tmp_path / PICKLE).write_bytes(b"whatever")
    weights = Weights.open(tmp_path)
    weights.read("a.weight").zero_()
    assert weights.path.name == ONE and torch.equal(load_file(tmp_path / ONE)["a.weight"], tensors["a.weight"])
    (tmp_path / ONE).unlink()
    table = torch.randn(5, 3)
    as_pickle(tmp_path, {"a": table, "b": table, "c": table.clone(), "d": table + 1, "e": table.half(), "f": table[:4]})
    weights = Weights.open(tmp_path)
    assert [weights.are_equal("a", name) for name in "abcdef"] == [True, True, True, False, False, False]


class Code:
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


Tensors = dict[str, torch.Tensor]
Change = Callable[[Path, Tensors], Any]


def of_type(write: Callable[..., None], dtype: torch.dtype) -> Change:
    return lambda folder, tensors: write(folder, tensors | {"a.weight": torch.ones(6, 4).to(dtype)})


def of_number(number: float, dtype: torch.dtype) -> Change:
    return lambda folder, _: as_one(folder, {"a.weight": torch.tensor([[1.0, 2.0], [3.0, number]]).to(dtype)})


def cut_at(name: str, size: int) -> Change:
    def change(folder: Path, tensors: Tensors) -> None:
        (as_one if name == ONE else as_pickle)(folder, tensors)
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return change


def of_bytes(name: str, content: bytes) -> Change:
    return lambda folder, _: (folder / name).write_bytes(content)


def with_shard(name: str, change: Callable[[Path], Any]) -> Change:
    return lambda folder, tensors: (as_shards(folder, tensors), change(folder / name))


SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (2, 3))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:5891b5b522d5df08\nsize 298000000\n"
SHARDS = ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", None, 7, ["x"]]
NO_TABLES: list[Any] = [[torch.ones(2)], {"a": 3}, {5: torch.ones(2)}, {"a": torch.ones(2).to_sparse()}]
GARBAGE = [b"", b"PK\3\4", b"\x80", b"not weights", bytes(4096), b"\xff" * 64]
INDICES = [b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"[", b"[1]", b"[" * 100_000, b"\xff"]
ODD_FILES: list[Callable[[Path], Any]] = [os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)]
REFUSED: list[tuple[Change, str, str]] = [
    (lambda *_: None, "", r"neither model\.safetensors nor pytorch_model\.bin$"),
    (of_bytes("tf_model.h5", b""), "", r"only tf_model\.h5, which is not read here"),
    *((of_type(as_one, torch.int64 if i else torch.float64), ONE, "a.weight is of type [IF]64; weights are F32") for i in (0, 1)),
    (of_type(as_one, torch.float8_e4m3fn), ONE, "a.weight is of type F8_E4M3; weights are F32, F16, BF16$"),
    (of_type(as_pickle, torch.float64), PICKLE, "a.weight is of type float64; weights are F32, F16, BF16$"),
    *((of_number(torch.nan, dtype), ONE, "a.weight holds NaN") for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *((of_number(sign * torch.inf, torch.float16), ONE, "a.weight holds infinity") for sign in (1, -1)),
    *((of_bytes(name, content), name, "") for name in (ONE, PICKLE) for content in GARBAGE),
    *((cut_at(name, size), name, "") for name in (ONE, PICKLE) for size in (9, 100, -1, -40)),
    (with_shard(SECOND, Path.unlink), SECOND, r"no such file, though .*index\.json .* a\.bias"),
    (with_shard(THIRD, lambda path: save_file({"other": torch.ones(1)}, path)), THIRD, r"b\.weight is missing"),
    (with_shard(SECOND, lambda path: path.write_bytes(POINTER)), SECOND, "`git lfs pull`"),
    *((of_bytes(name, POINTER), name, "`git lfs pull`") for name in (ONE, PICKLE)),
    (
        lambda folder, tensors: as_pickle(folder, tensors | {"b.weight": torch.ones(2).to("meta")}),
        PICKLE,
        "b.weight is not a plain",
    ),
    # A few bytes would take terabytes.
    (lambda folder, _: as_pickle(folder, {"a": torch.ones(1).expand(10**6, 10**6)}), PICKLE, "a is not a plain tensor"),
    *((lambda folder, _, content=content: as_pickle(folder, content), PICKLE, "(tensor|code)") for content in NO_TABLES),
    *((of_bytes(INDEX, json.dumps({"weight_map": {"a": to}}).encode()), INDEX, "a is said to be in .*, which") for to in SHARDS),
    *((of_bytes(INDEX, content), INDEX, "") for content in INDICES),
    *((lambda f, _, n=n, m=m: m(f / n), n, "(not a regular file|a link to nothing)") for n in (ONE, PICKLE) for m in ODD_FILES),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_no_table_of_weights_is_refused_in_one_line_that_names_its_file(case: int, tmp_path: Path, tensors: Any) -> None:
    change, file, reason = REFUSED[case]
    change(tmp_path, tensors)
    with pytest.raises(ForeignError, match=f"^{re.escape(str(tmp_path / file))}(: |/).*{reason}") as caught:
        Weights.open(tmp_path).read("a.weight")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 + len(str(tmp_path))


DESCRIPTIONS = ["config.json", "tokenizer_config.json", "source.spm", "vocab.json"]
HUB_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
PICKLED_SHARD, PICKLED_INDEX = "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"


class Hub:
    """A hub with its cache, which records requests."""

    def __init__(self) -> None:
        self.files, self.asked = list[str](), list[tuple[str, Any]]()
        self.error: Exception | None = None
        self.cached: Path | None = None

    def model_info(self, name: str, revision: str | None = None) -> Any:
        self.asked.append((name, revision))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.asked.append((name, options))
        if options.get("local_files_only") and self.cached is None:
            raise errors.LocalEntryNotFoundError("nothing there")
        return str(self.cached or "/fetched")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_only_needed_files_in_one_form_are_fetched_of_the_commit_that_was_listed(hub: Hub) -> None:
    for weights, wanted in (
        ([ONE, PICKLE, "tf_model.h5", "onnx/model.onnx"], [ONE]),
        ([PICKLE, "rust_model.ot"], [PICKLE]),
        ([*HUB_SHARDS, INDEX, PICKLE], [INDEX, *HUB_SHARDS]),
        ([PICKLED_SHARD, PICKLED_INDEX, "model.onnx"], [PICKLED_INDEX, PICKLED_SHARD]),
        (["tf_model.h5"], []),
    ):
        hub.files = [*DESCRIPTIONS, "README.md", *weights]
        assert fetch("some/model", "v1") == Path("/fetched")
        options = {"revision": "abc", "allow_patterns": [*DESCRIPTIONS, *wanted]}
        assert hub.asked[-2:] == [("some/model", "v1"), ("some/model", options)]
    assert all(map(is_name, ["t5-small", "Helsinki-NLP/opus-mt-en-de", "a/b.c_d-e"]))
    paths = ["", "a/b/c", "/a", "./a", "../a", "a/", "a b", "a/..", "~/a", "https://example.org/a"]
    assert [path for path in paths if is_name(path)] == []


ANSWER = SimpleNamespace(headers={}, request=None)
HUB_ERRORS: list[tuple[Callable[..., Exception], str]] = [
    (partial(errors.RepositoryNotFoundError, response=ANSWER), "neither a folder nor, to us, a repository of the hub"),
    (partial(errors.GatedRepoError, response=ANSWER), "an account that has agreed to their terms"),
    (partial(errors.RevisionNotFoundError, response=ANSWER), "no revision 'v9'"),
    *(
        (kind, "no such folder, and the hub cannot be reached: no route")
        for kind in (OSError, RuntimeError, errors.OfflineModeIsEnabled)
    ),
]


@pytest.mark.parametrize(("kind", "reason"), HUB_ERRORS)
def test_a_refusal_of_the_hub_is_a_line_and_without_a_network_the_cache_is_asked(kind: Any, reason: str, hub: Hub) -> None:
    hub.error = kind("no\nroute")
    with pytest.raises(ForeignError, match=f"^some/model: .*{reason}") as caught:
        fetch("some/model", "v9")
    assert "\n" not in str(caught.value)
    if reason.endswith("no route"):
        hub.cached = Path("/cache")
        assert fetch("some/model", "main") == Path("/cache")
