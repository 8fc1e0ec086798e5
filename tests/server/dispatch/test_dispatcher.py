"""The dispatcher before several engines: readiness, losses, places, limits, deadlines, statistics and snapshots.

That each request ends once is checked in `test_dispatcher_machine`.
"""

import asyncio
import time
from typing import Any

import pytest

from dragoman.server.dispatch.dispatcher import LOST_RETRY_SECONDS, WATCH_PATIENCE_SECONDS, WATCH_SECONDS, Dispatcher
from dragoman.server.engine.messages import (
    CallerUse,
    Command,
    EngineSnapshot,
    Finished,
    Prefill,
    Ready,
    Request,
    ScoreRequest,
    SearchOptions,
    Share,
    Shrunk,
    SlotUse,
    Snapshot,
    Statistics,
    Step,
    Tokens,
)
from dragoman.server.engine.settings import QueueLimits
from dragoman.server.errors import NotReady, QueueFull
from tests.server.conftest import until
from tests.server.dispatch.fakes import FakeCaller, FakeDispatcher, FakeEngine


def request(number: int, **fields: Any) -> Request:
    return Request(number, [5, 1], 9, float(number), **fields)


def requests(numbers: range, **fields: Any) -> list[Request]:
    return [request(number, **fields) for number in numbers]


