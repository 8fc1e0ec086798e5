"""Sending: when calls leave, what their latency counts from, and when the sender is to blame; on a clock that the tests move."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import pytest

from dragoman.load.items import Item, Items
from dragoman.load.plan import Plan
from dragoman.load.run import SLOW_SENDER
from dragoman.load.schedule import Arrivals
from dragoman.load.sender import Sender
from dragoman.load.tally import UNSENT, Outcome
from dragoman.load.worker import Progress
from tests.load.conftest import make_plan, run_of

CONSTANT = Arrivals(100.0, "constant")
LOOPS = pytest.mark.parametrize("loop", [{"arrivals": CONSTANT}, {"concurrency": 7}], ids=["open", "closed"])


class Clock(selectors.SelectSelector):
    """Waits by moving the clock."""

    seconds = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout:
            self.seconds += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop on a clock that stands still while the loop works."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.seconds


class Calls:
    """Calls that are answered after `seconds`, after they kept the sender's processor busy for `busy(due)` seconds."""

    def __init__(self, loop: Loop, seconds: float, busy: Callable[[float], float]) -> None:
        self.made: list[tuple[Item, float]] = []
        self.num_running = self.max_running = self.num_cancelled = 0
        self._loop, self._seconds, self._busy = loop, seconds, busy

    async def call(self, item: Item, due: float) -> None:
        self.made.append((item, due))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self._loop.clock.seconds += self._busy(due)
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.num_running -= 1
        self.sender.record(Outcome(item.group, False, due, self._loop.time()))


def send(
    plan: Plan, seconds: float = 0.05, busy: Callable[[float], float] = lambda due: 0.0, at: Any = None
) -> tuple[Sender, Calls]:
    """Carry out a plan; `at` is a time and a method of the sender to call then."""
    loop = Loop()
    calls = Calls(loop, seconds, busy)
    calls.sender = sender = Sender(plan, loop.time, Items(plan))
    if at is not None:
        loop.call_at(at[0], lambda: getattr(sender, at[1])())
    try:
        loop.run_until_complete(sender.run(calls.call))
    finally:
        loop.close()
    return sender, calls


def warnings(plan: Plan, busy_seconds: float) -> list[str]:
    """Return the warnings about the sender in the result of a plan."""
    sender, _ = send(plan, busy=lambda due: busy_seconds)
    run = run_of(plan, Progress(sender.take(), sender.num_sent, 0, 0.0, sender.end, sender.is_cut, True))
    return [text for text in run.result({}, {}).warnings if "sender" in text]


def test_an_open_loop_sends_at_the_times_due_and_a_closed_one_waits_for_answers() -> None:
    sender, calls = send(make_plan(arrivals=CONSTANT, seconds=0.3), 0.1)
    assert [due for _, due in calls.made] == pytest.approx([i / 100 for i in range(30)])
    tally = sender.take()
    assert sender.num_sent == tally.groups["unary"].num == tally.lag.num == 30
    assert tally.lag.largest == pytest.approx(0, abs=1e-9)
    assert calls.max_running in (10, 11) and tally.slices[0].in_flight >= 10 and sender.end == pytest.approx(0.3)
    sender, calls = send(make_plan(concurrency=3, seconds=0.35), 0.1)
    assert (calls.max_running, len(calls.made), sender.num_sent) == (3, 12, 12)
    assert sorted(due for _, due in calls.made) == pytest.approx([0.0] * 3 + [0.1] * 3 + [0.2] * 3 + [0.3] * 3)


def test_latency_counts_from_the_schedule_when_the_sender_is_blocked() -> None:
    sender, _ = send(make_plan(arrivals=CONSTANT, seconds=0.3), 0.0, lambda due: 0.3 if due == 0.05 else 0.0)
    tally = sender.take()
    e2e = tally.groups["unary"].times["e2e"]
    assert e2e.num == 30 and e2e.largest >= 0.29
    # Of the 24 calls that are due while it is blocked, those of the last 50 ms wait shorter than 100 ms.
    assert e2e.share_within(0.1) == pytest.approx(10 / 30, abs=2 / 30)
    assert tally.lag.largest >= 0.28 and tally.loop_lag.largest >= 0.24


