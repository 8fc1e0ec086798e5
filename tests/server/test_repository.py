"""Bundles on disk, and models by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.errors import UnknownModel
from dragoman.server.repository import Repository, find_bundles


def copy(bundle: Path, to: Path, name: str) -> Path:
    """Copy a bundle under another model's name."""
    shutil.copytree(bundle, to)
    manifest = to / "bundle.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": name}))
    return to


def names(folder: Path) -> list[str]:
    return [bundle.manifest.name for bundle in find_bundles(folder)]


def test_a_bundle_itself_will_do(tiny_bundle: Path) -> None:
    assert names(tiny_bundle) == ["tiny"]


def test_bundles_come_in_the_order_of_their_models_names(tiny_bundle: Path, tmp_path: Path) -> None:
    copy(tiny_bundle, tmp_path / "1", "zeta")
    copy(tiny_bundle, tmp_path / "2", "alpha")
    assert names(tmp_path) == ["alpha", "zeta"]


def test_what_is_no_bundle_is_left_alone(tiny_bundle: Path, tmp_path: Path) -> None:
    copy(tiny_bundle, tmp_path / "one", "one")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "README").write_text("bundles live here")
    copy(tiny_bundle, tmp_path / ".one.half-copied", "one")
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize("which", ["missing", "a file", "empty"])
def test_a_folder_without_bundles_is_named(tmp_path: Path, which: str) -> None:
    folder = tmp_path / "models"
    if which == "a file":
        folder.write_text("")
    elif which == "empty":
        folder.mkdir()
    with pytest.raises(BundleError, match=str(folder)):
        find_bundles(folder)


def test_two_bundles_of_one_model_are_both_named(tiny_bundle: Path, tmp_path: Path) -> None:
    copy(tiny_bundle, tmp_path / "a", "one")
    copy(tiny_bundle, tmp_path / "b", "one")
    with pytest.raises(BundleError, match=r"/b and .*/a both hold a model named 'one'"):
        find_bundles(tmp_path)


def test_one_damaged_bundle_stops_all(tiny_bundle: Path, tmp_path: Path) -> None:
    copy(tiny_bundle, tmp_path / "a", "a")
    (copy(tiny_bundle, tmp_path / "b", "b") / "encoder.weights").write_bytes(b"")
    with pytest.raises(BundleError, match=r"b/encoder\.weights"):
        find_bundles(tmp_path)


@pytest.fixture
def repository_of(tiny_bundle: Path, tmp_path: Path) -> Any:
    def make(*models: str) -> Repository:
        bundles = [Bundle.open(copy(tiny_bundle, tmp_path / name, name)) for name in models]
        return Repository(bundles, lambda bundle: bundle.manifest.name)  # type: ignore[arg-type,return-value]

    return make


def test_models_are_found_by_name_each_with_its_own_engine(repository_of: Any) -> None:
    repository = repository_of("alpha", "beta")
    assert [(model.name, model.engine) for model in repository.all()] == [("alpha", "alpha"), ("beta", "beta")]
    model = repository.get("beta")
    assert (model.name, model.version, model.engine) == ("beta", model.manifest.version, "beta")
    assert model.tokenizers.target.decode(model.tokenizers.source.encode("a dog runs")) == "a dog runs"


def test_no_name_means_the_only_model(repository_of: Any) -> None:
    assert repository_of("alpha").get("").name == "alpha"


def test_an_unknown_name_is_answered_with_the_known_ones(repository_of: Any) -> None:
    repository = repository_of("beta", "gamma")
    for name in ("", "alpha", "BETA"):
        with pytest.raises(UnknownModel, match="beta, gamma"):
            repository.get(name)
