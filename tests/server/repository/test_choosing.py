"""Which version answers a request."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.errors import UnknownVersion
from dragoman.server.repository.choosing import choose, resolve

KEYS = [f"request-{number}" for number in range(20_000)]
SHARES = st.dictionaries(st.text(max_size=8), st.floats(0.001, 1), min_size=1, max_size=6)


def chosen(shares: dict[str, float]) -> dict[str, str]:
    return {key: choose(shares, key) for key in KEYS}


@pytest.mark.parametrize(
    "shares", [{"1": 0.9, "2": 0.1}, {"1": 0.5, "2": 0.3, "3": 0.2}, {"a": 0.99, "b": 0.01}, {"": 0.25, "x": 0.75}]
)
def test_each_version_gets_its_share(shares: dict[str, float]) -> None:
    """Within four standard deviations of a fair draw; keys are fixed, so this never changes by chance."""
    counts = Counter(chosen(shares).values())
    for name, share in shares.items():
        assert abs(counts[name] - share * len(KEYS)) < 4 * (len(KEYS) * share * (1 - share)) ** 0.5


def test_a_share_that_grows_moves_only_what_it_gains() -> None:
    before, after = chosen({"1": 0.9, "2": 0.1}), chosen({"1": 0.7, "2": 0.3})
    moved = Counter((before[key], after[key]) for key in KEYS if before[key] != after[key])
    assert moved.keys() == {("1", "2")}
    assert moved["1", "2"] / len(KEYS) == pytest.approx(0.2, abs=0.01)


def test_a_third_version_takes_from_both_and_moves_nothing_between_them() -> None:
    before, after = chosen({"1": 0.6, "2": 0.4}), chosen({"1": 0.54, "2": 0.36, "3": 0.1})
    moved = Counter((before[key], after[key]) for key in KEYS if before[key] != after[key])
    assert moved.keys() == {("1", "3"), ("2", "3")}
    assert sum(moved.values()) / len(KEYS) == pytest.approx(0.1, abs=0.01)


@given(SHARES, st.text())
def test_a_key_stays_whatever_the_order_and_what_has_no_share(shares: dict[str, float], key: str) -> None:
    version = choose(shares, key)
    assert version in shares
    assert choose(dict(reversed(shares.items())), key) == version
    assert choose(shares | {"nothing": 0.0}, key) == version
    assert choose({name: share / 2 for name, share in shares.items()}, key) == version


@given(SHARES, st.text(), st.floats(1.01, 50))
def test_one_share_that_grows_only_attracts(shares: dict[str, float], key: str, factor: float) -> None:
    for name in shares:
        after = choose(shares | {name: shares[name] * factor}, key)
        assert after in (name, choose(shares, key))


@given(st.text(), st.text())
def test_one_version_needs_no_key(name: str, key: str) -> None:
    assert choose({name: 1.0}, key) == name


def test_all_processes_choose_alike() -> None:
    code = """if True:
        from dragoman.server.repository.choosing import choose
        print(*(choose({"1": 0.5, "2": 0.3, "3": 0.2}, f"k{number}") for number in range(50)))
    """
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("0", "1")
    }
    here = " ".join(choose({"1": 0.5, "2": 0.3, "3": 0.2}, f"k{number}") for number in range(50))
    assert outputs == {here + "\n"}


def test_nobody_to_choose_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        choose({}, "key")


CONTENTS = {"4": "c0ffee000004", "3": "c0ffee000003"}
LABELS = {"canary": "4", "stable": "3", "old": "3"}


@pytest.mark.parametrize(("asked", "version"), [("4", "4"), ("c0ffee000003", "3"), ("canary", "4"), ("old", "3")])
def test_a_version_goes_by_its_name_its_content_and_its_labels(asked: str, version: str) -> None:
    assert resolve("m", asked, CONTENTS, LABELS) == version


def test_the_only_version_of_a_flat_folder_goes_by_its_content() -> None:
    assert resolve("m", "c0ffee000001", {"": "c0ffee000001"}, {}) == ""
    with pytest.raises(UnknownVersion, match="model_version: '1' of model m is not served; served: c0ffee000001"):
        resolve("m", "1", {"": "c0ffee000001"}, {})


@pytest.mark.parametrize("asked", ["5", "c0ffee", "Stable", " 4", "C0FFEE000004"])
def test_an_unknown_version_is_answered_with_what_is_served(asked: str) -> None:
    with pytest.raises(UnknownVersion) as refusal:
        resolve("m", asked, CONTENTS, LABELS)
    served = "4 (c0ffee000004, canary), 3 (c0ffee000003, stable, old)"
    assert refusal.value.message == f"model_version: {asked!r} of model m is not served; served: {served}"
    assert (refusal.value.code, refusal.value.refusal) == ("NOT_FOUND", "unknown_version")


def test_nothing_served_is_said() -> None:
    with pytest.raises(UnknownVersion, match="served: none"):
        resolve("m", "1", {}, {"x": "1"})


def test_what_may_be_two_versions_is_refused_and_what_is_one_twice_is_not() -> None:
    twins = {"4": "c0ffee000003", "3": "c0ffee000003"}
    with pytest.raises(UnknownVersion) as refusal:
        resolve("m", "c0ffee000003", twins, {})
    assert refusal.value.message == (
        "model_version: 'c0ffee000003' of model m may be 4 (c0ffee000003) or 3 (c0ffee000003); ask for one by its name"
    )
    assert resolve("m", "4", twins, {"c0ffee000003": "3"}) == "4"
    assert resolve("m", "c0ffee000004", CONTENTS, {"c0ffee000004": "4"}) == "4"
    with pytest.raises(UnknownVersion, match="may be"):
        resolve("m", "c0ffee000004", CONTENTS, {"c0ffee000004": "3"})


def test_a_label_of_what_is_not_served_is_unknown() -> None:
    with pytest.raises(UnknownVersion, match="'next' of model m is not served"):
        resolve("m", "next", CONTENTS, {"next": "5"})


def test_what_was_asked_is_repeated_in_one_short_line() -> None:
    with pytest.raises(UnknownVersion) as refusal:
        resolve("m", "x\n\x1b[31m" * 1000, CONTENTS, {})
    assert refusal.value.message.isprintable() and len(refusal.value.message) < 400
