"""The front ends that are attached to a desk, and what is to be told to each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dragoman.server.engine.messages import Event, Finished, Report, Scored, Statistics, Tokens

REPORT_SECONDS = 0.05
"""How old the statistics may be that a front end without news has, unless nothing has happened."""


@dataclass(slots=True, eq=False)
class FrontEnd:
    """One of them.

    Attributes:
        deliver: Tells it something.
        num_received: Requests that have come from it.
        last_report: When it was told how things stand.
        is_stale: Whether anything may have changed since.
        tokens: What it is to be told next, as the next two.
        finished: See `Report`.
        scored: See `Report`.
    """

    deliver: Callable[[Event], None]
    num_received: int = 0
    last_report: float = 0.0
    is_stale: bool = False
    tokens: list[Tokens] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)

    def is_due(self, now: float) -> bool:
        """Return whether it has to be told something."""
        return bool(self.tokens or self.finished or self.scored) or (self.is_stale and now >= self.last_report + REPORT_SECONDS)

    def report(self, now: float, statistics: Statistics) -> None:
        """Tell it what there is to tell."""
        report = Report(self.tokens, self.finished, statistics, self.scored, self.num_received)
        self.tokens, self.finished, self.scored = [], [], []
        self.last_report, self.is_stale = now, False
        self.deliver(report)


class FrontEnds:
    """See above. What is to be told to one that is not attached is forgotten."""

    def __init__(self) -> None:
        self._attached: dict[bytes, FrontEnd] = {}

    def __contains__(self, origin: bytes) -> bool:
        """Return whether a front end is attached."""
        return origin in self._attached

    @property
    def next_report(self) -> float:
        """When somebody is to be told how things stand, if nothing happens before; infinity for never."""
        stale = (one.last_report + REPORT_SECONDS for one in self._attached.values() if one.is_stale)
        return min(stale, default=math.inf)

    def attach(self, origin: bytes, deliver: Callable[[Event], None]) -> None:
        """Begin to tell a front end what happens."""
        self._attached[origin] = FrontEnd(deliver)

    def detach(self, origin: bytes) -> None:
        """Tell it nothing more."""
        self._attached.pop(origin, None)

    def receive(self, origin: bytes, num_requests: int) -> None:
        """Count requests that have come from a front end."""
        self._attached[origin].num_received += num_requests

    def add_tokens(self, origin: bytes, tokens: Tokens) -> None:
        """Note new tokens of a streamed request."""
        if (front_end := self._attached.get(origin)) is not None:
            front_end.tokens.append(tokens)

    def add_finished(self, origin: bytes, finished: Finished) -> None:
        """Note how a request ended."""
        if (front_end := self._attached.get(origin)) is not None:
            front_end.finished.append(finished)

    def add_scored(self, origin: bytes, scored: Scored) -> None:
        """Note how a pair ended."""
        if (front_end := self._attached.get(origin)) is not None:
            front_end.scored.append(scored)

    def tell(self, event: Event) -> None:
        """Tell everybody an event."""
        for front_end in list(self._attached.values()):
            front_end.deliver(event)

    def tell_one(self, origin: bytes, event: Event) -> None:
        """Tell a front end an event."""
        if (front_end := self._attached.get(origin)) is not None:
            front_end.deliver(event)

    def report(self, now: float, describe: Callable[[], Statistics], *, has_changed: bool = True) -> None:
        """Tell news to those for whom there are some, and how things stand to those who have not heard that for a while.

        Args:
            now: The time.
            describe: Returns how things stand; not called if nobody is to be told.
            has_changed: Whether they may stand otherwise than at the last time.
        """
        for front_end in self._attached.values():
            front_end.is_stale |= has_changed
        if due := [front_end for front_end in self._attached.values() if front_end.is_due(now)]:
            statistics = describe()
            for front_end in due:
                front_end.report(now, statistics)
