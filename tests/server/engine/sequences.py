"""Sequences and schedulers, as tests of policies need them."""

from collections.abc import Iterable
from typing import Any

from dragoman.server.engine.scheduler import Limits, Scheduler

from dragoman.server.engine.messages import ANYBODY, Request, SearchOptions, Share
from dragoman.server.engine.sequence import Sequence


def sequence(
    number: int, share: Share = ANYBODY, num_tokens: int = 5, width: int = 1, priority: int = 0, arrival: float = 0.0, **fields: Any
) -> Sequence:
    search = SearchOptions(num_beams=width)
    return Sequence(b"", Request(number, [7] * num_tokens, 10, arrival, priority=priority, search=search, share=share, **fields))


def scheduler(slots: int = 4, requests: int = 10**6, tokens: int = 10**9, budget: int = 10**9) -> Scheduler:
    """Return a scheduler; limits that are not given are out of reach."""
    return Scheduler(Limits(slots, requests, tokens, budget))


def numbers(sequences: Iterable[Sequence]) -> list[int]:
    return [one.request.id for one in sequences]


def caller_of(one: Sequence) -> str:
    return one.request.share.caller
