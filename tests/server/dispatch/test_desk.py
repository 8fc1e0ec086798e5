"""The desk, with replicas and front ends played by hand."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from dragoman.server.dispatch.desk import LOST_RETRY_SECONDS, Desk
from dragoman.server.engine.messages import (
    Down,
    Hello,
    Prefill,
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
from dragoman.server.engine.scheduler import Limits
from tests.server.dispatch.conftest import HandFrontEnd, HandReplica

MakeDesk = Callable[..., Desk]


def request(number: int, **fields: Any) -> Request:
    """Return a request whose arrival is its number, which is what replicas are told of both."""
    return Request(number, fields.pop("source_ids", [5, 1]), 9, float(number), **fields)


def pair(number: int, num_tokens: int = 4) -> ScoreRequest:
    return ScoreRequest(number, [5] * (num_tokens // 2), [6] * (num_tokens // 2), float(number))


def arrivals(replica: HandReplica) -> list[float]:
    return sorted(one.arrival for one in replica.requests.values())


def test_each_front_end_gets_what_it_asked_for_under_its_own_numbers(make_desk: MakeDesk) -> None:
    desk = make_desk()
    replicas = [HandReplica(desk, index, 4) for index in range(2)]
    ours, theirs = HandFrontEnd(desk, b"ours"), HandFrontEnd(desk, b"theirs")
    ours.submit(request(1, is_streamed=True), request(2))
    theirs.submit(request(1))
    numbers = [number for replica in replicas for number in replica.requests]
    assert len(set(numbers)) == 3
    streaming = next(replica for replica in replicas if any(one.is_streamed for one in replica.requests.values()))
    number = next(number for number, one in streaming.requests.items() if one.is_streamed)
    streaming.say(tokens=[Tokens(number, [4]), Tokens(number, [5])])
    for replica in replicas:
        replica.finish()
    assert [tokens for report in ours.reports for tokens in report.tokens] == [Tokens(1, [4]), Tokens(1, [5])]
    assert not any(report.tokens for report in theirs.reports)
    assert ours.reasons == {1: "eos", 2: "eos"} and theirs.reasons == {1: "eos"}
    assert (ours.reports[-1].num_received, theirs.reports[-1].num_received) == (2, 1)


def test_a_front_end_is_told_when_the_model_is_ready_and_when_not(make_desk: MakeDesk) -> None:
    desk = make_desk()
    early = HandFrontEnd(desk, b"early")
    assert early.events == []
    first = HandReplica(desk, 0, 4)
    second = HandReplica(desk, 1, 4)
    late = HandFrontEnd(desk, b"late")
    ready = Ready("cpu", 4, 0.1)
    assert [event for event in early.events if not isinstance(event, Report)] == [ready] == late.events[:1]
    first.lose()
    assert not any(isinstance(event, Down) for event in early.events)
    second.lose(3.0)
    second.lose(4.0)
    assert [event for event in early.events if isinstance(event, Down)] == [Down("it ended", 3.0)]
    first.open()
    assert [event for event in late.events if isinstance(event, Ready)] == [ready, ready]


def test_a_lost_replica_costs_what_it_had_and_nothing_else(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=2)
    replicas = [HandReplica(desk, index, 2) for index in range(2)]
    front = HandFrontEnd(desk)
    front.submit(*(request(i) for i in range(12)))
    had = arrivals(replicas[0])
    kept = arrivals(replicas[1])
    replicas[0].lose()
    assert {number: end.reason for number, end in front.ends.items()} == dict.fromkeys(map(int, had), "lost")
    assert {end.retry_after_seconds for end in front.ends.values()} == {LOST_RETRY_SECONDS}
    while replicas[1].requests:
        replicas[1].finish()
    assert sorted(front.ends) == list(range(12)) and len(kept) == 4
    assert [front.reasons[number] for number in range(12)].count("lost") == len(had) == 4


def test_with_the_last_replica_everything_ends_and_what_comes_then_is_lost(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=1)
    replica = HandReplica(desk, 0, 1)
    front = HandFrontEnd(desk)
    front.submit(*(request(i) for i in range(9)))
    front.score(*(pair(i) for i in range(20, 60)))
    replica.lose(2.0)
    assert front.reasons == dict.fromkeys(range(9), "lost")
    assert {one.reason for one in front.scored.values()} == {"lost"} and len(front.scored) == 40
    assert {end.retry_after_seconds for end in front.ends.values()} == {2.0}
    assert isinstance(front.events[-1], Down)
    front.submit(request(9))
    front.score(pair(60))
    assert front.reasons[9] == front.scored[60].reason == "lost"
    replica.open()
    front.submit(request(10))
    replica.finish()
    assert front.reasons[10] == "eos"


def test_a_cancelled_request_leaves_the_queue_or_its_replica(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=1)
    replica = HandReplica(desk, 0, 1)
    front = HandFrontEnd(desk)
    front.submit(*(request(i) for i in range(5)))
    front.cancel(0, 4, 77)
    assert replica.cancelled == [replica.number(0.0)]
    assert front.reasons == {4: "cancelled"}
    assert len(replica.requests) == 3, "the replica has it until it says otherwise"
    replica.finish(replica.number(0.0), reason="cancelled")
    assert front.reasons == {0: "cancelled", 4: "cancelled"} and arrivals(replica) == [1.0, 2.0, 3.0]


def test_a_front_end_that_goes_takes_its_requests_along(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=1)
    replica = HandReplica(desk, 0, 1)
    gone, stays = HandFrontEnd(desk, b"gone"), HandFrontEnd(desk, b"stays")
    gone.submit(*(request(i) for i in range(5)))
    gone.score(pair(6), pair(7))
    stays.submit(request(5))
    desk.detach(b"gone")
    desk.detach(b"gone")
    num_events = len(gone.events)
    assert sorted(replica.cancelled) == sorted([*replica.requests, *replica.pairs])
    replica.finish(*replica.requests, reason="cancelled")
    replica.finish()
    assert len(gone.events) == num_events and stays.reasons == {5: "eos"}
    gone.submit(request(8))
    assert replica.requests == {}


def test_who_attaches_again_begins_anew(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=1)
    replica = HandReplica(desk, 0, 1)
    before = HandFrontEnd(desk)
    before.submit(request(1))
    after = HandFrontEnd(desk)
    assert replica.cancelled == list(replica.requests)
    after.submit(request(2))
    replica.finish()
    assert after.reasons[2] == "eos" and before.ends == {}


def test_hello_and_stop_are_not_for_a_desk(make_desk: MakeDesk) -> None:
    desk = make_desk()
    replica = HandReplica(desk, 0, 4)
    front = HandFrontEnd(desk)
    desk.take(b"front", Hello())
    desk.take(b"front", Stop())
    front.submit(request(1))
    replica.finish()
    assert front.reasons == {1: "eos"}


def test_replicas_keep_the_order_of_callers_but_not_their_limits(make_desk: MakeDesk) -> None:
    desk = make_desk()
    replica = HandReplica(desk, 0, 4)
    front = HandFrontEnd(desk)
    front.submit(request(1, priority=3, share=Share("a", 2.0, 2, 5)), request(2, share=Share("b")))
    assert [one.share for one in replica.requests.values()] == [Share("a", 2.0), Share("b")]
    assert replica.requests[replica.number(1.0)].priority == 3


def test_a_full_queue_refuses_and_a_poorer_caller_pushes_out_a_richer_one(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=1, requests=4)
    HandReplica(desk, 0, 1)
    HandReplica(desk, 1, 1)
    front = HandFrontEnd(desk)
    front.submit(*(request(i, share=Share("rich")) for i in range(9)))
    refused = [number for number, reason in front.reasons.items() if reason == "queue_full"]
    assert len(refused) == 9 - 4 - 2
    assert all(front.ends[number].retry_after_seconds > 0 for number in refused)
    statistics = front.reports[-1].statistics
    assert statistics.num_places is not None and statistics.num_places <= 0
    assert set(statistics.without_claim or {}) <= {"rich"}


def test_a_callers_limit_of_waiting_requests_is_named(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=1)
    HandReplica(desk, 0, 1)
    HandReplica(desk, 1, 1)
    front = HandFrontEnd(desk)
    share = Share("a", 1.0, 1, 2)
    front.submit(*(request(i, share=share) for i in range(3)))
    front.submit(*(request(i, share=share) for i in range(3, 6)))
    assert [end.limit for end in front.ends.values()] == ["max_waiting"] * len(front.ends) and front.ends
    assert "a" in front.reports[-1].statistics.at_their_limit


def test_a_deadline_that_cannot_be_met_is_refused_at_once(make_desk: MakeDesk, clock: Any) -> None:
    desk = make_desk(slots=1)
    replica = HandReplica(desk, 0, 1)
    front = HandFrontEnd(desk)
    front.submit(request(0))
    steps, prefills = [Step(1, 0.1)] * 32, [Prefill(1, 2, 2, 0.05, 1)]
    replica.say(statistics=Statistics(num_running=1, num_slots=1, steps=steps, prefills=prefills))
    front.submit(request(1, deadline=clock.now + 0.05))
    assert front.reasons == {1: "deadline_unmet"} and front.ends[1].needed_seconds > 0.1


def test_a_deadline_ends_what_waits_here_when_nobody_says_anything() -> None:
    async def scenario() -> None:
        desk = Desk(Limits(1, 100, 1000, 64))
        replica = HandReplica(desk, 0, 1)
        front = HandFrontEnd(desk)
        deadline = time.monotonic() + 0.02
        front.submit(*(request(i, deadline=deadline + i / 1000) for i in range(6)))
        async with asyncio.timeout(30):
            while len(front.ends) < 3:
                await asyncio.sleep(0.001)
        assert front.reasons == dict.fromkeys((3, 4, 5), "deadline") and len(replica.requests) == 3
        assert time.monotonic() >= deadline + 0.005

    asyncio.run(scenario())


def test_slots_that_are_given_back_go_to_others(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=8)
    replica = HandReplica(desk, 0, 8)
    front = HandFrontEnd(desk)
    front.submit(request(0, search=SearchOptions(num_beams=8)), *(request(i) for i in range(1, 9)))
    num = len(replica.requests)
    replica.say(shrunk=[Shrunk(replica.number(0.0), 5)])
    assert len(replica.requests) == num + 3


def test_pairs_go_to_the_replica_with_the_least_to_score(make_desk: MakeDesk) -> None:
    desk = make_desk(budget=10)
    replicas = [HandReplica(desk, index, 4) for index in range(2)]
    front = HandFrontEnd(desk)
    front.score(*(pair(i, 8) for i in range(10)))
    assert [len(replica.pairs) for replica in replicas] == [2, 2], "a replica has less than two turns' worth"
    replicas[1].score()
    assert [len(replica.pairs) for replica in replicas] == [2, 2]
    replicas[0].lose()
    while replicas[1].pairs:
        replicas[1].score()
    reasons = [front.scored[i].reason for i in range(10)]
    assert (reasons.count("lost"), reasons.count("eos")) == (2, 8)


def test_the_limit_of_waiting_pairs_is_the_models(make_desk: MakeDesk) -> None:
    desk = make_desk(requests=3, budget=10)
    HandReplica(desk, 0, 4)
    HandReplica(desk, 1, 4)
    front = HandFrontEnd(desk)
    for i in range(12):
        front.score(pair(i, 10))
    assert [one.reason for one in front.scored.values()] == ["queue_full"] * (12 - 2 - 3)


def test_statistics_are_those_of_all(make_desk: MakeDesk) -> None:
    desk = make_desk(slots=2)
    replicas = [HandReplica(desk, index, 2) for index in range(2)]
    front = HandFrontEnd(desk)
    front.submit(*(request(i) for i in range(12)))
    for replica in replicas:
        own = Statistics(2, 4, 2, 2, cache_bytes_reserved=100, cache_bytes_used=10, steps=[Step(2, 0.1)])
        replica.say(statistics=own)
    told = desk.statistics()
    assert (told.num_waiting, told.num_waiting_tokens, told.num_running, told.num_slots) == (4 + 4, 8 + 8, 4, 4)
    assert (told.cache_bytes_reserved, told.cache_bytes_used, told.steps) == (200, 20, [])
    assert told.num_places == 100 - 8


def test_who_has_no_news_hears_how_things_stand_now_and_then(make_desk: MakeDesk, clock: Any) -> None:
    desk = make_desk()
    replica = HandReplica(desk, 0, 4)
    front = HandFrontEnd(desk)
    replica.say()
    num = len(front.reports)
    replica.say()
    assert len(front.reports) == num
    clock.now += 1.0
    replica.say()
    assert len(front.reports) == num + 1


def test_who_has_no_news_is_soon_told_that_there_are_places_again() -> None:
    """Also when nobody says anything any more; else it would go on refusing its callers because of another's that are gone."""

    async def scenario() -> None:
        desk = Desk(Limits(1, 0, 1000, 64))
        replica = HandReplica(desk, 0, 1)
        idle, busy = HandFrontEnd(desk, b"idle"), HandFrontEnd(desk, b"busy")
        busy.submit(request(1))
        async with asyncio.timeout(30):
            while not (idle.reports and idle.reports[-1].statistics.num_places == 0):
                await asyncio.sleep(0.001)
            replica.finish()
            while idle.reports[-1].statistics.num_places != 1:
                await asyncio.sleep(0.001)
            while desk._alarm is not None:  # while nothing happens nothing is told
                await asyncio.sleep(0.001)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_what_a_replica_says_that_is_gone_is_not_heard(make_desk: MakeDesk, num_replicas: int) -> None:
    desk = make_desk()
    replicas = [HandReplica(desk, index, 4) for index in range(num_replicas)]
    front = HandFrontEnd(desk)
    front.submit(request(1))
    number = next(iter(replicas[0].requests))
    request_there = dict(replicas[0].requests)
    replicas[0].lose()
    replicas[0].requests = request_there
    replicas[0].finish(number)
    assert front.reasons == {1: "lost"}
