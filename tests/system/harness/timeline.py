"""Periods in which each version of a model was to answer requests, as the server's log tells them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.system.harness.callers import Answer
from tests.system.harness.server import Event

FOREVER = float("inf")


@dataclass(slots=True)
class Period:
    """A time in which a version answered, in seconds since 1970, from when its publication began."""

    version: str
    since: float
    until: float = FOREVER


class Timeline:
    """The periods of each model's versions.

    A publication takes a moment: from the line that says that a version was proved or refused, or from the change of the folder,
    to the line that says that all frontends have it. A call that was under way in that moment may be answered by either.

    Attributes:
        periods: By model, in the order in which they began.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]], changes: Mapping[str, Iterable[float]]) -> None:
        """Read a log; `changes` are times at which something was done to a model's folder."""
        self.periods: dict[str, list[Period]] = {}
        begun: dict[str, float] = {}
        last: dict[str, float] = {}
        for event in events:
            if event["event"] in (Event.VERSION_PROVED, Event.VERSION_REFUSED):
                begun[event["model"]] = seconds_of(event)
            elif event["event"] == Event.VERSIONS_SERVE:
                model, now = event["model"], seconds_of(event)
                changed = [time for time in changes.get(model, ()) if last.get(model, 0.0) < time <= now]
                since = begun.pop(model, max(changed, default=now))
                periods, served = self.periods.setdefault(model, []), set(event["versions"].values())
                running = {period.version: period for period in periods if period.until == FOREVER}
                for version in running.keys() - served:
                    running[version].until = now
                periods += [Period(version, since) for version in served - running.keys()]
                last[model] = now

    def versions(self, model: str) -> list[str]:
        """Return the versions of a model's periods."""
        return [period.version for period in self.periods[model]]

    def wrong(self, answers: Iterable[Answer]) -> list[Answer]:
        """Return the answers by a version that was to answer at no moment of the call."""
        return [answer for answer in answers if not answer.error and not self._allows(answer)]

    def _allows(self, answer: Answer) -> bool:
        periods = [period for period in self.periods.get(answer.model, []) if period.version == answer.version]
        return any(period.since <= answer.ended and answer.began <= period.until for period in periods)


def seconds_of(event: Mapping[str, Any]) -> float:
    """Return when a line was logged, seconds since 1970."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()
