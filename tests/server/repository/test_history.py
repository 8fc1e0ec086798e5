"""What a rollback goes back to."""

import pytest

from dragoman.server.repository.history import MAX_VERSIONS, History


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
def test_going_back_never_comes_forward(noted: str, usable: str, before: str | None) -> None:
    history = History()
    for name in noted:
        history.note(name)
    assert history.before(usable) == before


def test_a_server_that_lives_for_years_remembers_some() -> None:
    history = History()
    for number in range(10 * MAX_VERSIONS):
        history.note(str(number))
    assert len(history._names) == MAX_VERSIONS and history.before([str(10 * MAX_VERSIONS - 2)]) is not None
