"""One version, and the versions of one model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.repository.found import FoundVersion
from dragoman.server.repository.model_versions import ModelVersions, is_in
from dragoman.server.repository.models import Route
from dragoman.server.repository.versions import Cause, Opened, Refused, State, Version


def found(name: str, stamp: int = 1) -> FoundVersion:
    return FoundVersion(name, Path(name), (stamp, 1, 1))


def model(label: str) -> Any:
    return SimpleNamespace(label=label, name="en-de")


def opened(content: str) -> Opened:
    nothing: Any = None
    return Opened(SimpleNamespace(manifest=SimpleNamespace(version=content)), nothing, nothing)  # type: ignore[arg-type]


def test_a_version_is_called_as_its_folder_or_as_its_content_gives() -> None:
    named, flat = Version[Any]("en-de", found("7")), Version[Any]("en-de", found(""))
    assert (named.label, named.content, flat.label) == ("7", "", "")
    for version in (named, flat):
        version.open(opened("abc"))
    assert (named.label, named.content, flat.label) == ("7", "abc", "abc")
    flat.let_go()
    assert (flat.label, flat.content, flat.opened) == ("abc", "abc", None)


@pytest.mark.parametrize("state", State)
def test_only_what_is_being_tried_is_blamed_for_a_death(state: State) -> None:
    version = Version[Any]("en-de", found("1"), state)
    version.note_death()
    assert version.has_died is (state in (State.PROVING, State.STANDBY, State.TRIAL))


def test_the_time_of_a_state_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    version = Version[Any]("en-de", found("1"), since=5.0)
    version.enter(State.OPENING)
    assert version.since == 5.0
    version.refuse(Refused(Cause.PROOF, "another answer"))
    assert version.since > 5.0 and (version.state, version.cause, version.reason) == (State.REFUSED, Cause.PROOF, "another answer")


def test_engines_get_the_lowest_numbers_that_are_free() -> None:
    versions = ModelVersions[Any]("en-de")
    one, two, three = (versions.begin(found(name)) for name in "123")
    for version, num_replicas, expected in ((one, 2, range(0, 2)), (two, 1, range(2, 3)), (three, 2, range(3, 5))):
        version.replicas = versions.free_replicas(num_replicas)
        version.loaded = model(version.label)
        assert version.replicas == expected
    one.loaded = None
    assert versions.free_replicas(2) == range(0, 2)
    assert versions.free_replicas(3) == range(5, 8), "neighbours, so that the first says which they are"
    assert versions.free_replicas(0) == range(0)
    assert versions.loaded() == [two.loaded, three.loaded]


def test_the_same_files_are_the_same_version_until_it_retires() -> None:
    versions = ModelVersions[Any]("en-de")
    version = versions.begin(found("1"))
    assert versions.known(found("1")) is version
    assert versions.known(found("1", stamp=2)) is None
    version.enter(State.RETIRING)
    assert versions.known(found("1")) is None


def test_what_is_refused_stays_known_while_its_files_are_there() -> None:
    versions = ModelVersions[Any]("en-de")
    refused = versions.begin(found("1"))
    refused.refuse(Refused(Cause.BUNDLE, "damaged"))
    versions.remove(refused)
    assert list(versions) == [refused]
    versions.forget_refused([found("1")])
    assert list(versions) == [refused]
    refused.loaded = model("1")
    versions.forget_refused()
    assert list(versions) == [refused], "its engine has yet to end"
    refused.loaded = None
    versions.forget_refused([found("1", stamp=2)])
    assert list(versions) == []


def test_versions_may_come_and_go_while_they_are_looked_at() -> None:
    versions = ModelVersions[Any]("en-de")
    for name in "123":
        versions.begin(found(name))
    for version in versions:
        version.enter(State.RETIRING)
        versions.remove(version)
        versions.remove(version)
    assert list(versions) == []


def test_a_route_leads_to_its_own_versions() -> None:
    one, two = (Version[Any]("en-de", found(name), loaded=model(name)) for name in "12")
    route = Route(one.loaded, {"1": one.loaded})  # type: ignore[arg-type, dict-item]
    assert is_in(one, route) and not is_in(two, route) and not is_in(one, None)
