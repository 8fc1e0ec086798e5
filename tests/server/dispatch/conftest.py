"""A desk whose replicas and front ends are played by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from dragoman.server.dispatch.desk import Desk
from dragoman.server.engine.messages import (
    Answer,
    Cancel,
    Command,
    Event,
    Finished,
    FinishReason,
    Ready,
    Report,
    Request,
    Score,
    Scored,
    ScoreRequest,
    Statistics,
    Submit,
)
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.snapshot import Snapshot, Watch


class HandReplica:
    """A replica that does what the test says; requests and cancellations that have come are kept by number."""

    def __init__(self, desk: Desk, index: int, max_slots: int) -> None:
        self.desk, self.index = desk, index
        self.requests: dict[int, Request] = {}
        self.pairs: dict[int, ScoreRequest] = {}
        self.cancelled: list[int] = []
        self.num_watches = 0
        self._max_slots = max_slots
        self.open()

    def open(self) -> None:
        self.desk.open_replica(self.index, Ready("cpu", self._max_slots, 0.1), self._take)

    def lose(self, retry_after_seconds: float = 0.5) -> None:
        self.requests.clear()
        self.pairs.clear()
        self.desk.close_replica(self.index, "it ended", retry_after_seconds)

    def number(self, arrival: float) -> int:
        """Return the number of a request, which the tests know by its arrival."""
        return next(number for number, request in self.requests.items() if request.arrival == arrival)

    def say(self, **fields: Any) -> None:
        report = {"tokens": [], "finished": [], "statistics": Statistics(), "scored": []} | fields
        self.desk.hear(self.index, Report(**report))

    def show(self, snapshot: Snapshot) -> None:
        """Answer who looks."""
        self.desk.hear_snapshot(self.index, snapshot)

    def finish(self, *numbers: int, reason: FinishReason = "eos") -> None:
        """End requests; all there are if none are named."""
        ended = numbers or tuple(self.requests)
        for number in ended:
            del self.requests[number]
        answers = [Answer([9], [-0.5], -0.5, "eos")] if reason == "eos" else []
        self.say(finished=[Finished(number, reason, answers, 2, 1.0, 0.1, 1.5, 2.0) for number in ended])

    def score(self) -> None:
        """End all pairs."""
        numbers = list(self.pairs)
        self.pairs.clear()
        self.say(scored=[Scored(number, "eos", [-1.0], b"", 2.0) for number in numbers])

    def _take(self, command: Command) -> None:
        match command:
            case Submit(requests):
                self.requests |= {request.id: request for request in requests}
            case Score(pairs):
                self.pairs |= {pair.id: pair for pair in pairs}
            case Cancel(ids):
                self.cancelled += ids
            case Watch():
                self.num_watches += 1
            case other:
                raise AssertionError(other)


class HandFrontEnd:
    """A front end: what it was told, by kind."""

    def __init__(self, desk: Desk, origin: bytes = b"front") -> None:
        self.desk, self.origin = desk, origin
        self.events: list[Event] = []
        desk.attach(origin, self.events.append)

    def submit(self, *requests: Request) -> None:
        self.desk.take(self.origin, Submit(list(requests)))

    def score(self, *pairs: ScoreRequest) -> None:
        self.desk.take(self.origin, Score(list(pairs)))

    def cancel(self, *ids: int) -> None:
        self.desk.take(self.origin, Cancel(list(ids)))

    def watch(self) -> None:
        self.desk.take(self.origin, Watch())

    @property
    def snapshots(self) -> list[Snapshot]:
        return [event for event in self.events if isinstance(event, Snapshot)]

    @property
    def reports(self) -> list[Report]:
        return [event for event in self.events if isinstance(event, Report)]

    @property
    def ends(self) -> dict[int, Finished]:
        finished = [one for report in self.reports for one in report.finished]
        assert len({one.id for one in finished}) == len(finished), "a request ends once"
        return {one.id: one for one in finished}

    @property
    def reasons(self) -> dict[int, str]:
        return {number: finished.reason for number, finished in self.ends.items()}

    @property
    def scored(self) -> dict[int, Scored]:
        return {one.id: one for report in self.reports for one in report.scored}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class HandDesk(Desk):
    """A desk for which time passes when a test says so, without an event loop."""

    def let_time_pass(self) -> None:
        """Do what an alarm does."""
        self._on_alarm()

    def _set_alarm(self) -> None:
        pass


@pytest.fixture
def make_desk(clock: Clock) -> Callable[..., Desk]:
    def make(slots: int = 4, requests: int = 100, tokens: int = 1000, budget: int = 64) -> Desk:
        return HandDesk(Limits(slots, requests, tokens, budget), clock)

    return make
