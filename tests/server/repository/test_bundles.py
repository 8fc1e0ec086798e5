"""Bundles on disk."""

from pathlib import Path

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.repository.bundles import find_bundles
from tests.server.repository.copies import copy


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
