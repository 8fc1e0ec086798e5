"""Models by name."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.core.ports import ServedVersion
from dragoman.server.errors import UnknownModel
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.models import Repository, Route
from tests.server.repository.copies import copy


@pytest.fixture
def repository_of(tiny_bundle: Path, tmp_path: Path) -> Any:
    def make(*models: str) -> Repository:
        bundles = [Bundle.open(copy(tiny_bundle, tmp_path / name, name)) for name in models]
        return Repository(LoadedModel.of(bundle, bundle.manifest.name) for bundle in bundles)  # type: ignore[arg-type]

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


@pytest.fixture
def versions(tiny_bundle: Path, tmp_path: Path) -> list[Any]:
    bundle = Bundle.open(copy(tiny_bundle, tmp_path / "alpha", "alpha"))
    return [LoadedModel.of(bundle, label, label) for label in ("4", "3")]  # type: ignore[arg-type]


def test_versions_that_are_served_are_told_with_labels_and_shares(versions: list[Any]) -> None:
    new, old = versions
    repository: Repository[Any] = Repository()
    labels = {"stable": "3", "canary": "4", "beta": "4"}
    repository.publish("alpha", Route(old, {"4": new, "3": old}, {"4": 0.25, "3": 0.75}, labels))
    assert repository.served("alpha") == [
        ServedVersion("4", new.version, ("beta", "canary"), 0.25, False),
        ServedVersion("3", old.version, ("stable",), 0.75, True),
    ]
    repository.publish("alpha", Route(old, {"4": new, "3": old}))
    assert [(one.share, one.is_default) for one in repository.served("alpha")] == [(0.0, False), (1.0, True)]
    with pytest.raises(UnknownModel):
        repository.served("beta")
