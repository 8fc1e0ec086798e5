"""Engines and callers of a dispatcher that do what a test says."""

from typing import Any

from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.engine.messages import (
    Answer,
    Cancel,
    Command,
    Finished,
    FinishReason,
    Ready,
    Report,
    Request,
    Score,
    Scored,
    ScoreRequest,
    Snapshot,
    Statistics,
    Submit,
    Tokens,
    Watch,
)
from dragoman.server.engine.settings import QueueLimits
from tests.clock import Clock


class FakeDispatcher(Dispatcher):
    """A dispatcher for which time passes when a test says so, without an event loop; `readiness` is what it told of that."""

    def __init__(self, requests: int = 100, tokens: int = 1000, turn_tokens: int = 64) -> None:
        self.clock = Clock(100.0)
        self.readiness: list[bool] = []
        super().__init__(
            "tiny",
            QueueLimits(requests, tokens),
            turn_tokens,
            retry_seconds=2.0,
            on_change=lambda: self.readiness.append(self.is_ready),
            clock=self.clock,
        )

    def wait(self, seconds: float = 0.0) -> None:
        """Let time pass, and then a turn of the event loop."""
        self.clock.now += seconds
        self._on_turn()

    def _schedule(self) -> None:
        pass

    def _set_alarm(self) -> None:
        pass


class FakeEngine:
    """An engine; requests and cancellations that have come are kept."""

    def __init__(self, dispatcher: Dispatcher, index: int, max_slots: int) -> None:
        self.dispatcher, self.index = dispatcher, index
        self.requests: dict[int, Request] = {}
        self.pairs: dict[int, ScoreRequest] = {}
        self.cancelled: list[int] = []
        self.num_messages = self.num_watches = 0
        self._max_slots = max_slots
        self.open()

    def open(self) -> None:
        self.dispatcher.open_engine(self.index, Ready("cpu", self._max_slots, 0.1), self._take)

    def lose(self, retry_after_seconds: float = 0.5) -> None:
        self.requests.clear()
        self.pairs.clear()
        self.dispatcher.close_engine(self.index, retry_after_seconds)

    def report(self, **fields: Any) -> None:
        self.dispatcher.hear(self.index, Report(**{"tokens": [], "finished": [], "statistics": Statistics()} | fields))

    def show(self, snapshot: Snapshot) -> None:
        """Answer a `Watch`."""
        self.dispatcher.hear_snapshot(self.index, snapshot)

    def finish(self, *numbers: int, reason: FinishReason = "eos") -> None:
        """End requests; all there are if none are named."""
        ended = numbers or tuple(self.requests)
        for number in ended:
            del self.requests[number]
        answers = [Answer([9], [-0.5], -0.5, "eos")] if reason == "eos" else []
        self.report(finished=[Finished(number, reason, answers, 2, 1.0, 0.1, 1.5, 2.0) for number in ended])

    def score(self, *numbers: int, reason: FinishReason = "eos") -> None:
        """End score requests; all there are if none are named."""
        ended = numbers or tuple(self.pairs)
        for number in ended:
            del self.pairs[number]
        self.report(scored=[Scored(number, reason, [-1.0], b"", 2.0) for number in ended])

    def _take(self, command: Command) -> None:
        self.num_messages += 1
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


class FakeCaller:
    """A caller: what was delivered of each request."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finished | Scored] = {}

    def submit(self, *requests: Request | ScoreRequest) -> None:
        """Submit requests in one turn of the event loop."""
        for request in requests:
            self.dispatcher.submit(request, self._deliver)
        self.dispatcher._on_turn()

    def cancel(self, *numbers: int) -> None:
        for number in numbers:
            self.dispatcher.cancel(number)
        self.dispatcher._on_turn()

    @property
    def reasons(self) -> dict[int, str]:
        return {number: end.reason for number, end in self.ends.items()}

    def _deliver(self, event: Tokens | Finished | Scored) -> None:
        assert event.id not in self.ends, "a request ends once, and last"
        if isinstance(event, Tokens):
            self.tokens.setdefault(event.id, []).extend(event.token_ids)
        else:
            self.ends[event.id] = event
