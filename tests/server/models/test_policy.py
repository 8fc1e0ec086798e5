"""Version policy: the versions that are wanted, their shares and labels, the default, and problems; by cases and by properties."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.model_file import ModelFile, Versions
from dragoman.server.models.policy import MAX_VERSIONS, History, Overrides, Wanted, wanted


def found(*names: str) -> list[FoundVersion]:
    return [FoundVersion(name, Path("models/m") / name, (1, 1, 1), "m") for name in names]


def file(latest: int | None = None, only: str = "", default: str | None = None, **tables: Any) -> ModelFile:
    return ModelFile(versions=Versions(latest=latest, only=tuple(only.split()) or None, default=default), **tables)


def names(answer: Wanted) -> list[str]:
    return [version.name for version in answer.versions]


def decide(versions: str, file: ModelFile | None = None, refused: str = "", **overrides: Any) -> Wanted:
    reasons = dict.fromkeys(refused.split(), "wrong answers")
    return wanted(found(*versions.split()), file or ModelFile(), reasons, Overrides(**overrides))


CANARY = file(labels={"canary": "3"}, weights={"canary": 0.1})
STABLE_1, STABLE_3 = file(default="stable", labels={"stable": "1"}), file(default="stable", labels={"stable": "3"})
UNLOADED_3: dict[str, Any] = {"unloaded": frozenset("3")}
LABELLED = file(labels={"stable": "1", "old": "1"}, weights={"stable": 0.5})

# File, operator's overrides, versions, refused ones; wanted versions, shares (the first is the default's), labels, problems.
CASES: list[tuple[ModelFile, dict[str, Any], str, str, str, dict[str, float], dict[str, str], list[str]]] = [
    (file(), {}, "1 2 10", "", "10", {"10": 1}, {}, []),
    (file(), {}, "1 2 3", "3", "2", {"2": 1}, {}, []),
    (file(), {}, "1 2 3", "3 2", "1", {"1": 1}, {}, []),
    (file(), {}, "1 2 3", "2", "3", {"3": 1}, {}, []),
    (file(), {}, "", "", "", {}, {}, []),
    (file(), {}, "1 2", "1 2", "", {}, {}, ["versions: none can be served of 1, 2"]),
    (file(), UNLOADED_3, "1 2 3", "", "2", {"2": 1}, {}, []),
    (file(latest=2), {}, "1 2 3 4", "", "4 3", {"4": 1}, {}, []),
    (file(latest=2), {}, "1 2 3 4", "4", "3 2", {"3": 1}, {}, []),
    (file(latest=5), {}, "1", "", "1", {"1": 1}, {}, []),
    (file(only="1 3"), {}, "1 2 3 4", "", "3 1", {"3": 1}, {}, []),
    (file(only="1 3"), {}, "1 2 4", "", "1", {"1": 1}, {}, ["versions.only: there is no version '3'"]),
    (file(only="1 3"), {}, "1 2 3", "3", "1", {"1": 1}, {}, ["versions.only: version '3' is refused: wrong answers"]),
    # Labels are loaded, and get no requests by themselves.
    (file(labels={"stable": "1"}), {}, "1 2 3", "", "3 1", {"3": 1}, {"stable": "1"}, []),
    (file(only="2", labels={"new": "3"}), {}, "1 2 3", "", "3 2", {"2": 1}, {"new": "3"}, []),
    (file(labels={"1": "2"}, default="1"), {}, "1 2", "", "2 1", {"1": 1}, {}, ["labels.1: there is a version of that name"]),
    # Shares.
    (CANARY, {}, "1 2 3", "", "3 2", {"2": 0.9, "3": 0.1}, {"canary": "3"}, []),
    (
        *(CANARY, {}, "1 2 3", "3", "2", {"2": 1}, {}),
        [f"{table}.canary: version '3' is refused: wrong answers" for table in ("labels", "weights")],
    ),
    (CANARY, {}, "1 2", "", "2", {"2": 1}, {}, [f"{table}.canary: there is no version '3'" for table in ("labels", "weights")]),
    (file(weights={"3": 0.1}), {}, "3", "", "3", {"3": 1}, {}, []),
    (file(weights={"3": 0}), {}, "3", "", "3", {"3": 1}, {}, []),
    (file(weights={"3": 0}), {}, "1 2 3", "", "3 2", {"2": 1}, {}, []),
    (file(weights={"3": 0.3, "2": 0.7}), {}, "1 2 3", "", "3 2", {"3": 0.3, "2": 0.7}, {}, []),
    (file(labels={"a": "2"}, weights={"a": 0.1, "2": 0.2}), {}, "1 2", "", "2 1", {"1": 0.7, "2": 0.3}, {"a": "2"}, []),
    # The default.
    (file(default="2", weights={"4": 0.25}), {}, "1 2 3 4", "", "4 2", {"2": 0.75, "4": 0.25}, {}, []),
    (STABLE_1, {}, "1 2 3", "", "3 1", {"1": 1}, {"stable": "1"}, []),
    (file(default="1", weights={"1": 0.2, "2": 0.3}), {}, "1 2", "", "2 1", {"1": 0.7, "2": 0.3}, {}, []),
    (
        *(STABLE_3, {}, "1 2 3", "3", "2", {"2": 1}, {}),
        [f"{where}: version '3' is refused: wrong answers" for where in ("labels.stable", "versions.default")],
    ),
    (file(default="x"), {}, "1", "", "1", {"1": 1}, {}, ["versions.default: there is no version or label 'x'"]),
    # Overrides of operators.
    (file(only="5"), {"is_unloaded": True}, "1 2", "", "", {}, {}, []),
    (file(only="3"), {"loaded": frozenset("149")}, "1 2 3 4", "", "4 3 1", {"3": 1}, {}, ["load: there is no version '9'"]),
    (
        *(file(labels={"stable": "3"}), {**UNLOADED_3, "loaded": frozenset("3"), "pinned": "3"}, "1 2 3", "", "2", {"2": 1}, {}),
        [f"{where}: version '3' was unloaded" for where in ("rollback", "labels.stable", "load")],
    ),
    (file(latest=2, weights={"4": 0.1}), {"pinned": "2"}, "1 2 3 4", "", "2 1", {"2": 1}, {}, []),
    (file(latest=2, weights={"4": 0.1}), {"pinned": "2"}, "1 2 3 4 5", "", "2 1", {"2": 1}, {}, []),
    (STABLE_3, {"pinned": "1"}, "1 2 3", "", "3 1", {"1": 1}, {"stable": "3"}, []),
    (file(), {"pinned": "2"}, "1 2 3", "2", "3", {"3": 1}, {}, ["rollback: version '2' is refused: wrong answers"]),
    (
        *(LABELLED, {"labels": {"stable": "2", "old": None, "new": "3"}}, "1 2 3", "", "3 2"),
        *({"3": 0.5, "2": 0.5}, {"stable": "2", "new": "3"}, []),
    ),
    (CANARY, {"labels": {"canary": None}}, "2 3", "", "3", {"3": 1}, {}, ["weights.canary: there is no version or label 'canary'"]),
]


@pytest.mark.parametrize(("file", "overrides", "there", "refused", "served", "shares", "labels", "problems"), CASES)
def test_versions_wanted(
    file: ModelFile,
    overrides: dict[str, Any],
    there: str,
    refused: str,
    served: str,
    shares: dict[str, float],
    labels: dict[str, str],
    problems: list[str],
) -> None:
    answer = decide(there, file, refused, **overrides)
    assert (names(answer), answer.labels, list(answer.problems)) == (served.split(), labels, problems)
    assert answer.shares == pytest.approx(shares) and answer.default == next(iter(shares), None)


def test_model_of_one_bundle_is_one_version_without_a_name() -> None:
    answer = wanted(found(""), ModelFile(), overrides=Overrides(labels={"stable": ""}))
    assert (names(answer), answer.shares, answer.labels, answer.default, answer.problems) == ([""], {"": 1}, {"stable": ""}, "", ())


@pytest.mark.parametrize(
    ("noted", "usable", "before"),
    [
        ("", "12", None),
        ("1", "12", None),
        ("12", "12", "1"),
        ("123", "123", "2"),
        ("123", "13", "1"),
        ("123", "3", None),
        ("1232", "123", "1"),
        ("12321", "123", None),
        ("1233", "123", "2"),
        ("12324", "1234", "2"),
    ],
)
def test_rollback_never_goes_forward(noted: str, usable: str, before: str | None) -> None:
    history = History()
    for name in noted:
        history.note(name)
    assert history.before(usable) == before
    for number in range(100, 100 + MAX_VERSIONS):
        history.note(str(number))
    assert history.before([*usable, "100"]) == "100", "the oldest are forgotten"
    history.note("new")
    assert history.before([*usable, "100"]) is None


# Any file and any folder.

NAMES = st.sampled_from(["1", "2", "3", "4", "5"])
LABELS = st.sampled_from(["stable", "canary", "x", "5"])
SOME = st.frozensets(NAMES)


@st.composite
def files(draw: Any) -> ModelFile:
    weights = draw(st.dictionaries(st.one_of(NAMES, LABELS), st.floats(0, 1), max_size=4))
    total = max(1.0, math.fsum(weights.values()))
    policy = draw(st.sampled_from(["latest", "only", ""]))
    return file(
        latest=draw(st.integers(1, 4)) if policy == "latest" else None,
        only=" ".join(draw(st.lists(NAMES, min_size=1, unique=True))) if policy == "only" else "",
        default=draw(st.none() | NAMES | LABELS),
        labels=draw(st.dictionaries(LABELS, NAMES)),
        weights={name: weight / total for name, weight in weights.items()},
    )


OVERRIDES = st.builds(
    Overrides,
    is_unloaded=st.booleans(),
    loaded=SOME,
    unloaded=SOME,
    pinned=st.none() | NAMES,
    labels=st.dictionaries(LABELS, st.none() | NAMES),
)


@given(SOME, files(), st.dictionaries(NAMES, st.just("bad")), OVERRIDES)
def test_versions_wanted_are_there_and_answer_every_request(there: Any, wish: Any, refused: Any, overrides: Any) -> None:
    answer = wanted(found(*sorted(there)), wish, refused, overrides)
    served = names(answer)
    assert served == sorted(served, reverse=True) and set(served) <= there - refused.keys() - overrides.unloaded
    assert set(answer.shares) <= set(served) and set(answer.labels.values()) <= set(served)
    assert bool(served) == bool(answer.shares) == (answer.default in served)
    assert not served or (math.isclose(math.fsum(answer.shares.values()), 1) and min(answer.shares.values()) > 0)
    assert not there.intersection(answer.labels)
    assert all("\n" not in problem for problem in answer.problems)
    if overrides.pinned in served and overrides.pinned in there:
        assert answer.shares == {overrides.pinned: 1}
    # A refused version is like one that is not there, but for the labels that are called like versions.
    labels = {label: version for label, version in overrides.labels.items() if label not in there}
    wish = wish.model_copy(update={"labels": {label: version for label, version in wish.labels.items() if label not in there}})
    overrides = Overrides(overrides.is_unloaded, overrides.loaded, overrides.unloaded, overrides.pinned, labels)
    one = wanted(found(*sorted(there)), wish, refused, overrides)
    other = wanted(found(*sorted(there - refused.keys())), wish, {}, overrides)
    assert (one.versions, one.shares, one.labels, one.default) == (other.versions, other.shares, other.labels, other.default)
