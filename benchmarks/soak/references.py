"""Sentences whose answers must stay the same bit for bit, however busy the server is."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from grpc import aio

from dragoman.v1 import generation_pb2, generation_pb2_grpc

CALL_SECONDS = 120.0
SEARCHES: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 4, "num_return_sequences": 4},
    {"do_sample": True, "seed": 7, "temperature": 1.1, "num_return_sequences": 2},
)


class References:
    """Translates the same again and again, as an asynchronous context, and compares with the first time.

    Attributes:
        num_translated: Answers that came.
        num_different: Of them, not the first one's bytes.
        failures: Calls that were not answered, by status.
    """

    def __init__(self, address: str, texts: Sequence[str]) -> None:
        """Describe them: each text with each of `SEARCHES`, log-probabilities included."""
        self._address = address
        self._requests = [
            generation_pb2.GenerateRequest(text=text, return_log_probs=True, request_id=f"reference-{i}-{j}", **search)
            for i, text in enumerate(texts)
            for j, search in enumerate(SEARCHES)
        ]
        self._first: dict[str, bytes] = {}
        self.num_translated = self.num_different = 0
        self.failures: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._channel = aio.insecure_channel(self._address)
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._channel.close()

    async def run(self, period_seconds: float, stopping: asyncio.Event) -> None:
        """Translate all of them again and again, with pauses, until told to stop."""
        while not stopping.is_set():
            await self.translate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), period_seconds)

    async def translate(self) -> None:
        """Translate all of them once, at the same time."""
        await asyncio.gather(*(self._translate(request) for request in self._requests))

    async def _translate(self, request: generation_pb2.GenerateRequest) -> None:
        try:
            self.compare(await self._stub.Generate(request, timeout=CALL_SECONDS))
        except aio.AioRpcError as error:
            self.failures[error.code().name] += 1

    def compare(self, response: generation_pb2.GenerateResponse) -> None:
        """Compare an answer, scores and all; only how long it took may differ."""
        response.ClearField("timings")
        content = response.SerializeToString(deterministic=True)
        self.num_translated += 1
        self.num_different += self._first.setdefault(response.request_id, content) != content
