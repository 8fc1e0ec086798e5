"""Which versions are wanted, and who answers."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.repository.found import FoundVersion
from dragoman.server.repository.model_file import ModelFile, Versions
from dragoman.server.repository.policy import Overrides, Wanted, wanted


def found(*names: str) -> list[FoundVersion]:
    return [FoundVersion(name, Path("models/m") / name, (1, 1, 1), "m") for name in names]


def file(latest: int | None = None, only: tuple[str, ...] | None = None, default: str | None = None, **tables: Any) -> ModelFile:
    return ModelFile(versions=Versions(latest=latest, only=only, default=default), **tables)


def names(answer: Wanted) -> list[str]:
    return [version.name for version in answer.versions]


def decide(versions: str, file: ModelFile | None = None, refused: str = "", **overrides: Any) -> Wanted:
    """Versions and refused ones are words."""
    reasons = dict.fromkeys(refused.split(), "wrong answers")
    return wanted(found(*versions.split()), file or ModelFile(), reasons, Overrides(**overrides))


def test_the_newest_version_is_wanted_where_nothing_is_said() -> None:
    answer = decide("1 2 10")
    assert (names(answer), answer.shares, answer.labels, answer.default, answer.problems) == (["10"], {"10": 1}, {}, "10", ())


def test_a_model_of_one_bundle_is_one_version_without_a_name() -> None:
    answer = wanted(found(""), ModelFile())
    assert (names(answer), answer.shares, answer.default, answer.problems) == ([""], {"": 1}, "", ())
    labelled = wanted(found(""), ModelFile(), overrides=Overrides(labels={"stable": ""}))
    assert (labelled.labels, labelled.default) == ({"stable": ""}, "")


def test_nothing_is_wanted_of_nothing() -> None:
    assert decide("") == Wanted()


@pytest.mark.parametrize(("refused", "left"), [("", ["3"]), ("3", ["2"]), ("3 2", ["1"]), ("2", ["3"])])
def test_the_next_one_takes_over_from_a_refused_or_removed_version(refused: str, left: list[str]) -> None:
    answer = decide("1 2 3", refused=refused)
    assert (names(answer), answer.shares, answer.problems) == (left, {left[0]: 1}, ())
    there = " ".join(name for name in ("1", "2", "3") if name not in refused.split())
    assert decide(there) == answer
    assert wanted(found("1", "2", "3"), ModelFile(), overrides=Overrides(unloaded=frozenset(refused.split()))) == answer


def test_where_all_are_refused_that_is_said() -> None:
    answer = decide("1 2", refused="1 2")
    assert (names(answer), answer.shares, answer.default) == ([], {}, None)
    assert answer.problems == ("versions: none can be served of 1, 2",)


def test_so_many_of_the_newest_are_wanted() -> None:
    answer = decide("1 2 3 4", file(latest=2))
    assert (names(answer), answer.shares, answer.default) == (["4", "3"], {"4": 1}, "4")
    assert names(decide("1 2 3 4", file(latest=2), refused="4")) == ["3", "2"]
    assert names(decide("1", file(latest=5))) == ["1"]


def test_named_versions_are_wanted_the_newest_first() -> None:
    answer = decide("1 2 3 4", file(only=("1", "3")))
    assert (names(answer), answer.default, answer.problems) == (["3", "1"], "3", ())
    answer = decide("1 2 4", file(only=("1", "3")))
    assert (names(answer), answer.default, answer.problems) == (["1"], "1", ("versions.only: there is no version '3'",))
    answer = decide("1 2 3", file(only=("1", "3")), refused="3")
    assert (names(answer), answer.problems) == (["1"], ("versions.only: version '3' is refused: wrong answers",))


def test_what_labels_name_is_wanted_too_but_gets_no_requests_by_itself() -> None:
    answer = decide("1 2 3", file(labels={"stable": "1"}))
    assert (names(answer), answer.labels, answer.shares) == (["3", "1"], {"stable": "1"}, {"3": 1})
    newer = decide("1 2 3", file(only=("2",), labels={"canary": "3"}))
    assert (names(newer), newer.shares) == (["3", "2"], {"2": 1})


def test_a_canary_gets_its_share_and_the_newest_other_one_the_rest() -> None:
    answer = decide("1 2 3", file(labels={"canary": "3"}, weights={"canary": 0.1}))
    assert (names(answer), answer.default) == (["3", "2"], "2")
    assert answer.shares == pytest.approx({"2": 0.9, "3": 0.1})


def test_a_canary_that_is_refused_or_gone_leaves_its_share_to_the_default() -> None:
    wish = file(labels={"canary": "3"}, weights={"canary": 0.1})
    refused = decide("1 2 3", wish, refused="3")
    assert (names(refused), refused.shares, refused.labels) == (["2"], {"2": 1}, {})
    reason = "version '3' is refused: wrong answers"
    assert refused.problems == (f"labels.canary: {reason}", f"weights.canary: {reason}")
    gone = decide("1 2", wish)
    assert (names(gone), gone.shares) == (["2"], {"2": 1})
    assert gone.problems == ("labels.canary: there is no version '3'", "weights.canary: there is no version '3'")


def test_a_version_that_has_a_share_alone_gets_all() -> None:
    assert decide("3", file(weights={"3": 0.1})).shares == {"3": 1}
    assert decide("3", file(weights={"3": 0})).shares == {"3": 1}


def test_a_share_of_nothing_keeps_requests_away() -> None:
    answer = decide("1 2 3", file(weights={"3": 0}))
    assert (names(answer), answer.shares, answer.default) == (["3", "2"], {"2": 1}, "2")


def test_shares_that_are_all_stated_need_no_other_version() -> None:
    answer = decide("1 2 3", file(weights={"3": 0.3, "2": 0.7}))
    assert names(answer) == ["3", "2"]
    assert answer.shares == pytest.approx({"2": 0.7, "3": 0.3})


def test_shares_of_a_label_and_of_its_version_add_up() -> None:
    answer = decide("1 2", file(labels={"canary": "2"}, weights={"canary": 0.1, "2": 0.2}))
    assert answer.shares == pytest.approx({"1": 0.7, "2": 0.3})


@pytest.mark.parametrize("default", ["stable", "2"])
def test_the_default_may_be_named(default: str) -> None:
    answer = decide("1 2 3 4", file(default=default, labels={"stable": "2"}, weights={"4": 0.25}))
    assert (names(answer), answer.default) == (["4", "2"], "2")
    assert answer.shares == pytest.approx({"2": 0.75, "4": 0.25})


def test_a_default_with_a_share_has_the_rest_as_well() -> None:
    answer = decide("1 2", file(default="1", weights={"1": 0.2, "2": 0.3}))
    assert answer.shares == pytest.approx({"1": 0.7, "2": 0.3})


def test_a_default_that_cannot_be_had_is_a_problem_and_the_newest_answers() -> None:
    answer = decide("1 2 3", file(default="stable", labels={"stable": "3"}), refused="3")
    assert (names(answer), answer.default) == (["2"], "2")
    assert answer.problems == tuple(
        f"{where}: version '3' is refused: wrong answers" for where in ("labels.stable", "versions.default")
    )
    assert decide("1", file(default="x")).problems == ("versions.default: there is no version or label 'x'",)


def test_a_label_that_is_called_like_a_version_is_left_out() -> None:
    answer = decide("1 2", file(labels={"1": "2"}, default="1"))
    assert (answer.labels, answer.default, answer.problems) == ({}, "1", ("labels.1: there is a version of that name",))


# What operators ask for


def test_an_unloaded_model_is_not_wanted() -> None:
    assert decide("1 2", file(only=("5",)), is_unloaded=True) == Wanted()


def test_a_version_loaded_beside_gets_no_requests_by_itself() -> None:
    answer = decide("1 2 3 4", file(only=("3",)), loaded=frozenset({"1", "4", "9"}))
    assert (names(answer), answer.shares, answer.default) == (["4", "3", "1"], {"3": 1}, "3")
    assert answer.problems == ("load: there is no version '9'",)


def test_unloading_goes_before_everything_else() -> None:
    answer = decide("1 2 3", file(labels={"stable": "3"}), unloaded=frozenset({"3"}), loaded=frozenset({"3"}), pinned="3")
    assert (names(answer), answer.default) == (["2"], "2")
    assert answer.problems == tuple(f"{where}: version '3' was unloaded" for where in ("rollback", "labels.stable", "load"))


def test_a_rollback_takes_all_requests_from_what_is_newer() -> None:
    wish = file(latest=2, weights={"4": 0.1})
    answer = decide("1 2 3 4", wish, pinned="2")
    assert (names(answer), answer.shares, answer.default, answer.problems) == (["2", "1"], {"2": 1}, "2", ())
    assert decide("1 2 3 4 5", wish, pinned="2") == answer


def test_a_rollback_goes_before_the_files_default_but_leaves_labels() -> None:
    answer = decide("1 2 3", file(default="stable", labels={"stable": "3"}), pinned="1")
    assert (names(answer), answer.shares, answer.labels) == (["3", "1"], {"1": 1}, {"stable": "3"})


def test_a_rollback_to_what_cannot_be_had_is_a_problem() -> None:
    answer = decide("1 2 3", refused="2", pinned="2")
    assert (names(answer), answer.problems) == (["3"], ("rollback: version '2' is refused: wrong answers",))


def test_an_operators_labels_go_before_the_files_and_take_them_away() -> None:
    wish = file(labels={"stable": "1", "old": "1"}, weights={"stable": 0.5})
    answer = decide("1 2 3", wish, labels={"stable": "2", "old": None, "new": "3"})
    assert answer.labels == {"stable": "2", "new": "3"}
    assert answer.shares == pytest.approx({"2": 0.5, "3": 0.5})
    assert names(answer) == ["3", "2"]


def test_a_weight_of_a_label_that_was_taken_away_is_a_problem() -> None:
    answer = decide("1 2", file(labels={"canary": "2"}, weights={"canary": 0.5}), labels={"canary": None})
    assert (answer.shares, answer.problems) == ({"2": 1}, ("weights.canary: there is no version or label 'canary'",))


# Any file and any folder

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
        only=tuple(draw(st.lists(NAMES, min_size=1, unique=True))) if policy == "only" else None,
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
CASES = (SOME, files(), st.dictionaries(NAMES, st.just("bad")), OVERRIDES)


@given(*CASES)
def test_what_is_wanted_is_there_and_answers_every_request(there: Any, wish: Any, refused: Any, overrides: Any) -> None:
    answer = wanted(found(*sorted(there)), wish, refused, overrides)
    served = names(answer)
    assert served == sorted(served, reverse=True)
    assert set(served) <= there - refused.keys() - overrides.unloaded
    assert set(answer.shares) <= set(served) and set(answer.labels.values()) <= set(served)
    assert bool(served) == bool(answer.shares) == (answer.default in served)
    assert not served or (math.isclose(math.fsum(answer.shares.values()), 1) and min(answer.shares.values()) > 0)
    assert not there.intersection(answer.labels)
    assert all("\n" not in problem for problem in answer.problems)
    if overrides.pinned in served and overrides.pinned in there:
        assert answer.shares == {overrides.pinned: 1}


@given(*CASES)
def test_a_refused_version_is_like_one_that_is_not_there(there: Any, wish: Any, refused: Any, overrides: Any) -> None:
    labels = {label: version for label, version in overrides.labels.items() if label not in there}
    wish = wish.model_copy(update={"labels": {label: version for label, version in wish.labels.items() if label not in there}})
    overrides = Overrides(overrides.is_unloaded, overrides.loaded, overrides.unloaded, overrides.pinned, labels)
    one = wanted(found(*sorted(there)), wish, refused, overrides)
    other = wanted(found(*sorted(there - refused.keys())), wish, {}, overrides)
    assert (one.versions, one.shares, one.labels, one.default) == (other.versions, other.shares, other.labels, other.default)


@given(SOME, st.integers(1, 5), st.frozensets(NAMES))
def test_latest_means_the_newest_that_are_not_refused(there: Any, latest: int, refused: Any) -> None:
    answer = wanted(found(*sorted(there)), file(latest=latest), dict.fromkeys(refused, "bad"))
    good = sorted(there - refused, reverse=True)
    assert names(answer) == good[:latest]
    assert answer.shares == ({good[0]: 1} if good else {})


def test_thousands_of_versions_are_decided_about_quickly() -> None:
    many = [str(number) for number in range(20_000)]
    assert names(wanted(found(*many), file(latest=20_000))) == many[::-1]
