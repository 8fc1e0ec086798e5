"""Models by name, the version of each that answers a request, and the requests that hold a version."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.export.bundle import Bundle
from dragoman.server import errors
from dragoman.server.errors import UnknownVersion
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import ModelRegistry, Route, ServedVersion, choose, resolve
from dragoman.server.models.use import Outcomes, Use


def version(label: str, name: str = "en-de") -> Any:
    nothing: Any = None
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(name=name, version=f"content-{label}"))
    return LoadedModel(bundle, nothing, nothing, label, label)


ONE, TWO = version("1"), version("2")
BOTH = {"1": ONE, "2": TWO}


def routed(route: Route) -> ModelRegistry:
    repository: ModelRegistry = ModelRegistry()
    repository.publish(route.name, route)
    return repository


async def held(repository: ModelRegistry, *arguments: str, **keywords: str) -> Any:
    async with repository.hold(*arguments, **keywords) as model:
        assert model.use.num_held == 1
    assert model.use.num_held == 0
    return model


async def labels(repository: ModelRegistry, number: int, caller: str = "") -> list[str]:
    return [(await held(repository, "en-de", request_id=f"request-{i}", caller=caller)).label for i in range(number)]


def test_models_are_found_by_name(tiny_bundle: Path) -> None:
    tiny: Any = LoadedModel.of(Bundle.open(tiny_bundle), "engine")  # type: ignore[arg-type]
    assert (tiny.name, tiny.version, tiny.engine) == ("tiny", tiny.bundle.manifest.version, "engine")
    repository: ModelRegistry = ModelRegistry([version("1", "beta"), version("1", "alpha")])
    assert [model.name for model in repository.all()] == ["alpha", "beta"] and repository.get("beta").name == "beta"
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
    one, both = Outcomes(3, 1, 2.5), Outcomes(10, 2, 4.0)
    assert one.plus(both.since(one)) == both


FAULTS: list[BaseException] = [errors.Unavailable("ended"), errors.StepFailed("failed"), errors.UnexpectedFault("1"), KeyError("?")]
NO_FAULTS: list[BaseException] = [
    *(errors.NotReady("starting"), errors.Draining("ending", 1.0), errors.InvalidRequest("text", "is empty")),
    *(errors.QueueFull("too many"), errors.DeadlineExceeded("too late"), errors.Cancelled("gone")),
    *(asyncio.CancelledError(), ConnectionResetError()),
]


@pytest.mark.parametrize("error", [*FAULTS, *NO_FAULTS, None], ids=lambda error: type(error).__name__)
async def test_only_faults_of_a_version_count_against_it(error: BaseException | None) -> None:
    model = version("1")
    use = model.use
    try:
        async with routed(Route.to(model)).hold("en-de") as held_model:
            assert held_model is model and use.num_held == 1
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


# The version of a request: by its share, or by the name that the request asks for.

KEYS = [f"request-{number}" for number in range(20_000)]
SHARES = st.dictionaries(st.text(max_size=8), st.floats(0.001, 1), min_size=1, max_size=6)


def chosen(shares: dict[str, float]) -> dict[str, str]:
    return {key: choose(shares, key) for key in KEYS}


@pytest.mark.parametrize("shares", [{"1": 0.5, "2": 0.3, "3": 0.2}, {"a": 0.99, "b": 0.01}])
def test_each_version_gets_its_share(shares: dict[str, float]) -> None:
    """Within four standard deviations of a fair draw; keys are fixed, so this never changes by chance."""
    counts = Counter(chosen(shares).values())
    for name, share in shares.items():
        assert abs(counts[name] - share * len(KEYS)) < 4 * (len(KEYS) * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(
    ("before", "after", "moves", "part"),
    [
        ({"1": 0.9, "2": 0.1}, {"1": 0.7, "2": 0.3}, {("1", "2")}, 0.2),
        ({"1": 0.6, "2": 0.4}, {"1": 0.54, "2": 0.36, "3": 0.1}, {("1", "3"), ("2", "3")}, 0.1),
    ],
)
def test_change_of_shares_moves_only_what_a_version_gains(
    before: dict[str, float], after: dict[str, float], moves: set[tuple[str, str]], part: float
) -> None:
    one, other = chosen(before), chosen(after)
    moved = Counter((one[key], other[key]) for key in KEYS if one[key] != other[key])
    assert moved.keys() == moves and sum(moved.values()) / len(KEYS) == pytest.approx(part, abs=0.01)


@given(SHARES, st.text(), st.floats(1.01, 50))
def test_choice_depends_on_the_proportions_only_and_a_growing_share_only_attracts(
    shares: dict[str, float], key: str, factor: float
) -> None:
    version = choose(shares, key)
    assert version in shares
    for same in (dict(reversed(shares.items())), shares | {"nothing": 0.0}, {name: share / 2 for name, share in shares.items()}):
        assert choose(same, key) == version
    for name in shares:
        assert choose(shares | {name: shares[name] * factor}, key) in (name, version)


def test_all_processes_and_releases_choose_alike() -> None:
    chosen = "".join(choose({"1": 0.5, "2": 0.3, "3": 0.2}, f"k{number}") for number in range(50))
    assert chosen == "32131331323211212332111311113121331331211131113212"
    with pytest.raises(AssertionError):
        choose({}, "key")


CONTENTS = {"4": "c0ffee000004", "3": "c0ffee000003"}
LABELS = {"canary": "4", "stable": "3", "old": "3"}
TWINS = {"4": "c0ffee000003", "3": "c0ffee000003"}


def test_version_is_found_by_name_content_or_label() -> None:
    asked = {"4": "4", "c0ffee000003": "3", "canary": "4", "old": "3"}
    assert {name: resolve("m", name, CONTENTS, LABELS) for name in asked} == asked
    assert resolve("m", "c0ffee000001", {"": "c0ffee000001"}, {}) == ""
    assert resolve("m", "4", TWINS, {"c0ffee000003": "3"}) == "4"
    assert resolve("m", "c0ffee000004", CONTENTS, {"c0ffee000004": "4"}) == "4"


@pytest.mark.parametrize(
    ("asked", "contents", "labels", "reason"),
    [
        *(
            (asked, CONTENTS, LABELS, "is not served; served: 4 (c0ffee000004, canary), 3 (c0ffee000003, stable, old)")
            for asked in ("5", "c0ffee", "Stable", " 4", "C0FFEE000004")
        ),
        ("1", {"": "c0ffee000001"}, {}, "is not served; served: c0ffee000001"),
        ("1", {}, {"x": "1"}, "is not served; served: none"),
        ("next", CONTENTS, {"next": "5"}, "is not served; served: 4 (c0ffee000004), 3 (c0ffee000003)"),
        ("c0ffee000003", TWINS, {}, "may be 4 (c0ffee000003) or 3 (c0ffee000003); ask for one by its name"),
        (
            "c0ffee000004",
            CONTENTS,
            {"c0ffee000004": "3"},
            "may be 4 (c0ffee000004) or 3 (c0ffee000003, c0ffee000004); ask for one by its name",
        ),
    ],
)
def test_unknown_or_ambiguous_version_is_refused_with_those_that_are_served(
    asked: str, contents: dict[str, str], labels: dict[str, str], reason: str
) -> None:
    with pytest.raises(UnknownVersion) as refusal:
        resolve("m", asked, contents, labels)
    assert refusal.value.message == f"model_version: {asked!r} of model m {reason}"
    assert (refusal.value.code, refusal.value.refusal) == ("NOT_FOUND", "unknown_version")
    with pytest.raises(UnknownVersion) as refusal:
        resolve("m", "x\n\x1b[31m" * 1000, contents, labels)
    assert refusal.value.message.isprintable() and len(refusal.value.message) < 400
