"""The desk before several replicas: readiness, losses, places, limits, reports and snapshots.

That each request and each pair ends once, where it was asked for, is checked in `test_desk_machine`.
"""

import asyncio
import time
from typing import Any

from dragoman.server.dispatch.desk import LOST_RETRY_SECONDS, Desk
from dragoman.server.dispatch.watch_desk import PATIENCE_SECONDS, SHORTEST_SECONDS
from dragoman.server.engine.scheduler import Limits

from dragoman.server.engine.messages import (
    Down,
    Hello,
    Ready,
    Report,
    Request,
    ScoreRequest,
    SearchOptions,
    Share,
    Shrunk,
    Statistics,
    Step,
    Stop,
    Tokens,
)
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, SlotUse, Snapshot
from tests.server.dispatch.fakes import FakeDesk, FakeFrontEnd, FakeReplica


def request(number: int, **fields: Any) -> Request:
    """Return a request whose arrival is its number, which is what replicas are told of both."""
    return Request(number, [5, 1], 9, float(number), **fields)


def requests(numbers: range, **fields: Any) -> list[Request]:
    return [request(number, **fields) for number in numbers]


def pair(number: int, num_tokens: int = 4) -> ScoreRequest:
    return ScoreRequest(number, [5] * (num_tokens // 2), [6] * (num_tokens // 2), float(number))


def two_replicas(slots: int, **limits: int) -> tuple[FakeDesk, list[FakeReplica], FakeFrontEnd]:
    desk = FakeDesk(slots, **limits)
    return desk, [FakeReplica(desk, index, slots) for index in range(2)], FakeFrontEnd(desk)


def test_answers_and_tokens_go_where_they_were_asked_for() -> None:
    desk, replicas, ours = two_replicas(4)
    theirs = FakeFrontEnd(desk, b"theirs")
    ours.submit(request(1, is_streamed=True, priority=3, share=Share("a", 2.0, 2, 5)), request(2))
    theirs.submit(request(1))
    for command in (Hello(), Stop()):
        desk.take(b"front", command)  # which are not for a desk
    told = [one for replica in replicas for one in replica.requests.values()]
    assert len({one.id for one in told}) == 3
    assert [one.priority for one in told if one.share == Share("a", 2.0)] == [3], "a replica keeps order, but no limits"
    for replica in replicas:
        for number, one in replica.requests.items():
            if one.is_streamed:
                replica.report(tokens=[Tokens(number, [4]), Tokens(number, [5])])
        replica.finish()
    assert [tokens for report in ours.reports for tokens in report.tokens] == [Tokens(1, [4]), Tokens(1, [5])]
    assert not any(report.tokens for report in theirs.reports)
    assert ours.reasons == {1: "eos", 2: "eos"} and theirs.reasons == {1: "eos"}
    assert (ours.reports[-1].num_received, theirs.reports[-1].num_received) == (2, 1)


def test_a_front_end_is_told_when_the_model_is_ready_and_when_not() -> None:
    desk = FakeDesk()
    early = FakeFrontEnd(desk, b"early")
    assert early.events == []
    first, second = (FakeReplica(desk, index, 4) for index in range(2))
    late = FakeFrontEnd(desk, b"late")
    ready = Ready("cpu", 4, 0.1)
    assert [event for event in early.events if not isinstance(event, Report)] == [ready] == late.events[:1]
    first.lose()
    assert not any(isinstance(event, Down) for event in early.events)
    second.lose(3.0)
    second.lose(4.0)
    assert [event for event in early.events if isinstance(event, Down)] == [Down("it ended", 3.0)]
    first.open()
    assert [event for event in late.events if isinstance(event, Ready)] == [ready, ready]


def test_a_lost_replica_costs_what_it_had_and_the_last_one_everything() -> None:
    _, replicas, front = two_replicas(2)
    front.submit(*requests(range(12)))
    front.score(*map(pair, range(20, 60)))
    had = dict.fromkeys(map(int, replicas[0].arrivals), "lost")
    gone = dict(replicas[0].requests)
    had_pairs = dict.fromkeys((int(one.arrival) for one in replicas[0].pairs.values()), "lost")
    replicas[0].lose()
    assert len(had) == 4 and had_pairs and front.reasons == had | had_pairs
    assert {end.retry_after_seconds for end in front.ends.values()} == {LOST_RETRY_SECONDS}
    replicas[0].requests = gone
    replicas[0].finish()
    assert front.reasons == had | had_pairs, "what a replica that is gone tells is not heard"
    replicas[1].lose(2.0)
    assert front.reasons == dict.fromkeys((*range(12), *range(20, 60)), "lost") and isinstance(front.events[-1], Down)
    assert {end.retry_after_seconds for end in front.ends.values()} == {LOST_RETRY_SECONDS, 2.0}
    front.submit(request(12))
    front.score(pair(60))
    assert front.reasons[12] == front.reasons[60] == "lost"
    replicas[0].open()
    front.submit(request(13))
    replicas[0].finish()
    assert front.reasons[13] == "eos"


def test_a_full_queue_refuses_and_names_a_callers_limit() -> None:
    _, _, front = two_replicas(1, requests=4)
    front.submit(*requests(range(9), share=Share("rich")))
    assert list(front.reasons.values()) == ["queue_full"] * (9 - 4 - 2)
    assert all(end.retry_after_seconds > 0 and not end.limit for end in front.ends.values())
    statistics = front.reports[-1].statistics
    assert statistics.num_places is not None and statistics.num_places <= 0
    assert set(statistics.without_claim or {}) <= {"rich"}
    _, _, front = two_replicas(1)
    front.submit(*requests(range(6), share=Share("a", 1.0, 1, 2)))
    assert [end.limit for end in front.ends.values()] == ["max_waiting"] * len(front.ends) and front.ends
    assert "a" in front.reports[-1].statistics.at_their_limit


async def test_deadlines_pass_and_places_are_told_when_nothing_else_happens() -> None:
    desk = Desk(Limits(1, 0, 1000, 64))
    replica = FakeReplica(desk, 0, 1)
    idle, busy = FakeFrontEnd(desk, b"idle"), FakeFrontEnd(desk, b"busy")
    busy.submit(request(1))
    async with asyncio.timeout(30):
        while not (idle.reports and idle.reports[-1].statistics.num_places == 0):
            await asyncio.sleep(0.001)
        replica.finish()
        while idle.reports[-1].statistics.num_places != 1:
            await asyncio.sleep(0.001)
        while desk._alarm is not None:  # while nothing happens nothing is told
            await asyncio.sleep(0.001)
        desk = Desk(Limits(1, 100, 1000, 64))
        replica, front = FakeReplica(desk, 0, 1), FakeFrontEnd(desk)
        deadline = time.monotonic() + 0.02
        front.submit(*(request(i, deadline=deadline + i / 1000) for i in range(6)))
        while len(front.ends) < 3:
            await asyncio.sleep(0.001)
    assert front.reasons == dict.fromkeys((3, 4, 5), "deadline") and len(replica.requests) == 3
    assert time.monotonic() >= deadline + 0.005


def test_slots_that_are_given_back_go_to_others() -> None:
    desk = FakeDesk(8)
    replica, front = FakeReplica(desk, 0, 8), FakeFrontEnd(desk)
    front.submit(request(0, search=SearchOptions(num_beams=8)), *requests(range(1, 9)))
    num = len(replica.requests)
    replica.report(shrunk=[Shrunk(replica.number(0.0), 5)])
    assert len(replica.requests) == num + 3


def test_pairs_go_to_the_replica_with_the_least_to_score_within_the_models_limit() -> None:
    _, replicas, front = two_replicas(4, budget=10)
    front.score(*(pair(i, 8) for i in range(10)))
    assert [len(replica.pairs) for replica in replicas] == [2, 2], "a replica has less than two turns' worth"
    replicas[1].score()
    assert [len(replica.pairs) for replica in replicas] == [2, 2]
    _, _, front = two_replicas(4, requests=3, budget=10)
    for i in range(12):
        front.score(pair(i, 10))
    assert list(front.reasons.values()) == ["queue_full"] * (12 - 2 - 3)
    assert {one.retry_after_seconds for one in front.scored.values()} == {1.0}, "nothing is known yet"


def test_statistics_are_those_of_all() -> None:
    desk, replicas, front = two_replicas(2)
    front.submit(*requests(range(12)))
    for replica in replicas:
        own = Statistics(2, 4, 2, 2, cache_bytes_reserved=100, cache_bytes_used=10, steps=[Step(2, 0.1)])
        replica.report(statistics=own)
    told = desk.statistics()
    assert (told.num_waiting, told.num_waiting_tokens, told.num_running, told.num_slots) == (4 + 4, 8 + 8, 4, 4)
    assert (told.cache_bytes_reserved, told.cache_bytes_used, told.steps) == (200, 20, [])
    assert told.num_places == 100 - 8
    num = len(front.reports)
    replicas[0].report()
    assert len(front.reports) == num
    desk.clock.now += 1.0
    replicas[0].report()
    assert len(front.reports) == num + 1, "without news it is told now and then"


def snapshot(number: int = 7, at: float = 1.0) -> Snapshot:
    return Snapshot([EngineSnapshot(at, [SlotUse(0, number, False, 2, 1, 9)])], [CallerUse("alice", 0, 1)])


def test_replicas_are_asked_for_snapshots_once_for_everybody() -> None:
    desk, replicas, front = two_replicas(1)
    front.submit(*requests(range(9), share=Share("alice")))
    num_given, num_reports = sum(len(replica.requests) for replica in replicas), len(front.reports)
    fronts = [front, *(FakeFrontEnd(desk, f"front-{i}".encode()) for i in range(3))]
    for one in fronts:
        one.watch()
    desk.detach(b"front-0")
    replicas[1].show(snapshot(1))
    assert front.snapshots == []
    replicas[0].show(snapshot(0))
    (told,) = front.snapshots
    assert [(engine.replica, engine.slots[0].request) for engine in told.engines] == [(0, 0), (1, 1)]
    assert told.callers == [CallerUse("alice", 9 - num_given, 2)]
    for one in fronts:
        one.watch()
        one.watch()
    assert [replica.num_watches for replica in replicas] == [1, 1]
    assert [len(one.snapshots) for one in fronts] == [3, 0, 3, 3], "what replicas have just told is good enough"
    assert len(front.reports) == num_reports, "a snapshot changes nothing"
    desk.clock.now += SHORTEST_SECONDS
    front.watch()
    assert [replica.num_watches for replica in replicas] == [2, 2]
    front = FakeFrontEnd(FakeDesk())
    front.watch()
    assert front.snapshots == [Snapshot([], [])], "without replicas there is nothing to wait for"


def test_a_replica_that_hangs_or_is_lost_holds_up_no_snapshot() -> None:
    desk, replicas, front = two_replicas(4)

    def seen(num_watches: list[int]) -> list[tuple[int, float]]:
        assert [replica.num_watches for replica in replicas] == num_watches
        return [(engine.replica, engine.at) for engine in front.snapshots[-1].engines] if front.snapshots else []

    front.watch()
    replicas[0].show(snapshot())
    desk.wait(0)
    assert seen([1, 1]) == []
    desk.wait(PATIENCE_SECONDS)
    assert seen([1, 1]) == [(0, 1.0)]
    desk.clock.now += SHORTEST_SECONDS
    front.watch()
    replicas[0].show(snapshot(8, at=2.0))
    assert seen([2, 1]) == [(0, 2.0)], "one that has not answered is not asked again"
    replicas[1].show(snapshot(9))
    desk.clock.now += SHORTEST_SECONDS
    front.watch()
    replicas[0].show(snapshot(at=3.0))
    replicas[1].lose()
    assert seen([3, 2]) == [(0, 3.0)]
    replicas[1].show(snapshot())
    replicas[1].open()
    desk.clock.now += SHORTEST_SECONDS
    front.watch()
    for replica in replicas:
        replica.show(snapshot(at=4.0))
    assert seen([4, 3]) == [(0, 4.0), (1, 4.0)]
