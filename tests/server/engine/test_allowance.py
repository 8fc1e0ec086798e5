"""A share of time: kept on average, never saved up, never lost for good."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.engine.allowance import MAX_DEBT_SECONDS, Allowance
from tests.examples import num_examples

SECONDS = st.floats(0.0001, 0.02)


@settings(max_examples=num_examples(60, of=300), deadline=None, derandomize=True)
@given(st.sampled_from([0.1, 1 / 3, 0.5, 0.9]), st.lists(st.tuples(SECONDS, st.lists(SECONDS, max_size=5)), max_size=60))
def test_work_takes_its_share_and_one_piece_at_the_most(share: float, steps: list[tuple[float, list[float]]]) -> None:
    allowance, others, work, longest = Allowance(share), 0.0, 0.0, 0.0
    for step_seconds, pieces in steps:
        allowance.earn(step_seconds)
        others += step_seconds
        in_this_step = 0.0
        for piece in pieces:
            if not allowance.is_open:
                break
            allowance.spend(piece)
            work, in_this_step, longest = work + piece, in_this_step + piece, max(longest, piece)
        assert in_this_step <= step_seconds * share / (1 - share) + longest + 1e-9
        assert work <= others * share / (1 - share) + longest + 1e-9


def test_what_is_not_used_is_not_saved_up() -> None:
    allowance = Allowance(0.5)
    for _ in range(1000):
        allowance.earn(0.01)
    allowance.spend(0.011)
    assert not allowance.is_open


def test_a_debt_is_paid_off_by_what_others_have() -> None:
    allowance = Allowance(1 / 3)
    allowance.spend(0.1)
    num_steps = 0
    while not allowance.is_open:
        allowance.earn(0.01)
        num_steps += 1
    assert num_steps == 20, "half a step's time each"


def test_a_stall_does_not_close_it_for_long() -> None:
    allowance = Allowance(0.5)
    allowance.spend(3600.0)
    allowance.earn(MAX_DEBT_SECONDS)
    assert allowance.is_open


def test_it_is_open_where_time_stands_still() -> None:
    allowance = Allowance(0.5)
    for _ in range(3):
        allowance.earn(0.0)
        allowance.spend(0.0)
        assert allowance.is_open


def test_nothing_is_owed_where_nobody_waits() -> None:
    allowance = Allowance(0.5)
    allowance.spend(0.5)
    allowance.clear()
    assert allowance.is_open
