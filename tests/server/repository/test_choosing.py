"""The version that answers a request: by its share, or by the name that the request asks for."""

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


def test_all_processes_choose_alike() -> None:
    code = """if True:
        from dragoman.server.repository.choosing import choose
        print(*(choose({"1": 0.5, "2": 0.3, "3": 0.2}, f"k{number}") for number in range(50)))
    """
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
    assert there.split() == [choose({"1": 0.5, "2": 0.3, "3": 0.2}, f"k{number}") for number in range(50)]
    with pytest.raises(AssertionError):
        choose({}, "key")


CONTENTS = {"4": "c0ffee000004", "3": "c0ffee000003"}
LABELS = {"canary": "4", "stable": "3", "old": "3"}
TWINS = {"4": "c0ffee000003", "3": "c0ffee000003"}


@pytest.mark.parametrize(
    ("asked", "contents", "labels", "version"),
    [
        ("4", CONTENTS, LABELS, "4"),
        ("c0ffee000003", CONTENTS, LABELS, "3"),
        ("canary", CONTENTS, LABELS, "4"),
        ("old", CONTENTS, LABELS, "3"),
        ("c0ffee000001", {"": "c0ffee000001"}, {}, ""),
        ("4", TWINS, {"c0ffee000003": "3"}, "4"),
        ("c0ffee000004", CONTENTS, {"c0ffee000004": "4"}, "4"),
    ],
)
def test_version_is_found_by_name_content_or_label(
    asked: str, contents: dict[str, str], labels: dict[str, str], version: str
) -> None:
    assert resolve("m", asked, contents, labels) == version


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
