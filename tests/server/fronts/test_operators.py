"""Operators at a front end: what they ask for travels to the process that started it, and so does what keeps it from being done."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ServerConfig
from dragoman.server.core.administration import CarryOut, Listing, ModelStatus, Operator, Order, Requested, VersionStatus
from dragoman.server.errors import Draining, InvalidRequest, NotInRepository, NotPossible, NotReady, ServiceError, Unavailable
from dragoman.server.fronts.messages import FromFrontEnd, Ordered, ToFrontEnd
from dragoman.server.fronts.operators import FarOperators, answer_order
from dragoman.server.telemetry.caller_metrics import CallerMetrics
from dragoman.server.telemetry.metrics import Metrics

ANNA = Operator("anna", frozenset({"en-de"}))
VERSION = VersionStatus("2", "abc", labels=("new",))
LISTING = Listing((ModelStatus("en-de", True, (VERSION,), ("odd",), Requested(labels={"a": "2"})),))


class Pipes:
    """A front end's operators, and the process that started it, which carries out as the test says."""

    def __init__(self, folder: Path, carry_out: CarryOut) -> None:
        tokens = folder / "operators.toml"
        tokens.write_text('[callers.anna]\ntoken = "anna-s"\n')
        config = ServerConfig(models=folder, http_admin=True, admin_tokens_file=tokens)
        metrics = Metrics(CollectorRegistry(), config.latency_buckets)
        self.orders: list[Ordered] = []
        self.far = FarOperators(config, metrics, CallerMetrics(CollectorRegistry()), self._say)
        self._carry_out = carry_out
        self._tasks: list[asyncio.Task[None]] = []

    def _say(self, message: FromFrontEnd) -> None:
        ordered = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromFrontEnd)
        assert isinstance(ordered, Ordered)
        self.orders.append(ordered)
        self._tasks.append(asyncio.ensure_future(self._answer(ordered)))

    async def _answer(self, ordered: Ordered) -> None:
        done = msgspec.msgpack.encode(await answer_order(self._carry_out, ordered))
        self.far.take(msgspec.msgpack.decode(done, type=ToFrontEnd))


def test_an_order_and_its_answer_are_the_same_on_both_sides(tmp_path: Path) -> None:
    seen: list[tuple[Operator, Order]] = []

    async def carry_out(operator: Operator, order: Order) -> Listing:
        seen.append((operator, order))
        return LISTING

    async def run() -> None:
        pipes = Pipes(tmp_path, carry_out)
        order = Order("label", "en-de", "2", "canary")
        assert await pipes.far.way.carry_out(ANNA, order) == LISTING
        [(operator, carried)] = seen
        assert (operator.name, set(operator.models or ()), carried) == ("anna", {"en-de"}, order)

    asyncio.run(run())


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("model", "is no name"),
        NotInRepository("version", "'9'", ["1", "2"]),
        NotPossible("it is the last"),
        NotReady("soon", 2.5),
        Draining("it ends"),
        Unavailable("it begins", 1.0),
    ],
)
def test_what_keeps_it_from_being_done_is_told_as_it_was_raised(tmp_path: Path, error: ServiceError) -> None:
    async def carry_out(operator: Operator, order: Order) -> Listing:
        raise error

    async def run() -> None:
        with pytest.raises(type(error)) as caught:
            await Pipes(tmp_path, carry_out).far.way.carry_out(ANNA, Order("load", "en-de"))
        told = caught.value
        assert (told.message, told.code, told.retry_after_seconds) == (error.message, error.code, error.retry_after_seconds)

    asyncio.run(run())


def test_what_nobody_foresaw_is_told_without_its_words(tmp_path: Path, logged: Any) -> None:
    async def carry_out(operator: Operator, order: Order) -> Listing:
        raise RuntimeError("a secret")

    async def run() -> None:
        with pytest.raises(Unavailable) as caught:
            await Pipes(tmp_path, carry_out).far.way.carry_out(ANNA, Order("load", "en-de"))
        assert "secret" not in caught.value.message

    asyncio.run(run())


def test_who_does_not_wait_ends_nothing_and_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        done: list[str] = []

        async def carry_out(operator: Operator, order: Order) -> Listing:
            if order.verb == "load":
                await gate.wait()
            done.append(order.verb)
            return LISTING

        pipes = Pipes(tmp_path, carry_out)
        waiting = asyncio.ensure_future(pipes.far.way.carry_out(ANNA, Order("load", "en-de")))
        assert await pipes.far.way.carry_out(ANNA, Order("list")) == LISTING
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate.set()
        await asyncio.gather(*pipes._tasks)
        assert done == ["list", "load"]

    asyncio.run(run())
