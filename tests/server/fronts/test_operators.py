"""Operators' orders at a frontend worker: carried out by the main process, with the same answers and errors."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ServerConfig
from dragoman.server.core.administration import Listing, ModelStatus, Operator, Order, Requested, VersionStatus
from dragoman.server.errors import Draining, InvalidRequest, NotInRepository, NotPossible, NotReady, Unavailable
from dragoman.server.fronts.messages import FromFrontEnd, ToFrontEnd
from dragoman.server.fronts.operators import FarOperators, answer_order
from dragoman.server.telemetry.caller_metrics import CallerMetrics
from dragoman.server.telemetry.metrics import Metrics

ANNA = Operator("anna", frozenset({"en-de"}))
VERSION = VersionStatus("2", "abc", labels=("new",))
LISTING = Listing((ModelStatus("en-de", True, (VERSION,), ("odd",), Requested(labels={"a": "2"})),))


def connect(folder: Path, carry_out: Callable[[Operator, Order], Awaitable[Listing]]) -> tuple[Any, list[asyncio.Task[None]]]:
    """Return the way of a worker's orders to a process that carries them out so, and the tasks of that process."""
    tokens = folder / "operators.toml"
    tokens.write_text('[callers.anna]\ntoken = "anna-s"\n')
    config = ServerConfig(models=folder, http_admin=True, admin_tokens_file=tokens)
    tasks: list[asyncio.Task[None]] = []

    async def answer(ordered: Any) -> None:
        done = msgspec.msgpack.encode(await answer_order(carry_out, ordered))
        far.take(msgspec.msgpack.decode(done, type=ToFrontEnd))

    def say(message: FromFrontEnd) -> None:
        ordered = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromFrontEnd)
        tasks.append(asyncio.ensure_future(answer(ordered)))

    metrics = Metrics(CollectorRegistry(), config.latency_buckets)
    far = FarOperators(config, metrics, CallerMetrics(CollectorRegistry()), say)
    return far.way, tasks


ERRORS = [
    InvalidRequest("model", "is no name"),
    NotInRepository("version", "'9'", ["1", "2"]),
    NotPossible("it is the last"),
    NotReady("soon", 2.5),
    Draining("it ends"),
    Unavailable("it begins", 1.0),
    RuntimeError("a secret"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_error_is_raised_as_it_was_and_an_unforeseen_one_without_its_words(tmp_path: Path, error: Any, logged: Any) -> None:
    async def carry_out(operator: Operator, order: Order) -> Listing:
        raise error

    way, _ = connect(tmp_path, carry_out)
    if isinstance(error, RuntimeError):
        with pytest.raises(Unavailable) as unforeseen:
            await way.carry_out(ANNA, Order("load", "en-de"))
        assert "secret" not in unforeseen.value.message
        return
    with pytest.raises(type(error)) as caught:
        await way.carry_out(ANNA, Order("load", "en-de"))
    told = caught.value
    assert (told.message, told.code, told.retry_after_seconds) == (error.message, error.code, error.retry_after_seconds)
