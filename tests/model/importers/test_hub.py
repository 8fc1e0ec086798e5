"""Names of repositories, with a hub that is made up: there is no network in a test."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.hub import fetch, is_name, needed

DESCRIPTIONS = ["config.json", "tokenizer_config.json", "source.spm", "vocab.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
PICKLED_SHARD, PICKLED_INDEX = "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"


class Hub:
    """A hub with its cache, which records requests."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.error: Exception | None = None
        self.cached: Path | None = None
        self.asked: list[tuple[str, Any]] = []

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


def test_only_needed_files_are_fetched_of_the_commit_that_was_listed(hub: Hub) -> None:
    hub.files = ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"]
    assert fetch("some/model", "v1") == Path("/fetched")
    wanted = ["config.json", "model.safetensors"]
    assert hub.asked == [("some/model", "v1"), ("some/model", {"revision": "abc", "allow_patterns": wanted})]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "rust_model.ot"], ["pytorch_model.bin"]),
        ([*SHARDS, "model.safetensors.index.json", "pytorch_model.bin"], ["model.safetensors.index.json", *SHARDS]),
        ([PICKLED_SHARD, PICKLED_INDEX, "model.onnx"], [PICKLED_INDEX, PICKLED_SHARD]),
        (["tf_model.h5"], []),
    ],
)
def test_weights_are_fetched_in_one_form(weights: list[str], wanted: list[str]) -> None:
    assert needed([*DESCRIPTIONS, "README.md", *weights]) == [*DESCRIPTIONS, *wanted]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.RepositoryNotFoundError, "neither a folder nor, to us, a repository of the hub"),
        (errors.GatedRepoError, "an account that has agreed to their terms"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
    ],
)
def test_a_refusal_of_the_hub_is_a_line(kind: Callable[..., Exception], reason: str, hub: Hub) -> None:
    hub.error = kind("long\nstory", response=SimpleNamespace(headers={}, request=None))
    with pytest.raises(ForeignError, match=f"^some/model: .*{reason}") as caught:
        fetch("some/model", "v9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("no route"), errors.OfflineModeIsEnabled("no route")])
def test_without_a_network_the_cache_is_asked(error: Exception, hub: Hub) -> None:
    hub.error = error
    with pytest.raises(ForeignError, match=r"^some/model: no such folder, and the hub cannot be reached: no route$"):
        fetch("some/model")
    hub.cached = Path("/cache")
    assert fetch("some/model", "main") == Path("/cache")


def test_paths_are_no_names_of_repositories() -> None:
    assert all(map(is_name, ["t5-small", "Helsinki-NLP/opus-mt-en-de", "a/b.c_d-e"]))
    paths = ["", "a/b/c", "/a", "./a", "../a", "a/", "a b", "a/..", "~/a", "https://example.org/a"]
    assert [path for path in paths if is_name(path)] == []
