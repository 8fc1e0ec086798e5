"""Versions that have taken others' place and are on probation: what they are watched for, while the others can come back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.model_file import Swap
from dragoman.server.repository.models import Route
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Refused, Version
from dragoman.server.repository.workshop import E

MIN_REQUESTS = 20
"""Fewer say little of a rate, or of a mean."""
JUDGED_SECONDS = 5.0
"""So long at the least what a version's answers take is added up before it is called too slow, or to the end of its probation."""
SETTLING, SETTLING_SECONDS = 0.25, 10.0
"""Part of a probation, and at most so long, in which nobody is too slow: loading has taken the cores, and queues have grown."""


@dataclass(slots=True, eq=False)
class Trial(Generic[E]):
    """See above.

    Attributes:
        versions: On probation.
        fallback: Who answered before, and does so again if one of them fails.
        swap: What is allowed, and how long it lasts.
        usual: What became of the requests of the one that answered most of them before.
        clock: Seconds, monotonic.
    """

    versions: Sequence[Version[E]]
    fallback: Route[E]
    swap: Swap
    usual: Outcomes
    clock: Callable[[], float] = time.monotonic
    began: float = 0.0
    _while_settling: dict[Version[E], Outcomes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def is_over(self) -> bool:
        """Whether it has been long enough."""
        return self.clock() - self.began >= self.swap.probation_seconds

    def failed(self, outcomes: Callable[[LoadedModel[E]], Outcomes]) -> tuple[Version[E], Refused] | None:
        """Return a version that has failed, and why; None if all is well so far. What becomes of the others is told of themselves.

        Args:
            outcomes: Returns what became of a version's requests.
        """
        for version in self.versions:
            try:
                self._check(version, outcomes)
            except Refused as refused:
                return version, refused
        return None

    def _check(self, version: Version[E], outcomes: Callable[[LoadedModel[E]], Outcomes]) -> None:
        if version.has_died or (version.loaded is not None and not version.loaded.engine.is_ready):
            raise Refused(Cause.DEATH, f"its engine ended within {self.clock() - self.began:.1f} s of beginning to serve")
        if version.loaded is not None:
            found = outcomes(version.loaded)
            self._check_errors(found)
            if version.loaded.version != self.fallback.default.version:  # the same files are as fast; the machine is busier
                self._check_latency(version, found)

    def _check_errors(self, outcomes: Outcomes) -> None:
        total = outcomes.num_answered + outcomes.num_failed
        if total < MIN_REQUESTS:
            return
        if (rate := outcomes.num_failed / total) > self.swap.max_error_rate:
            limit = f"max_error_rate is {self.swap.max_error_rate:g}"
            raise Refused(Cause.ERRORS, f"{outcomes.num_failed} of {total} requests failed, {rate:.1%}; {limit}")

    def _check_latency(self, version: Version[E], outcomes: Outcomes) -> None:
        settling_seconds = min(self.swap.probation_seconds * SETTLING, SETTLING_SECONDS)
        if (seconds_passed := self.clock() - self.began) < settling_seconds:
            self._while_settling[version] = outcomes
        if seconds_passed < settling_seconds + JUDGED_SECONDS and not self.is_over:
            return
        outcomes = outcomes.since(self._while_settling.get(version, Outcomes()))
        if min(outcomes.num_answered, self.usual.num_answered) < MIN_REQUESTS:
            return
        seconds, usual = outcomes.seconds / outcomes.num_answered, self.usual.seconds / self.usual.num_answered
        if seconds > usual * self.swap.max_latency_factor:
            limit = f"max_latency_factor is {self.swap.max_latency_factor:g}"
            mean = f"its answers take {1000 * seconds:.0f} ms in the mean, those of the version before {1000 * usual:.0f} ms"
            raise Refused(Cause.LATENCY, f"{mean}; {limit}")
