"""Versions: their names and order, their states, and the history that a rollback goes back in."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.model_file import check_version_name, is_version_name, natural_key
from dragoman.server.models.policy import MAX_VERSIONS, History
from dragoman.server.models.reconcile import Idle, Loaded, is_in
from dragoman.server.models.registry import Route
from dragoman.server.models.version import Opened, State, Version


@pytest.mark.parametrize(
    "names",
    [
        ["01", "1", "02", "2", "10", "100"],
        ["v1.2", "v1.2.9", "v1.2.10", "v1.10", "v2"],
        ["20231231T2359", "20240105T0000"],
        ["1", "1-rc1", "1.0", "1.0-rc2", "1.0-rc10", "1a", "2"],
        ["3", "2023-12-31", "2024-01-05", "2024-1-6", "A", "B", "a", "a2", "a10", "b1", "v1"],
        ["a1", "a-1", "a-1-2"],
    ],
)
def test_order_of_versions(names: list[str]) -> None:
    assert sorted(random.Random(1).sample(names, len(names)), key=natural_key) == names


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_two_different_names_have_an_order(one: str, other: str) -> None:
    assert (natural_key(one) == natural_key(other)) == (one == other)
    assert (natural_key(one) < natural_key(other)) + (natural_key(other) < natural_key(one)) == (one != other)


NO_NAMES = ["", ".hidden", "-1", "_1", "a b", "a/b", "1\n", "é", "١", "lost+found", "@eaDir", "0" * 65, "a\x00", "\udcff"]


def test_names_of_versions() -> None:
    for name in ("1", "v1.2.10", "2024-01-05", "stable", "A_b", "0" * 64):
        assert is_version_name(name) and check_version_name(name) == name
    for name in NO_NAMES:
        assert not is_version_name(name)
        with pytest.raises(ValueError) as refusal:
            check_version_name(name)
        assert str(refusal.value).isascii() and str(refusal.value).isprintable() and len(str(refusal.value)) < 300


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


def found(name: str, stamp: int = 1) -> FoundVersion:
    return FoundVersion(name, Path(name), (stamp, 1, 1))


def model(label: str) -> Any:
    return SimpleNamespace(label=label, name="en-de")


def test_version_is_called_as_its_folder_or_as_its_content() -> None:
    named, flat = Version("en-de", found("7")), Version("en-de", found(""))
    assert (named.label, named.content, flat.label) == ("7", "", "")
    bundle, nothing = SimpleNamespace(manifest=SimpleNamespace(version="abc")), None
    for version in (named, flat):
        version.open(Opened(bundle, nothing, nothing))  # type: ignore[arg-type]
    assert (named.label, named.content, flat.label) == ("7", "abc", "abc")
    flat.let_go()
    assert (flat.label, flat.content, flat.opened) == ("abc", "abc", None)


@pytest.mark.parametrize("state", State)
def test_only_a_version_that_is_being_tried_is_blamed_for_a_death(state: State) -> None:
    version = Version("en-de", found("1"), state)
    version.note_death()
    assert version.has_died is (state in (State.PROVING, State.STANDBY, State.TRIAL))


def test_replicas_get_the_lowest_free_consecutive_numbers() -> None:
    versions = Loaded("en-de", Idle(60.0, 0.0))
    one, two, three = (versions.add(found(name)) for name in "123")
    for version, num_replicas, expected in ((one, 2, range(0, 2)), (two, 1, range(2, 3)), (three, 2, range(3, 5))):
        version.replicas = versions.free_replicas(num_replicas)
        version.loaded = model(version.label)
        assert version.replicas == expected
    one.loaded = None
    assert [versions.free_replicas(number) for number in (0, 2, 3)] == [range(0), range(0, 2), range(5, 8)]
    route = Route(two.loaded, {"2": two.loaded})  # type: ignore[arg-type, dict-item]
    assert is_in(two, route) and not is_in(three, route) and not is_in(two, None)
