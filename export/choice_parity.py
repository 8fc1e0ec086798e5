"""What export must prove of a step that is asked for one candidate: it is the first of many, to the last bit.

Greedy requests and beams share steps, so how many candidates a step is asked for changes with who else runs.
"""

from collections.abc import Sequence

from dragoman.export.parity import ParityError, Runner, drive
from dragoman.export.row import Row


def check_one_candidate(runner: Runner, rows: Sequence[Row], num_slots: int) -> None:
    """Decode rows again that were given several candidates, with one candidate at every step.

    Raises:
        ParityError: If one is another, or has another log-probability.
    """
    again = [row.again() for row in rows]
    drive(runner, again, num_slots, 1, False)
    for row, other in zip(rows, again, strict=True):
        if (row.choices, row.log_probs) != (other.choices, other.log_probs):
            raise ParityError(
                f"a row with {len(row.source)} source and {row.num_steps} target tokens has another first candidate where it is "
                "asked for one than where it is asked for more"
            )
