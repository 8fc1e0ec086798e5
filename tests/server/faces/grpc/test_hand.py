"""What streams may have in hand, whatever their callers do."""

import asyncio
from typing import Any

from dragoman.server.faces.grpc.hand import MAX_UNTAKEN_BYTES, NUM_REMEMBERED_IDS, Allowance, Hand, RecentIds


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def is_waiting(wait: Any) -> bool:
    task = asyncio.ensure_future(wait)
    await settle()
    done = task.done()
    task.cancel()
    return not done


def fill(hand: Hand, count: int, num_bytes: int) -> None:
    for _ in range(count):
        hand.read(num_bytes)


def test_a_stream_alone_has_as_many_requests_as_a_stream_may() -> None:
    async def run() -> None:
        hand = Allowance(max_requests=100, max_bytes=1000).open(8)
        fill(hand, 7, 1)
        assert not await is_waiting(hand.room())
        fill(hand, 1, 1)
        assert await is_waiting(hand.room())
        hand.answered(1, 5)
        assert await is_waiting(hand.room())
        hand.taken(5)
        assert not await is_waiting(hand.room())
        assert (hand.num_requests, hand.num_bytes) == (7, 7)

    asyncio.run(run())


def test_many_streams_have_equal_parts_and_at_least_one_request_each() -> None:
    async def run() -> None:
        allowance = Allowance(max_requests=20, max_bytes=1000)
        hands = [allowance.open(8) for _ in range(10)]
        for hand in hands:
            fill(hand, 1, 10)
        for hand in hands:
            while not await is_waiting(hand.room()):
                fill(hand, 1, 10)
        assert [hand.num_requests for hand in hands] == [2] * 10
        more = [allowance.open(8) for _ in range(30)]
        for hand in more:
            assert not await is_waiting(hand.room())
            fill(hand, 1, 10)
            assert await is_waiting(hand.room())

    asyncio.run(run())


def test_streams_with_nothing_in_hand_take_nothing_from_the_others() -> None:
    async def run() -> None:
        allowance = Allowance(max_requests=20, max_bytes=1000)
        hand = allowance.open(8)
        idle = [allowance.open(8) for _ in range(1000)]
        fill(hand, 7, 10)
        assert not await is_waiting(hand.room())
        assert len(idle) == 1000

    asyncio.run(run())


def test_an_owner_of_many_streams_takes_no_more_than_its_part_from_another() -> None:
    async def run() -> None:
        allowance = Allowance(max_requests=20, max_bytes=1000)
        many = [allowance.open(8, "many") for _ in range(100)]
        for hand in many:
            fill(hand, 1, 100)
        one = allowance.open(100, "one")
        while not await is_waiting(one.room()):
            fill(one, 1, 10)
        assert one.num_requests == 10
        assert all([await is_waiting(hand.room()) for hand in many])
        waiting = asyncio.create_task(one.room())
        await settle()
        for hand in many:
            hand.close()
        async with asyncio.timeout(60):
            await waiting

    asyncio.run(run())


def test_bytes_of_all_streams_have_a_bound() -> None:
    async def run() -> None:
        allowance = Allowance(max_requests=1000, max_bytes=1000)
        hands = [allowance.open(500) for _ in range(5)]
        for hand in hands:
            while not await is_waiting(hand.room()):
                fill(hand, 1, 60)
        assert allowance.num_bytes == sum(hand.num_bytes for hand in hands) <= 1000 + 5 * 60

    asyncio.run(run())


def test_a_stream_that_ends_gives_its_part_to_the_others() -> None:
    async def run() -> None:
        allowance = Allowance(max_requests=1000, max_bytes=1000)
        greedy, modest = allowance.open(500), allowance.open(500)
        fill(greedy, 1, 1000)
        fill(modest, 1, 1)
        waiting = asyncio.create_task(modest.room())
        await settle()
        assert not waiting.done()
        greedy.close()
        async with asyncio.timeout(60):
            await waiting
        assert allowance.num_bytes == 1

    asyncio.run(run())


def test_no_wake_is_lost_whoever_waits_for_bytes() -> None:
    async def run() -> None:
        allowance = Allowance(max_requests=1000, max_bytes=300)
        hands = [allowance.open(500) for _ in range(3)]
        for hand in hands:
            fill(hand, 1, 100)
        waiting = [asyncio.create_task(hand.room()) for hand in hands[:2]]
        await settle()
        hands[2].taken(0)
        hands[2].answered(100, 0)
        async with asyncio.timeout(60):
            for hand, task in zip(hands[:2], waiting, strict=True):
                hand.answered(100, 10)
                await task

    asyncio.run(run())


def test_nothing_new_begins_while_large_answers_are_not_taken() -> None:
    async def run() -> None:
        hand = Allowance().open(500)
        fill(hand, 2, 10)
        hand.answered(10, MAX_UNTAKEN_BYTES + 1)
        assert await is_waiting(hand.turn())
        hand.taken(MAX_UNTAKEN_BYTES + 1)
        assert not await is_waiting(hand.turn())

    asyncio.run(run())


def test_ids_are_remembered_for_a_while_and_cost_little() -> None:
    ids = RecentIds()
    assert all(ids.add(f"{i}") for i in range(10 * NUM_REMEMBERED_IDS))
    recent = range(9 * NUM_REMEMBERED_IDS, 10 * NUM_REMEMBERED_IDS)
    assert not any(ids.add(f"{i}") for i in recent)
    assert len(ids._newest) + len(ids._older) <= 2 * NUM_REMEMBERED_IDS
    assert ids.add("0")
