"""Exact result cache: answers of earlier requests, and requests under way that others wait for.

An answer depends only on the bundle and on what is sent to the engine, so a hit is the answer. Requests are checked and charged as
without the cache. Equal requests of a caller and priority that are under way are computed once; if that one fails or is cancelled,
the next is computed. Samples whose seed the server draws are not kept.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dragoman.server.engine.messages import Finished, Request
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.telemetry.metrics import ANSWERS

if TYPE_CHECKING:
    from dragoman.server.models.loaded import LoadedModel

MIB = 2**20
# Memory of an entry beside its bytes, and the largest part of the cache that one may take.
ENTRY_BYTES, MAX_PART = 256, 1 / 16

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Finished).decode


class Key(NamedTuple):
    """Digest of all that an answer depends on, and those who share it."""

    owner: str  # caller; empty for all
    content: bytes


class Hit(NamedTuple):
    """An answer that was not computed for this request; its times are now, `saved_seconds` is the engine's time for it."""

    finished: Finished
    saved_seconds: float

    @classmethod
    def of(cls, finished: Finished) -> "Hit":
        """Return the hit for an earlier answer."""
        now, first = time.monotonic(), finished.first_token or finished.ended
        found = msgspec.structs.replace(finished, admitted=now, prefill_seconds=0.0, first_token=now, ended=now)
        return cls(found, finished.prefill_seconds + finished.ended - first)


class _UnderWay:
    """A request under way; `finished` is its answer, if it has one when `ended` is set."""

    __slots__ = ("ended", "finished")

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.finished: Finished | None = None


class ResultCache:
    """Answers of one frontend, at most `max_bytes`; the caller with the most loses its least recently used first."""

    def __init__(self, max_bytes: int, *, is_shared: bool = False) -> None:
        """Start empty; 0 bytes for no cache. `is_shared` gives callers the answers of others."""
        self.num_bytes = 0
        self._max_bytes, self._is_shared = max_bytes, is_shared
        self._answers: dict[str, OrderedDict[bytes, bytes]] = {}
        self._bytes_of: dict[str, int] = {}
        self._under_way: dict[tuple[Key, str, int], _UnderWay] = {}

    def key(self, request: GenerateRequest, model: "LoadedModel", sequence: Request) -> Key | None:
        """Return the key of a request's answer; None if it is neither to be looked up nor kept."""
        search = sequence.search
        if not self._max_bytes or request.no_cache or (search.sampling is not None and request.seed is None):
            return None
        asked = sequence.source_ids, sequence.decoder_start_id, sequence.max_new_tokens, search, sequence.text_range
        content = model.bundle.digest, *asked
        return Key("" if self._is_shared else sequence.share.caller, blake2b(_encode(content), digest_size=16).digest())

    def find(self, key: Key | None) -> Hit | None:
        """Return an earlier answer."""
        if key is None or (answers := self._answers.get(key.owner)) is None or (data := answers.get(key.content)) is None:
            return None
        answers.move_to_end(key.content)
        return Hit.of(_decode(data))

    async def find_or_compute(
        self, key: Key | None, sequence: Request, compute: Callable[[Request], Awaitable[Finished]]
    ) -> Finished | Hit:
        """Return an earlier answer, that of an equal request under way, or what is computed."""
        if key is None:
            return await compute(sequence)
        flight = key, sequence.share.caller, sequence.priority
        while True:
            if (hit := self.find(key)) is not None:
                return hit
            if (other := self._under_way.get(flight)) is None:
                break
            await other.ended.wait()
            if other.finished is not None:
                return Hit.of(other.finished)
        own = self._under_way[flight] = _UnderWay()
        try:
            finished = await compute(sequence)
            if finished.reason in ANSWERS:
                own.finished = finished
                self.keep(key, finished)
            return finished
        finally:
            del self._under_way[flight]
            own.ended.set()

    def keep(self, key: Key | None, finished: Finished) -> None:
        """Keep an answer, in place of others if there is no room."""
        if key is None or finished.reason not in ANSWERS:
            return
        data = _encode(finished)
        if (size := len(data) + ENTRY_BYTES) > self._max_bytes * MAX_PART:
            return
        answers = self._answers.setdefault(key.owner, OrderedDict())
        if key.content in answers:
            return
        answers[key.content] = data
        self._count(key.owner, size)
        while self.num_bytes > self._max_bytes:
            self._drop(max(self._bytes_of, key=self._bytes_of.__getitem__))

    def _drop(self, owner: str) -> None:
        answers = self._answers[owner]
        _, data = answers.popitem(last=False)
        self._count(owner, -len(data) - ENTRY_BYTES)
        if not answers:
            del self._answers[owner], self._bytes_of[owner]

    def _count(self, owner: str, num_bytes: int) -> None:
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + num_bytes
        self.num_bytes += num_bytes
