"""Names of versions, and their order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.repository.version_names import check_version_name, is_version_name, natural_key


@pytest.mark.parametrize(
    "names",
    [
        ["1", "2", "10", "100"],
        ["01", "1", "02", "2", "10"],
        ["v1.2", "v1.2.9", "v1.2.10", "v1.10", "v2"],
        ["2023-12-31", "2024-01-05", "2024-1-6", "2024-02-01", "2024-11-01"],
        ["20231231T2359", "20240105T0000"],
        ["1", "1-rc1", "1.0", "1.0-rc2", "1.0-rc10", "1a", "2"],
        ["3", "2024-01-05", "a", "a2", "a10", "b1", "v1"],
        ["A", "B", "a"],
        ["a1", "a-1", "a-1-2"],
    ],
)
def test_the_order_is_the_one_in_which_people_count(names: list[str]) -> None:
    shuffled = random.Random(1).sample(names, len(names))
    assert sorted(shuffled, key=natural_key) == names


@given(st.lists(st.integers(0, 10**18)))
def test_numbers_are_in_their_order(numbers: list[int]) -> None:
    assert sorted(map(str, numbers), key=natural_key) == list(map(str, sorted(numbers)))


@given(st.lists(st.dates()))
def test_dates_are_in_their_order(dates: list) -> None:
    assert sorted((str(date) for date in dates), key=natural_key) == [str(date) for date in sorted(dates)]


@given(st.lists(st.tuples(*[st.integers(0, 300)] * 3)))
def test_versions_of_three_numbers_are_in_their_order(versions: list[tuple[int, int, int]]) -> None:
    names = ["v" + ".".join(map(str, version)) for version in sorted(versions)]
    assert sorted(reversed(names), key=natural_key) == names


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_two_different_names_have_an_order(one: str, other: str) -> None:
    assert (natural_key(one) == natural_key(other)) == (one == other)
    assert (natural_key(one) < natural_key(other)) + (natural_key(other) < natural_key(one)) == (one != other)


@pytest.mark.parametrize("name", ["1", "v1.2.10", "2024-01-05", "stable", "A_b", "0" * 64])
def test_a_models_characters_will_do(name: str) -> None:
    assert is_version_name(name)
    assert check_version_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-1", "_1", "a b", "a/b", "1\n", "é", "١", "lost+found", "@eaDir", "0" * 65, "a\x00", "\udcff"]
)
def test_others_are_refused_in_one_short_line_of_ascii(name: str) -> None:
    assert not is_version_name(name)
    with pytest.raises(ValueError, match="no name of a version or a label") as refusal:
        check_version_name(name)
    assert str(refusal.value).isascii() and str(refusal.value).isprintable() and len(str(refusal.value)) < 300