def test_calls_beyond_the_most_under_way_are_counted_and_not_sent() -> None:
    sender, calls = send(make_plan(arrivals=CONSTANT, seconds=0.2, max_in_flight=4), 1.0)
    group = sender.take().groups["unary"]
    assert (group.num, group.num_ok, group.failures, len(calls.made)) == (20, 4, {UNSENT: 16}, 4)


@LOOPS
def test_processes_together_send_what_one_would(loop: dict) -> None:
    parts = make_plan(seconds=5.0, max_calls=23, num_processes=3, seed=2, **loop).parts()
    ids = [item.requests[0].request_id for part in parts for item, _ in send(part)[1].made]
    assert sorted(ids) == sorted(f"load-{number}-0" for number in range(23))
    assert [part.concurrency for part in parts] == ([3, 2, 2] if "concurrency" in loop else [0, 0, 0])


def test_a_trace_is_sent_as_it_says(tmp_path) -> None:
    (tmp_path / "trace").write_text('0.01\n{"at": 0.05, "text": "a dog"}\n0.05\n9.0\n')
    _, calls = send(make_plan(trace=str(tmp_path / "trace"), seconds=0.2))
    assert [due for _, due in calls.made] == [0.01, 0.05, 0.05]
    assert calls.made[1][0].requests[0].text == "a dog"


@LOOPS
@pytest.mark.parametrize("method", ["stop", "give_up"])
def test_stopping_lets_calls_end_and_giving_up_cancels_them(loop: dict, method: str) -> None:
    sender, calls = send(make_plan(seconds=1000.0, **loop), 10.0, at=(0.101, method))
    assert sender.end == pytest.approx(0.101) and sender.num_in_flight == 0
    assert len(calls.made) == (11 if "arrivals" in loop else 7)
    if method == "stop":
        assert sender.take().groups["unary"].num_ok == len(calls.made)
    else:
        assert calls.num_cancelled == len(calls.made)


def test_calls_that_do_not_end_are_given_up_after_their_timeout() -> None:
    _, calls = send(make_plan(arrivals=CONSTANT, seconds=0.1, timeout_seconds=1.0), 1000.0)
    assert calls.num_cancelled == len(calls.made) == 10


@pytest.mark.parametrize(
    ("loop", "busy_seconds", "reason"),
    [
        ({"arrivals": Arrivals(50.0)}, 0.0, None),
        ({"concurrency": 4}, 0.0, None),
        ({"arrivals": Arrivals(50.0, "constant")}, 0.022, "of its calls left more than 10 ms late"),
        ({"concurrency": 4}, 0.022, "its event loop was more than 10 ms late"),
    ],
)
def test_a_sender_is_blamed_where_its_own_work_delays_calls(loop: dict, busy_seconds: float, reason: str | None) -> None:
    told = warnings(make_plan(seconds=20.0, **loop), busy_seconds)
    assert len(told) == (reason is not None)
    assert reason is None or (told[0].startswith(f"{SLOW_SENDER}: ") and reason in told[0])


def test_lateness_of_the_warm_up_does_not_count() -> None:
    plan = make_plan(seconds=20.0, warmup_seconds=2.0, arrivals=Arrivals(50.0, "constant"))
    sender, _ = send(plan, busy=lambda due: 0.0 if due else 1.9)
    tally = sender.take()
    assert tally.lag.num == 900 and tally.lag.largest < 0.001 and tally.loop_lag.largest < 0.001
    assert tally.slices[1].e2e.largest > 0.9  # but the calls of that time are charged for it


def test_a_sender_that_would_never_end_stops_when_the_time_is_over() -> None:
    plan = make_plan(seconds=10.0, arrivals=Arrivals(1e9), max_in_flight=10**9)
    sender, _ = send(plan, busy=lambda due: 0.5)
    assert sender.is_cut and sender.num_sent <= 31
    assert any("stopped when the time was over" in warning for warning in warnings(plan, 0.5))
