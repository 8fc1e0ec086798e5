"""The probation of a version: what it is watched for after it has taken another's place, while that one can come back."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from dragoman.server.repository.model_file import Swap
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Refused

MIN_REQUESTS = 20
"""Fewer say little of a rate, or of a mean."""


@dataclass(slots=True)
class Probation:
    """See above.

    Attributes:
        swap: What is allowed, and how long it lasts.
        before: What became of the requests of the version that can come back, while it served.
        began: By the clock.
        clock: Seconds, monotonic.
    """

    swap: Swap
    before: Outcomes
    began: float
    clock: Callable[[], float] = time.monotonic

    @property
    def is_over(self) -> bool:
        """Whether it has been long enough."""
        return self.clock() - self.began >= self.swap.probation_seconds

    def check(self, outcomes: Outcomes, *, is_alive: bool) -> None:
        """Do nothing if all is well so far.

        Args:
            outcomes: What became of the version's requests.
            is_alive: Whether its engine has been ready all the time.

        Raises:
            Refused: If it has failed.
        """
        if not is_alive:
            raise Refused(Cause.DEATH, f"its engine ended {self.clock() - self.began:.1f} s after it began to serve")
        total = outcomes.num_answered + outcomes.num_failed
        if total < MIN_REQUESTS:
            return
        if (rate := outcomes.num_failed / total) > self.swap.max_error_rate:
            limit = f"max_error_rate is {self.swap.max_error_rate:g}"
            raise Refused(Cause.ERRORS, f"{outcomes.num_failed} of {total} requests failed, {rate:.1%}; {limit}")
        if min(outcomes.num_answered, self.before.num_answered) < MIN_REQUESTS:
            return
        seconds = outcomes.seconds / outcomes.num_answered
        usual = self.before.seconds / self.before.num_answered
        if seconds > usual * self.swap.max_latency_factor:
            limit = f"max_latency_factor is {self.swap.max_latency_factor:g}"
            raise Refused(
                Cause.LATENCY,
                f"its answers take {1000 * seconds:.0f} ms in the mean, those of the version before {1000 * usual:.0f} ms; {limit}",
            )
