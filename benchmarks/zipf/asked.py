"""Requests for many models, some of which are asked for often and most seldom, and what became of them."""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from benchmarks.harness.load import arrivals
from dragoman.v1 import generation_pb2, generation_pb2_grpc

OK = "OK"
KINDS = {"unary": 0.6, "stream": 0.2, "score": 0.2}
"""Share of each."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What is asked.

    Attributes:
        models: Names, the one asked for most often first.
        exponent: Of Zipf's law: the model of rank r is asked for in proportion to 1 / r ** exponent.
        rate: Requests a second, of a Poisson process.
        seconds: How long.
        deadline_seconds: Of each call.
    """

    models: Sequence[str]
    exponent: float
    rate: float
    seconds: float
    deadline_seconds: float

    def weights(self) -> list[float]:
        """Return the share of each model."""
        raw = [1 / rank**self.exponent for rank in range(1, len(self.models) + 1)]
        return [weight / sum(raw) for weight in raw]


@dataclass(slots=True)
class Asked:
    """What came of it.

    Attributes:
        seconds: Times to the answer, by the rank of the model, from 0; of requests that were answered.
        ended: How requests ended.
        num_sent: All of them.
        wall_seconds: From the first to the end of the last.
    """

    seconds: list[list[float]]
    ended: Counter[str] = field(default_factory=Counter)
    num_sent: int = 0
    wall_seconds: float = 0.0

    @property
    def num_lost(self) -> int:
        """Requests that had no end."""
        return self.num_sent - self.ended.total()

    def rows(self, groups: Sequence[range], limit: float) -> list[dict[str, Any]]:
        """Return a row for each group of ranks.

        Args:
            groups: Ranks, from 0.
            limit: Seconds from which an answer counts as one that waited for its model.
        """
        rows = []
        for ranks in groups:
            times = sorted(second for rank in ranks for second in self.seconds[rank])
            row: dict[str, Any] = {"rank": f"{ranks.start + 1}-{ranks.stop}", "answers": len(times)}
            for name, share in (("p50 s", 0.5), ("p90 s", 0.9), ("p99 s", 0.99)):
                row[name] = round(quantile(times, share), 3) if times else "-"
            row["max s"] = round(times[-1], 3) if times else "-"
            row[f"over {limit:g} s"] = f"{sum(second > limit for second in times) / len(times):.1%}" if times else "-"
            rows.append(row)
        return rows


def quantile(times: Sequence[float], share: float) -> float:
    """Return the time that a share of sorted times does not exceed."""
    return times[0] if len(times) == 1 else statistics.quantiles(times, n=1000, method="inclusive")[round(share * 1000) - 1]


async def ask(address: str, mix: Mix, texts: Sequence[str], seed: int) -> Asked:
    """Send what a mix says, whatever becomes of it, and wait for the last answer."""
    generator = random.Random(seed)
    asked = Asked([[] for _ in mix.models])
    ranks, weights = range(len(mix.models)), mix.weights()
    async with aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        for due in arrivals(mix.rate, mix.seconds, seed):
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
            [rank] = generator.choices(ranks, weights)
            [kind] = generator.choices(list(KINDS), list(KINDS.values()))
            asked.num_sent += 1
            model = mix.models[rank]
            call = _call(stub, kind, model, generator.choice(texts), mix.deadline_seconds)
            group.create_task(_time(call, asked, rank, model))
    asked.wall_seconds = time.perf_counter() - began
    return asked


async def _time(call: Awaitable[str], asked: Asked, rank: int, model: str) -> None:
    began = time.perf_counter()
    try:
        answered_by = await call
    except aio.AioRpcError as error:
        asked.ended[error.code().name] += 1
        return
    if answered_by != model:
        asked.ended[f"answered by {answered_by or 'nobody'}"] += 1
        return
    asked.ended[OK] += 1
    asked.seconds[rank].append(time.perf_counter() - began)


async def _call(stub: Any, kind: str, model: str, text: str, seconds: float) -> str:
    """Return which model has answered; empty for a stream without a result."""
    if kind == "score":
        scored = await stub.Score(generation_pb2.ScoreRequest(model=model, text=text, target=text), timeout=seconds)
        return str(scored.model)
    request = generation_pb2.GenerateRequest(model=model, text=text)
    if kind == "unary":
        return str((await stub.Generate(request, timeout=seconds)).model)
    answered_by = ""
    async for message in stub.GenerateStream(request, timeout=seconds):
        answered_by = message.result.model
    return answered_by
