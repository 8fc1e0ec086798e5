"""The folder of models, as a server has to find it."""

from pathlib import Path

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.repository.bundles import find_models
from tests.server.repository.copies import copy


def names(folder: Path) -> list[str]:
    return [model.name for model in find_models(folder)]


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
        find_models(folder)


def test_two_bundles_of_one_model_are_both_named(tiny_bundle: Path, tmp_path: Path) -> None:
    copy(tiny_bundle, tmp_path / "a", "one")
    copy(tiny_bundle, tmp_path / "b", "one")
    with pytest.raises(BundleError, match=r'/a, .*/b: each holds a model named "one"'):
        find_models(tmp_path)
