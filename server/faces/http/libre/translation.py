"""Texts of one call as many requests, each served as any other: with a record and in its caller's limits, beside each other.

They join the batch that runs, at most twice as many at a time as the model has slots. One that fails fails the call, and the others
are cancelled.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from structlog.contextvars import bind_contextvars

from dragoman.server.core.callers import Caller
from dragoman.server.core.core import Core
from dragoman.server.core.ports import Model
from dragoman.server.core.requests import GenerateRequest
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.http.around import own_ending
from dragoman.server.faces.http.exchange import Exchange
from dragoman.server.faces.items import Items
from dragoman.server.faces.v1.sizes import MessageLimit
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT


class Wanted(NamedTuple):
    """What is wanted of each text.

    Attributes:
        model: What is to translate.
        source: Its language, by any of its spellings.
        target: Language of the answer.
        num_alternatives: Answers beside the best one.
    """

    model: Model
    source: str
    target: str
    num_alternatives: int = 0

    @property
    def num_beams(self) -> int | None:
        """Width of the search; None for the model's."""
        if not self.num_alternatives:
            return None
        return max(self.num_alternatives + 1, self.model.manifest.defaults.num_beams or 1)

    def request(self, text: str) -> GenerateRequest:
        """Return the request for a text."""
        num_answers = self.num_alternatives + 1 if self.num_alternatives else None
        return GenerateRequest(
            model=self.model.name,
            text=text,
            num_beams=self.num_beams,
            num_return_sequences=num_answers,
            source_language=self.source,
            target_language=self.target,
        )


def most_alternatives(model: Model, caller: Caller | None) -> int:
    """Return how many answers beside the best one a caller may want of a model."""
    most = None if caller is None else caller.limits.max_slots
    return min(model.max_slots_per_request, most or model.max_slots_per_request) - 1


class Translation:
    """Has a model translate the texts of calls."""

    def __init__(self, core: Core, max_bytes: int) -> None:
        """Translate with the core's models; answers of a call have at most so many bytes together."""
        self._generation, self._records = core.generation, core.calls.records
        self._max_bytes, self._limit = max_bytes, MessageLimit(max_bytes)

    async def of_all(self, texts: Sequence[str], wanted: Wanted, exchange: Exchange, num_kept: int = 0) -> Sequence[list[str]]:
        """Return the answers of each text, the best one first.

        Args:
            texts: To be translated.
            wanted: What is wanted of each.
            exchange: The call.
            num_kept: Characters beside these that each answer of the call will have.

        Raises:
            ServiceError: If one has none.
        """
        call = exchange.call
        assert call.window is not None
        call.is_counted = False  # from now on its requests are
        run = _Run(wanted, Items(self._records, call, own_ending), exchange, self._seconds(exchange), self._max_bytes)
        run.count_bytes(num_kept * (wanted.num_alternatives + 1))

        async def translate(index: int) -> list[str]:
            answers = await self._one(texts[index], index, run)
            run.count(answers)
            return answers

        return await call.window.run_each(len(texts), translate, _num_in_hand(wanted, call.caller))

    def _seconds(self, exchange: Exchange) -> float | None:
        """Return when the call has to have its answer, in seconds since it came, for all of its requests; None for any time."""
        call, left = exchange.call, exchange.remaining_seconds
        seconds, _ = self._generation.deadlines(call).time_left(call.arrival, left)
        return None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def _one(self, text: str, index: int, run: "_Run") -> list[str]:
        """Serve one request, with a record of its own; its tokens count for the call's too."""
        whole = run.exchange.call
        bind_contextvars(item=index)
        # The same version of a model answers all of them, which is why they have the call's id.
        with run.items.recorded(whole.request_id, is_part=True) as call:
            try:
                seconds = None if run.until is None else run.until - asyncio.get_running_loop().time()
                generated = await self._generation.generate(run.wanted.request(text), call, seconds, self._limit)
            finally:
                whole.model = call.model
        return [answer.text for answer in generated.answers]


class _Run:
    """One call's texts on their way."""

    def __init__(self, wanted: Wanted, items: Items, exchange: Exchange, until: float | None, max_bytes: int) -> None:
        self.wanted, self.items, self.exchange, self.until = wanted, items, exchange, until
        self._max_bytes, self._num_bytes = max_bytes, 0

    def count(self, answers: Sequence[str]) -> None:
        """Count answers; errors as `count_bytes`."""
        self.count_bytes(sum(len(answer.encode(errors="replace")) for answer in answers))

    def count_bytes(self, number: int) -> None:
        """Count what will be sent.

        Raises:
            InvalidRequest: If all together is more than can be.
        """
        self._num_bytes += number
        if self._num_bytes > self._max_bytes:
            raise InvalidRequest("q", f"answers have more than {self._max_bytes} bytes, max_message_bytes of the server")


def _num_in_hand(wanted: Wanted, caller: Caller | None) -> int:
    """Return how many requests of a call run or wait at a time: no more than its caller's limits let in."""
    most = max(1, REQUESTS_PER_SLOT * wanted.model.max_slots // (wanted.num_beams or 1))
    return most if caller is None else min(most, caller.most_at_once or most)
