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


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans(), st.booleans()), max_size=100))
def test_whoever_waits_for_the_end_of_rest_leaves_generation_half_of_its_time(steps: list[tuple[int, bool, bool]]) -> None:
    """Milliseconds, whether a turn would like to go on or begin, and whether anything is generated meanwhile."""
    turns, now, longest, turn = Turns(), 0.0, 0.0, 0.0
    beside = alone = 0.0
    is_turn = False
    for milliseconds, wants_turn, is_generating in steps:
        is_turn = wants_turn and (is_turn or not turns.rest_seconds)
        seconds = milliseconds / 1000
        now += seconds
        turns.pass_time(now, is_turn=is_turn, is_generating=is_generating)
        turn = turn + seconds if is_turn and is_generating else (turn if is_turn else 0.0)
        longest = max(longest, turn)
        if is_turn and is_generating:
            beside += seconds
        elif not is_turn:
            alone += seconds
    assert beside <= alone + longest + 1e-6
