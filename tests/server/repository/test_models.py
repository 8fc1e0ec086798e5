"""Models by name, the version of each that answers a request, and the requests that hold a version."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.export.bundle import Bundle
from dragoman.server import errors
from dragoman.server.core.ports import ServedVersion
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.models import Repository, Route
from dragoman.server.repository.use import Held, Outcomes, Use
from tests.server.repository.copies import copy


def version(label: str, name: str = "en-de") -> Any:
    nothing: Any = None
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(name=name, version=f"content-{label}"))
    return LoadedModel(bundle, nothing, nothing, label, label)


ONE, TWO = version("1"), version("2")
BOTH = {"1": ONE, "2": TWO}


def routed(route: Route[Any]) -> Repository[Any]:
    repository: Repository[Any] = Repository()
    repository.publish(route.name, route)
    return repository


async def held(repository: Repository[Any], *arguments: str, **keywords: str) -> Any:
    async with repository.hold(*arguments, **keywords) as model:
        assert model.use.num_held == 1
    assert model.use.num_held == 0
    return model


async def labels(repository: Repository[Any], number: int, caller: str = "") -> list[str]:
    return [(await held(repository, "en-de", request_id=f"request-{i}", caller=caller)).label for i in range(number)]


def test_models_are_found_by_name(tiny_bundle: Path, tmp_path: Path) -> None:
    bundles = [Bundle.open(copy(tiny_bundle, tmp_path / name, name)) for name in ("alpha", "beta")]
    repository: Repository[Any] = Repository(LoadedModel.of(bundle, bundle.manifest.name) for bundle in bundles)  # type: ignore[arg-type]
    assert [(model.name, model.engine) for model in repository.all()] == [("alpha", "alpha"), ("beta", "beta")]
    model = repository.get("beta")
    assert (model.name, model.version, model.engine) == ("beta", bundles[1].manifest.version, "beta")
    assert model.tokenizers.target.decode(model.tokenizers.source.encode("a dog runs")) == "a dog runs"
    for name in ("", "gamma", "BETA"):
        with pytest.raises(errors.UnknownModel, match="alpha, beta"):
            repository.get(name)
    repository.publish("beta", None)
    repository.publish("never-there", None)
    assert repository.get("").name == "alpha", "the only one needs no name"
    assert repository.find("beta") is None and len(repository.all()) == 1
    repository.publish("alpha", None)
    with pytest.raises(errors.UnknownModel, match="loaded: none"):
        repository.get("alpha")


def test_served_versions_have_labels_and_shares() -> None:
    repository = routed(Route(ONE, {"2": TWO, "1": ONE}, {"2": 0.25, "1": 0.75}, {"stable": "1", "canary": "2", "beta": "2"}))
    assert repository.served("en-de") == [
        ServedVersion("2", "content-2", ("beta", "canary"), 0.25, False),
        ServedVersion("1", "content-1", ("stable",), 0.75, True),
    ]
    repository.publish("en-de", Route(ONE, {"2": TWO, "1": ONE}))
    assert [(one.share, one.is_default) for one in repository.served("en-de")] == [(0.0, False), (1.0, True)]
    with pytest.raises(errors.UnknownModel):
        repository.served("beta")


async def test_request_gets_the_default_or_the_version_that_it_names() -> None:
    repository = routed(Route(TWO, BOTH, {"2": 1.0}, {"stable": "1"}))
    asked = {"": "2", "1": "1", "stable": "1", "content-1": "1", "2": "2"}
    assert {name: (await held(repository, "en-de", name)).label for name in asked} == asked
    assert repository.get("en-de") is TWO and repository.get("en-de", "stable") is ONE
    assert repository.all() == [TWO] and repository.versions() == [ONE, TWO]
    with pytest.raises(errors.UnknownVersion, match=r"model_version: '3' of model en-de is not served; served: 1 .*stable.*, 2 "):
        await held(repository, "en-de", "3")


async def test_shares_divide_requests_by_their_id_or_their_caller() -> None:
    repository = routed(Route(ONE, BOTH, {"1": 0.75, "2": 0.25}))
    answered = await labels(repository, 400)
    assert 70 <= Counter(answered)["2"] <= 130
    assert answered[:20] == await labels(repository, 20, "alice")
    assert set(await labels(routed(Route(ONE, BOTH, {"2": 1.0})), 20)) == {"2"}, "though another is the default"
    sticky = routed(Route(ONE, BOTH, {"1": 0.5, "2": 0.5}, sticky="caller"))
    for caller in ("alice", "bob", "carol", "dave", "erin"):
        assert len(set(await labels(sticky, 20, caller))) == 1
    assert len(set(await labels(sticky, 20))) == 2, "requests without a caller by their id"


async def test_version_is_chosen_when_it_is_entered_and_held_until_it_is_left() -> None:
    repository = routed(Route.to(ONE))
    asked = repository.hold("en-de")
    async with repository.hold("en-de") as before:
        repository.publish("en-de", Route.to(TWO))
        async with asked as after:
            assert (before, after) == (ONE, TWO)
        waiting = asyncio.create_task(ONE.use.until_free())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_version_is_free_once_no_request_holds_it() -> None:
    use = Use()
    await use.until_free()
    use.take()
    use.take()
    waiting = asyncio.create_task(use.until_free())
    use.leave(1.0, None)
    await asyncio.sleep(0)
    assert use.num_held == 1 and not waiting.done()
    use.leave(2.0, None)
    await waiting
    assert use.outcomes == Outcomes(2, 0, 3.0)
    use.take()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await use.until_free()
    one, both = Outcomes(3, 1, 2.5), Outcomes(10, 2, 4.0)
    assert one.plus(both.since(one)) == both


FAULTS: list[BaseException] = [
    errors.Unavailable("ended"),
    errors.StepFailed("failed"),
    errors.UnexpectedFault("1"),
    KeyError("token"),
    RuntimeError("?"),
]
NO_FAULTS: list[BaseException] = [
    errors.NotReady("starting"),
    errors.Draining("ending", 1.0),
    errors.InvalidRequest("text", "is empty"),
]
NO_FAULTS += [errors.QueueFull("too many"), errors.DeadlineExceeded("too late"), errors.Cancelled("gone")]
NO_FAULTS += [asyncio.CancelledError(), ConnectionResetError()]


@pytest.mark.parametrize("error", [*FAULTS, *NO_FAULTS, None], ids=lambda error: type(error).__name__)
async def test_only_faults_of_a_version_count_against_it(error: BaseException | None) -> None:
    use = Use()
    try:
        async with Held(lambda: ("model", use)) as model:
            assert (model, use.num_held) == ("model", 1)
            await asyncio.sleep(0.001)
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert use.num_held == 0
    if error is None:
        assert use.outcomes.num_answered == 1 and use.outcomes.seconds >= 0.001
    else:
        assert use.outcomes == Outcomes(0, int(error in FAULTS), 0.0)
