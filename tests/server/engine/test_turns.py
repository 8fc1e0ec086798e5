"""How much of the time scoring may take while something is generated."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.engine.turns import Turns


def test_a_turn_beside_generation_is_rested_for_as_long() -> None:
    turns = Turns()
    turns.pass_time(1000.0, is_turn=False, is_generating=True)
    turns.pass_time(1000.5, is_turn=True, is_generating=True)
    assert turns.rest_seconds == 0.5
    turns.pass_time(1000.75, is_turn=False, is_generating=True)
    assert turns.rest_seconds == 0.25
    turns.pass_time(1100.0, is_turn=False, is_generating=False)
    assert turns.rest_seconds == 0.0


def test_only_what_is_beside_generation_is_rested() -> None:
    turns = Turns()
    turns.pass_time(10.0, is_turn=False, is_generating=False)
    turns.pass_time(15.0, is_turn=True, is_generating=False)
    turns.pass_time(16.0, is_turn=True, is_generating=True)
    assert turns.rest_seconds == 1.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans(), st.integers(1, 300)), max_size=30))
def test_half_of_the_time_is_generations_whatever_turns_take(turns_taken: list[tuple[int, bool, int]]) -> None:
    """Turns of so many milliseconds, whether anything is generated beside each, and how long a decode step takes after it."""
    turns, now = Turns(), 0.0
    beside = alone = longest = 0.0
    for milliseconds, is_generating, step in turns_taken:
        while turns.rest_seconds:
            now += step / 1000
            alone += step / 1000
            turns.pass_time(now, is_turn=False, is_generating=True)
        now += milliseconds / 1000
        turns.pass_time(now, is_turn=True, is_generating=is_generating)
        if is_generating:
            beside += milliseconds / 1000
            longest = max(longest, milliseconds / 1000)
        else:
            assert not turns.rest_seconds
    assert beside <= alone + longest + 1e-6
