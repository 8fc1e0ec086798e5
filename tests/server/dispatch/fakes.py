"""Replicas and front ends of a desk that do what a test says."""

from typing import Any

from dragoman.server.dispatch.desk import Desk
from dragoman.server.engine.scheduler import Limits

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
from dragoman.server.engine.snapshot import Snapshot, Watch
from tests.server.engine.bench import FakeClock


class FakeDesk(Desk):
    """A desk for which time passes when a test says so, without an event loop."""

    def __init__(self, slots: int = 4, requests: int = 100, tokens: int = 1000, budget: int = 64) -> None:
        self.clock = FakeClock()
        super().__init__(Limits(slots, requests, tokens, budget), self.clock)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self._on_alarm()

    def _set_alarm(self) -> None:
        pass


class FakeReplica:
    """A replica; requests and cancellations that have come are kept by number."""

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

    @property
    def arrivals(self) -> list[float]:
        return sorted(one.arrival for one in self.requests.values())

    def report(self, **fields: Any) -> None:
        self.desk.hear(self.index, Report(**{"tokens": [], "finished": [], "statistics": Statistics(), "scored": []} | fields))

    def show(self, snapshot: Snapshot) -> None:
        """Answer a `Watch`."""
        self.desk.hear_snapshot(self.index, snapshot)

    def finish(self, *numbers: int, reason: FinishReason = "eos") -> None:
        """End requests; all there are if none are named."""
        ended = numbers or tuple(self.requests)
        for number in ended:
            del self.requests[number]
        answers = [Answer([9], [-0.5], -0.5, "eos")] if reason == "eos" else []
        self.report(finished=[Finished(number, reason, answers, 2, 1.0, 0.1, 1.5, 2.0) for number in ended])

    def score(self, *numbers: int, reason: FinishReason = "eos") -> None:
        """End pairs; all there are if none are named."""
        ended = numbers or tuple(self.pairs)
        for number in ended:
            del self.pairs[number]
        self.report(scored=[Scored(number, reason, [-1.0], b"", 2.0) for number in ended])

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


class FakeFrontEnd:
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
    def scored(self) -> dict[int, Scored]:
        scored = [one for report in self.reports for one in report.scored]
        assert len({one.id for one in scored}) == len(scored), "a pair ends once"
        return {one.id: one for one in scored}

    @property
    def reasons(self) -> dict[int, str]:
        """Reasons of finished requests and pairs, by id."""
        return {number: end.reason for number, end in (*self.ends.items(), *self.scored.items())}
