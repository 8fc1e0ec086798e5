"""Result cache: what makes requests equal, what is kept and dropped, and requests that wait for an equal one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.server.engine.messages import Answer, Finished, Request, Sampling, SearchOptions, Share
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.result_cache import ENTRY_BYTES, Hit, Key, ResultCache

PLAIN = GenerateRequest()
SEQUENCE = Request(1, [5, 6, 2], 20, 0.0, share=Share("a"))
FINISHED = Finished(1, "eos", [Answer([7, 8], [-0.5, -0.25, -1.0], -0.1, "eos")], 3, 1.0, 0.25, 1.5, 3.5)


def model(digest: str = "d") -> Any:
    return SimpleNamespace(bundle=SimpleNamespace(digest=digest))


@pytest.fixture
def cache() -> ResultCache:
    return ResultCache(2**20)


async def compute(sequence: Request) -> Finished:
    await asyncio.sleep(0)
    return replace(FINISHED, id=sequence.id)


async def test_an_answer_is_found_until_what_it_depends_on_differs(cache: ResultCache) -> None:
    key = cache.key(PLAIN, model(), SEQUENCE)
    assert await cache.find_or_compute(key, SEQUENCE, compute) == FINISHED
    later = replace(SEQUENCE, id=9, arrival=7.0, deadline=9.0, priority=3, is_streamed=True)
    assert cache.key(replace(PLAIN, request_id="x", priority=3), model(), later) == key
    hit = cache.find(key)
    assert hit is not None and hit.finished.answers == FINISHED.answers and hit.saved_seconds == 0.25 + 2.0
    assert (hit.finished.num_generated, hit.finished.prefill_seconds) == (3, 0.0)
    assert hit.finished.admitted == hit.finished.first_token == hit.finished.ended
    for other in (
        cache.key(PLAIN, model("e"), SEQUENCE),
        *(
            cache.key(PLAIN, model(), replace(SEQUENCE, **change))
            for change in (
                {"source_ids": [5, 2]},
                {"max_new_tokens": 21},
                {"decoder_start_id": 4},
                {"search": SearchOptions(num_beams=2)},
                {"share": Share("b")},
            )
        ),
    ):
        assert other is not None and cache.find(other) is None


def test_what_is_drawn_or_not_to_be_cached_has_no_key(cache: ResultCache) -> None:
    drawn = replace(SEQUENCE, search=SearchOptions(sampling=Sampling(1.0, 0, 1.0, 7)))
    assert cache.key(PLAIN, model(), drawn) is None and cache.key(GenerateRequest(seed=7), model(), drawn) is not None
    assert cache.key(GenerateRequest(no_cache=True), model(), SEQUENCE) is None
    assert ResultCache(0).key(PLAIN, model(), SEQUENCE) is None


def test_callers_share_answers_only_where_that_is_set() -> None:
    shared = ResultCache(2**20, is_shared=True)
    assert shared.key(PLAIN, model(), SEQUENCE) == shared.key(PLAIN, model(), replace(SEQUENCE, share=Share("b")))


async def test_equal_requests_under_way_are_computed_once(cache: ResultCache) -> None:
    key, asked = cache.key(PLAIN, model(), SEQUENCE), list[int]()
    free = asyncio.Event()

    async def slow(sequence: Request) -> Finished:
        asked.append(sequence.id)
        await free.wait()
        return FINISHED

    tasks = [asyncio.create_task(cache.find_or_compute(key, replace(SEQUENCE, id=number), slow)) for number in range(5)]
    ahead = asyncio.create_task(cache.find_or_compute(key, replace(SEQUENCE, id=9, priority=1), slow))
    await asyncio.sleep(0.01)
    assert asked == [0, 9], "one does not wait for another of a lower priority"
    tasks[3].cancel()
    free.set()
    found = await asyncio.gather(*tasks, ahead, return_exceptions=True)
    assert isinstance(found.pop(3), asyncio.CancelledError) and asked == [0, 9]
    assert [isinstance(each, Hit) for each in found] == [False, True, True, True, False]


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_one_that_fails_or_is_cancelled_takes_no_other_with_it(cache: ResultCache, is_cancelled: bool) -> None:
    key, asked = cache.key(PLAIN, model(), SEQUENCE), list[int]()

    async def first_fails(sequence: Request) -> Finished:
        asked.append(sequence.id)
        await asyncio.sleep(0.01)
        return replace(FINISHED, reason="lost" if sequence.id == 0 else "eos", answers=[])

    tasks = [asyncio.create_task(cache.find_or_compute(key, replace(SEQUENCE, id=number), first_fails)) for number in range(3)]
    await asyncio.sleep(0)
    if is_cancelled:
        tasks[0].cancel()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError) if is_cancelled else first.reason == "lost"  # type: ignore[union-attr]
    assert [other.reason if isinstance(other, Finished) else "hit" for other in others] == ["eos", "hit"] and asked == [0, 1]
    assert isinstance(await cache.find_or_compute(key, SEQUENCE, compute), Hit)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.integers(1, 40)), max_size=60))
def test_its_bytes_are_bounded_and_the_caller_with_the_most_loses_first(kept: list[tuple[str, int, int]]) -> None:
    cache = ResultCache(16 * 400)
    for owner, number, length in kept:
        cache.keep(Key(owner, bytes([number])), replace(FINISHED, answers=[Answer([1] * length, [], -0.1, "eos")]))
        assert 0 <= cache.num_bytes <= 16 * 400
    found = [(owner, number) for owner in "ab" for number in range(21) if cache.find(Key(owner, bytes([number])))]
    assert len(found) * ENTRY_BYTES <= cache.num_bytes and (not kept or kept[-1][:2] in found)


def test_a_caller_with_many_answers_takes_none_of_another(cache: ResultCache) -> None:
    cache.keep(Key("little", b"0"), FINISHED)
    for number in range(10_000):
        cache.keep(Key("much", number.to_bytes(4)), FINISHED)
    assert cache.find(Key("little", b"0")) and cache.find(Key("much", (9999).to_bytes(4)))
    assert cache.find(Key("much", (0).to_bytes(4))) is None
    cache.keep(Key("much", b"large"), replace(FINISHED, answers=[Answer([1] * 10**5, [], -0.1, "eos")]))
    assert cache.find(Key("much", b"large")) is None, "one answer does not take the place of most"
    cache.keep(Key("much", b"failed"), replace(FINISHED, reason="deadline"))
    assert cache.find(Key("much", b"failed")) is None
