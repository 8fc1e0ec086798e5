"""Entries and queues, as tests of policies need them."""

from collections.abc import Iterable
from typing import Any

from dragoman.server.dispatch.fair_queue import Entry
from dragoman.server.dispatch.queue import Load, RequestQueue
from dragoman.server.engine.messages import ANYBODY, Request, SearchOptions, Share
from dragoman.server.engine.settings import QueueLimits


def entry(
    number: int, share: Share = ANYBODY, num_tokens: int = 5, width: int = 1, priority: int = 0, arrival: float = 0.0, **fields: Any
) -> Entry:
    search = SearchOptions(num_beams=width)
    request = Request(number, [7] * num_tokens, 10, arrival, priority=priority, search=search, share=share, **fields)
    return Entry(request, lambda _: None, num_tokens, width)


def queue(slots: int = 4, requests: int = 10**6, tokens: int = 10**9, engines: int = 1, lookahead: int = 0) -> RequestQueue:
    """Return a queue before engines; limits that are not given are out of reach."""
    policy = RequestQueue(QueueLimits(requests, tokens), has_slots=True)
    for index in range(engines):
        policy.open(Load(index, slots, lookahead, last_heard=0.0))
    return policy


def numbers(entries: Iterable[Entry]) -> list[int]:
    return [one.request.id for one in entries]


def caller_of(one: Entry) -> str:
    return one.request.share.caller