def pair(number: int, num_tokens: int = 4, **fields: Any) -> ScoreRequest:
    return ScoreRequest(number, [5] * (num_tokens // 2), [6] * (num_tokens // 2), float(number), **fields)


def two_engines(slots: int, **limits: int) -> tuple[FakeDispatcher, list[FakeEngine], FakeCaller]:
    dispatcher = FakeDispatcher(**limits)
    return dispatcher, [FakeEngine(dispatcher, index, slots) for index in range(2)], FakeCaller(dispatcher)


def test_a_turn_of_the_event_loop_is_one_message_to_each_engine() -> None:
    _, engines, caller = two_engines(4)
    caller.submit(*requests(range(4)))
    assert [(len(engine.requests), engine.num_messages) for engine in engines] == [(2, 1), (2, 1)]
    engines[0].report(tokens=[Tokens(0, [4]), Tokens(0, [5])])
    engines[0].finish()
    assert caller.tokens == {0: [4, 5]} and caller.reasons == {0: "eos", 2: "eos"}


def test_the_model_is_ready_while_an_engine_is() -> None:
    dispatcher = FakeDispatcher()
    with pytest.raises(NotReady) as caught:
        FakeCaller(dispatcher).submit(request(1))
    assert (caught.value.message, caught.value.retry_after_seconds) == ("model 'tiny' is not ready", 2.0)
    first, second = (FakeEngine(dispatcher, index, 4) for index in range(2))
    first.lose()
    assert dispatcher.readiness == [True] and dispatcher.ready is not None
    second.lose(3.0)
    second.lose(4.0)
    first.open()
    assert dispatcher.readiness == [True, False, True] and dispatcher.device == "cpu"


def test_a_lost_engine_costs_what_it_had_and_the_last_one_everything() -> None:
    _, engines, caller = two_engines(2)
    caller.submit(*requests(range(12)), *(pair(i, 32) for i in range(20, 40)))
    gone = dict(engines[0].requests)
    had = dict.fromkeys((*engines[0].requests, *engines[0].pairs), "lost")
    engines[0].lose()
    assert len(gone) == 4 and len(had) > 4 and caller.reasons == had
    assert {end.retry_after_seconds for end in caller.ends.values()} == {LOST_RETRY_SECONDS}
    engines[0].requests = gone
    engines[0].finish()
    assert caller.reasons == had, "reports of an engine that is gone are ignored"
    engines[1].lose(2.0)
    assert caller.reasons == dict.fromkeys((*range(12), *range(20, 40)), "lost")
    assert {end.retry_after_seconds for end in caller.ends.values()} == {LOST_RETRY_SECONDS, 2.0}
    engines[0].open()
    caller.submit(request(13))
    engines[0].finish()
    assert caller.reasons[13] == "eos"


def test_a_full_queue_refuses_and_names_a_callers_limit() -> None:
    dispatcher, _, caller = two_engines(1, requests=8)
    caller.submit(*requests(range(13), share=Share("rich")))
    assert list(caller.reasons.values()) == ["queue_full"] * (13 - 8 - 2)
    assert all(end.retry_after_seconds > 0 and not end.limit for end in caller.ends.values())
    with pytest.raises(QueueFull) as caught:
        dispatcher.ensure_place(Share("rich"))
    assert caught.value.limit == "" and caught.value.retry_after_seconds == 1.0
    assert dispatcher.statistics_for_callers().without_claim == {"rich": 1.0}
    caller.submit(request(20, share=Share("narrow", max_slots=1), search=SearchOptions(num_beams=2)))
    assert isinstance(end := caller.ends[20], Finished) and end.limit == "max_slots"
    dispatcher, _, caller = two_engines(1)
    caller.submit(*requests(range(6), share=(share := Share("a", 1.0, 1, 2))))
    assert [end.limit for end in caller.ends.values()] == ["max_waiting"] * len(caller.ends) and caller.ends
    with pytest.raises(QueueFull) as caught:
        dispatcher.ensure_place(share)
    assert caught.value.limit == "max_waiting" and dispatcher.statistics_for_callers().at_their_limit == {"a": 1.0}


def test_a_caller_with_less_may_evict_a_request_of_one_with_more() -> None:
    dispatcher, _, caller = two_engines(1, requests=8)
    caller.submit(*requests(range(10), share=Share("much")))
    dispatcher.ensure_place(Share("little"))
    caller.submit(request(20, share=Share("little")))
    assert caller.reasons == {9: "queue_full"}


def test_requests_given_ahead_take_no_more_than_a_quarter_of_the_queue() -> None:
    _, engines, caller = two_engines(64, requests=16)
    caller.submit(*requests(range(200), share=Share("much")))
    assert sum(len(engine.requests) for engine in engines) == 128 + 4 and len(caller.ends) == 200 - 128 - 16
    caller.submit(request(300, share=Share("little")))
    assert 300 not in caller.ends


@pytest.mark.parametrize("idle_seconds", [0, 3600])
def test_a_retry_hint_follows_the_rate_of_completions_and_forgets_idle_time(idle_seconds: float) -> None:
    dispatcher = FakeDispatcher(requests=1)
    engine, caller = FakeEngine(dispatcher, 0, 1), FakeCaller(dispatcher)
    for i in range(20):
        dispatcher.wait(idle_seconds)
        caller.submit(request(i))
        dispatcher.wait(0.5)
        engine.finish()
    caller.submit(request(100), request(101), request(102))
    assert caller.reasons[102] == "queue_full" and caller.ends[102].retry_after_seconds == pytest.approx(0.5, rel=0.05)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    dispatcher = FakeDispatcher()
    engine, caller = FakeEngine(dispatcher, 0, 1), FakeCaller(dispatcher)
    engine.report(statistics=Statistics(steps=[Step(1, 0.5)] * 16, prefills=[Prefill(1, 10, 1.0, 1)]))
    now = dispatcher.clock.now
    caller.submit(request(0, deadline=now + 0.1))
    assert caller.reasons == {}, "an idle engine refuses nothing"
    caller.submit(request(1, deadline=now + 0.6))
    end = caller.ends[1]
    assert isinstance(end, Finished) and (end.reason, end.admitted) == ("deadline_unmet", None)
    assert end.needed_seconds == pytest.approx(0.2 + 0.5)
    caller.submit(request(2, deadline=now + 0.8))
    assert 2 not in caller.ends


async def test_deadlines_of_waiting_requests_pass_when_nothing_else_happens() -> None:
    dispatcher = Dispatcher("tiny", QueueLimits(100, 1000), 64, retry_seconds=1.0)
    engine, caller = FakeEngine(dispatcher, 0, 1), FakeCaller(dispatcher)
    deadline = time.monotonic() + 0.02
    caller.submit(*(request(i, deadline=deadline + i / 1000) for i in range(6)))
    await until(lambda: len(caller.ends) == 3)
    assert caller.reasons == dict.fromkeys((3, 4, 5), "deadline") and len(engine.requests) == 3
    assert time.monotonic() >= deadline + 0.005


async def test_a_caller_that_gives_up_cancels_its_request_wherever_it_is() -> None:
    dispatcher = Dispatcher("tiny", QueueLimits(100, 1000), 64, retry_seconds=1.0)
    engine = FakeEngine(dispatcher, 0, 1)
    tasks = [asyncio.create_task(dispatcher.generate(request(i))) for i in range(5)]
    tasks.append(asyncio.create_task(dispatcher.score(pair(9))))
    await until(lambda: len(engine.requests) == 3 and len(engine.pairs) == 1)
    for task in (tasks[1], tasks[4], tasks[5]):
        task.cancel()
    await asyncio.wait(tasks[4:])
    await until(lambda: engine.cancelled == [1, 9])
    engine.finish(1, reason="cancelled")
    engine.score(9, reason="cancelled")
    await until(lambda: len(engine.requests) == 3)
    engine.finish()
    assert [task.cancelled() for task in tasks] == [False, True, False, False, True, True]
    assert [(await tasks[i]).reason for i in (0, 2, 3)] == ["eos"] * 3 and not dispatcher._entries  # type: ignore[union-attr]
    streaming = dispatcher.stream(request(20, is_streamed=True))
    first = asyncio.ensure_future(anext(streaming))
    await until(lambda: 20 in engine.requests)
    engine.report(tokens=[Tokens(20, [4])])
    assert await first == Tokens(20, [4])
    await streaming.aclose()
    await until(lambda: engine.cancelled == [1, 9, 20])


async def test_requests_that_cannot_be_sent_end_as_lost_and_leave_their_slots() -> None:
    dispatcher = Dispatcher("tiny", QueueLimits(100, 1000), 64, retry_seconds=1.0)
    is_broken, caller = True, FakeCaller(dispatcher)

    def send(command: Command) -> None:
        if is_broken:
            raise OSError("no buffer space")

    dispatcher.open_engine(0, Ready("cpu", 2, 0.1), send)
    caller.submit(*requests(range(6)), pair(10))
    await until(lambda: len(caller.ends) == 7)
    assert set(caller.reasons.values()) == {"lost"} and dispatcher.statistics().num_places == 100 + 2
    is_broken = False
    caller.submit(*requests(range(20, 26)))
    assert dispatcher.statistics().num_places == 100 + 2 - 6 and len(caller.ends) == 7


def test_slots_that_are_given_back_go_to_others() -> None:
    dispatcher = FakeDispatcher()
    engine, caller = FakeEngine(dispatcher, 0, 8), FakeCaller(dispatcher)
    caller.submit(request(0, search=SearchOptions(num_beams=8)), *requests(range(1, 9)))
    num = len(engine.requests)
    engine.report(shrunk=[Shrunk(0, 5)])
    assert len(engine.requests) == num + 3


def test_score_requests_go_to_the_engine_with_the_least_to_score_within_the_models_limit() -> None:
    _, engines, caller = two_engines(4, turn_tokens=10)
    caller.submit(*(pair(i, 8) for i in range(10)))
    assert [len(engine.pairs) for engine in engines] == [3, 3], "two turns' worth, and what exceeds it"
    engines[1].score()
    assert [len(engine.pairs) for engine in engines] == [3, 3]
    _, _, caller = two_engines(4, requests=3, turn_tokens=10)
    for i in range(12):
        caller.submit(pair(i, 10))
    assert list(caller.reasons.values()) == ["queue_full"] * (12 - 4 - 3)
    assert {one.retry_after_seconds for one in caller.ends.values()} == {1.0}, "nothing is known yet"


def test_score_requests_go_to_all_engines_that_report_and_to_none_that_hangs() -> None:
    dispatcher, engines, caller = two_engines(4)
    dispatcher.wait(60)
    for engine in engines:
        engine.report()
    third = FakeEngine(dispatcher, 2, 4)
    caller.submit(*(pair(i) for i in range(6)))
    assert [len(engine.pairs) for engine in (*engines, third)] == [2, 2, 2]
    dispatcher.wait(3)
    for engine in engines:
        engine.report()
    caller.submit(*(pair(i) for i in range(6, 10)))
    assert [len(engine.pairs) for engine in (*engines, third)] == [4, 4, 2]


def test_score_requests_are_fair_and_bounded_by_the_limits_of_callers() -> None:
    _, (engine, _), caller = two_engines(4, turn_tokens=2)
    caller.submit(*(pair(i, share=Share("loud", max_waiting=3)) for i in range(10)))
    assert [end.limit for end in caller.ends.values()] == ["max_waiting"] * 5
    caller.submit(pair(20, share=Share("quiet")), pair(21, share=Share("first"), priority=5))
    engine.score()
    assert {20, 21} & engine.pairs.keys(), "they do not wait behind those of a caller with many"


def test_statistics_are_those_of_all() -> None:
    dispatcher, engines, caller = two_engines(2)
    caller.submit(*requests(range(12)))
    for engine in engines:
        own = Statistics(2, 4, 2, 2, cache_bytes_reserved=100, cache_bytes_used=10, steps=[Step(2, 0.1)])
        engine.report(statistics=own)
    told = dispatcher.statistics()
    assert (told.num_waiting, told.num_waiting_tokens, told.num_running, told.num_slots) == (4 + 4, 8 + 8, 4, 4)
    assert (told.cache_bytes_reserved, told.cache_bytes_used, told.steps) == (200, 20, [])
    assert told.num_places == 100 - 8


def test_without_engines_there_are_no_statistics() -> None:
    dispatcher = FakeDispatcher()
    engine, caller = FakeEngine(dispatcher, 0, 1), FakeCaller(dispatcher)
    caller.submit(request(1))
    dispatcher.wait(60)
    engine.finish()
    engine.lose()
    with pytest.raises(NotReady):
        dispatcher.statistics()
    assert dispatcher.statistics_for_callers().queue_seconds == 0


def snapshot(number: int, at: float = 1.0) -> Snapshot:
    return Snapshot([EngineSnapshot(at, [SlotUse(0, number, False, 2, 1, 9)])], [])


async def test_engines_are_asked_for_snapshots_once_for_everybody() -> None:
    dispatcher, engines, caller = two_engines(1)
    caller.submit(*requests(range(9), share=Share("alice")))
    first = dispatcher.watch()
    assert dispatcher.watch() is first
    engines[1].show(snapshot(1))
    assert not first.done()
    engines[0].show(snapshot(0))
    told = first.result()
    assert [(engine.replica, engine.slots[0].request) for engine in told.engines] == [(0, 0), (1, 1)]
    assert told.callers == [CallerUse("alice", 9 - 2, 2)], "those that an engine has in no slot wait"
    assert dispatcher.watch() is first and [engine.num_watches for engine in engines] == [1, 1]
    dispatcher.clock.now += WATCH_SECONDS
    dispatcher.watch()
    assert [engine.num_watches for engine in engines] == [2, 2]


async def test_an_engine_that_hangs_or_is_lost_holds_up_no_snapshot() -> None:
    dispatcher, engines, _ = two_engines(4)
    watching = dispatcher.watch()
    engines[0].show(snapshot(7))
    await asyncio.sleep(WATCH_PATIENCE_SECONDS / 2)
    assert not watching.done()
    assert [(one.replica, one.at) for one in (await watching).engines] == [(0, 1.0)]
    dispatcher.clock.now += WATCH_SECONDS
    watching = dispatcher.watch()
    engines[0].show(snapshot(8, at=2.0))
    assert [one.at for one in watching.result().engines] == [2.0], "one that has not answered is not asked again"
    engines[1].show(snapshot(9))
    dispatcher.clock.now += WATCH_SECONDS
    watching = dispatcher.watch()
    engines[0].show(snapshot(7, at=3.0))
    engines[1].lose()
    assert [(one.replica, one.at) for one in watching.result().engines] == [(0, 3.0)]
    assert [engine.num_watches for engine in engines] == [3, 2]
