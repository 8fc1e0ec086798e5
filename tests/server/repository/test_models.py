"""Models by name, and which version of each answers which request."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.core.ports import ServedVersion
from dragoman.server.errors import UnknownModel, UnknownVersion
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


def version(label: str, name: str = "en-de") -> Any:
    manifest = SimpleNamespace(name=name, version=f"content-{label}")
    nothing: Any = None
    bundle: Any = SimpleNamespace(manifest=manifest)
    return LoadedModel(bundle, nothing, nothing, label, label)


ONE, TWO = version("1"), version("2")
BOTH = {"1": ONE, "2": TWO}


def routed(route: Route[Any]) -> Repository[Any]:
    repository: Repository[Any] = Repository()
    repository.publish(route.name, route)
    return repository


def held(repository: Repository[Any], *arguments: str, **keywords: str) -> Any:
    async def run() -> Any:
        async with repository.hold(*arguments, **keywords) as model:
            assert model.use.num_held == 1
            return model

    model = asyncio.run(run())
    assert model.use.num_held == 0
    return model


def test_a_request_gets_the_default_or_the_version_that_it_names() -> None:
    repository = routed(Route(TWO, BOTH, {"2": 1.0}, {"stable": "1"}))
    assert [held(repository, "en-de", asked).label for asked in ("", "1", "stable", "content-1", "2")] == ["2", "1", "1", "1", "2"]
    assert repository.get("en-de") is TWO and repository.get("en-de", "stable") is ONE
    assert repository.all() == [TWO] and repository.versions() == [ONE, TWO]
    with pytest.raises(UnknownVersion, match=r"model_version: '3' of model en-de is not served; served: 1 .*stable.*, 2 "):
        held(repository, "en-de", "3")


def test_shares_divide_requests_and_the_same_one_gets_the_same_version() -> None:
    repository = routed(Route(ONE, BOTH, {"1": 0.75, "2": 0.25}))
    answered = {f"request-{number}": held(repository, "en-de", request_id=f"request-{number}").label for number in range(400)}
    assert 70 <= Counter(answered.values())["2"] <= 130
    for request_id in list(answered)[:20]:
        assert held(repository, "en-de", request_id=request_id, caller="anybody").label == answered[request_id]


def test_a_version_with_all_of_the_shares_gets_all_requests_though_another_is_the_default() -> None:
    repository = routed(Route(ONE, BOTH, {"2": 1.0}))
    assert {held(repository, "en-de", request_id=f"request-{number}").label for number in range(20)} == {"2"}


def test_callers_stay_with_a_version_where_the_policy_says_so() -> None:
    repository = routed(Route(ONE, BOTH, {"1": 0.5, "2": 0.5}, sticky="caller"))
    for caller in ("alice", "bob", "carol", "dave", "erin"):
        assert len({held(repository, "en-de", request_id=f"r{number}", caller=caller).label for number in range(20)}) == 1
    assert len({held(repository, "en-de", request_id=f"r{number}").label for number in range(20)}) == 2, "of nobody by its id"


def test_what_is_published_holds_for_requests_that_come_and_not_for_those_that_run() -> None:
    repository = routed(Route.to(ONE))

    async def run() -> None:
        async with repository.hold("en-de") as before:
            repository.publish("en-de", Route.to(TWO))
            async with repository.hold("en-de") as after:
                assert (before, after) == (ONE, TWO)
            waiting = asyncio.create_task(ONE.use.until_free())
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting

    asyncio.run(run())


def test_a_version_is_chosen_when_it_is_entered_not_when_it_is_asked_for() -> None:
    repository = routed(Route.to(ONE))
    asked = repository.hold("en-de")
    repository.publish("en-de", Route.to(TWO))

    async def run() -> None:
        async with asked as model:
            assert model is TWO

    asyncio.run(run())


def test_a_model_that_is_taken_away_is_unknown() -> None:
    repository = routed(Route.to(ONE))
    route = repository.find("en-de")
    assert route is not None and route.default is ONE
    repository.publish("en-de", None)
    repository.publish("never-there", None)
    assert repository.find("en-de") is None and repository.all() == []
    with pytest.raises(UnknownModel, match="loaded: none"):
        held(repository, "en-de")
