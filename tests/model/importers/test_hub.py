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


class Hub:
    """What the hub says, and what was asked of it."""

    def __init__(self) -> None:
        self.info: Callable[[], Any] = lambda: SimpleNamespace(sha="abc", siblings=[])
        self.cached: Path | None = None
        self.asked: list[tuple[str, Any]] = []

    def model_info(self, name: str, revision: str | None = None) -> Any:
        self.asked.append((name, revision))
        return self.info()

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


def with_files(*names: str) -> Callable[[], Any]:
    return lambda: SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=name) for name in names])


def test_only_what_is_needed_is_fetched_of_the_commit_that_was_listed(hub: Hub) -> None:
    hub.info = with_files("README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx")
    assert fetch("some/model", "v1") == Path("/fetched")
    wanted = ["config.json", "model.safetensors"]
    assert hub.asked == [("some/model", "v1"), ("some/model", {"revision": "abc", "allow_patterns": wanted})]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "rust_model.ot"], ["pytorch_model.bin"]),
        (
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "pytorch_model.bin",
            ],
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "model.onnx"],
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
        ),
        (["tf_model.h5"], []),
    ],
)
def test_weights_are_fetched_in_one_form(weights: list[str], wanted: list[str]) -> None:
    assert needed([*DESCRIPTIONS, "README.md", *weights]) == [*DESCRIPTIONS, *wanted]


def refusal(kind: type[errors.HfHubHTTPError]) -> Callable[[], Any]:
    def refuse() -> Any:
        raise kind("long\nstory", response=SimpleNamespace(headers={}, request=None))

    return refuse


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.RepositoryNotFoundError, "neither a folder nor, to us, a repository of the hub"),
        (errors.GatedRepoError, "an account that has agreed to their terms"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_a_line(kind: Any, reason: str, hub: Hub) -> None:
    hub.info = refusal(kind)
    with pytest.raises(ForeignError, match=f"^some/model: .*{reason}") as caught:
        fetch("some/model", "v9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("no route"), errors.OfflineModeIsEnabled("no route")])
def test_without_a_network_the_cache_is_asked(error: Exception, hub: Hub) -> None:
    def fail() -> Any:
        raise error

    hub.info = fail
    with pytest.raises(ForeignError, match=r"^some/model: no such folder, and the hub cannot be reached: no route$"):
        fetch("some/model")
    hub.cached = Path("/cache")
    assert fetch("some/model", "main") == Path("/cache")


@pytest.mark.parametrize("name", ["t5-small", "Helsinki-NLP/opus-mt-en-de", "a/b.c_d-e"])
def test_names_of_repositories(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", "a/b/c", "/a", "./a", "../a", "a/", "a b", "a/..", "~/a", "https://example.org/a"])
def test_paths_are_no_names(name: str) -> None:
    assert not is_name(name)
