"""Which version of a model was to answer when, as the server's log tells it, and whether answers came from such a one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

SERVED, PROVED, REFUSED = "versions that serve", "a version is loaded and proved", "a version is refused"


@dataclass(slots=True)
class Period:
    """A time in which a version answered requests.

    Attributes:
        version: By its content.
        since: When its publication began, seconds since 1970.
        published: When every front end had it.
        until: When every front end had its successor; infinite while it has none.
    """

    version: str
    since: float
    published: float
    until: float = float("inf")


class Timeline:
    """The periods of each model's versions.

    A publication takes a moment: from its beginning, which is the line that says that a version was proved or refused, or what was
    done to the folder, to the line that says that all front ends have it. A call that was under way in that moment may be answered
    by either.

    Attributes:
        periods: By model, in the order in which they began.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]], asked: Mapping[str, Iterable[float]] | None = None) -> None:
        """Read a log.

        Args:
            events: Its lines, in order.
            asked: Times at which something was done to a model's folder.
        """
        self.periods: dict[str, list[Period]] = {}
        begun: dict[str, list[float]] = {}
        last: dict[str, float] = {}
        for event in events:
            if event.get("event") not in (SERVED, PROVED, REFUSED):
                continue
            model, now = event["model"], seconds_of(event)
            if event["event"] != SERVED:
                begun.setdefault(model, []).append(now)
                continue
            periods, served = self.periods.setdefault(model, []), set(event["versions"].values())
            since = self._begin(begun.pop(model, []), (asked or {}).get(model, ()), last.get(model), now)
            running = {period.version for period in periods if period.until == float("inf")}
            for period in periods:
                if period.version in running - served and period.until == float("inf"):
                    period.until = now
            periods += [Period(version, since, now) for version in served - running]
            last[model] = now

    def allows(self, model: str, version: str, began: float, ended: float) -> bool:
        """Return whether a version answered requests at some moment between a call's beginning and its end."""
        periods = self.periods.get(model, [])
        return any(one.version == version and one.since <= ended and began <= one.until for one in periods)

    def changes(self, model: str) -> list[tuple[float, float]]:
        """Return when publications after the first began and had reached every front end."""
        times = sorted({(one.since, one.published) for one in self.periods.get(model, [])})
        return times[1:]

    @staticmethod
    def _begin(begun: list[float], asked: Iterable[float], last: float | None, now: float) -> float:
        if begun:
            return begun[-1]
        return max((time for time in asked if time <= now and (last is None or time > last)), default=now)


def seconds_of(event: Mapping[str, Any]) -> float:
    """Return when a line was logged, seconds since 1970."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()
