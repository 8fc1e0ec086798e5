"""Operators who come to a front end: it knows them itself, and what they ask for is done in the process that started it."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import structlog

from dragoman.server import errors
from dragoman.server.config import ServerConfig
from dragoman.server.service.administration import CarryOut, Listing, Operator, OperatorCalls, Order
from dragoman.server.service.callers import Callers, read_operators_book
from dragoman.server.service.context import Records
from dragoman.server.service.running import RunningCalls
from dragoman.server.telemetry.caller_metrics import CallerMetrics
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.watching import Source
from dragoman.server.workers.messages import CarriedOut, FromFrontEnd, Ordered

log = structlog.get_logger("dragoman.fronts")

# What may be said of an order that was not carried out, by name.
_ERRORS: dict[str, type[errors.ServiceError]] = {
    error.__name__: error
    for error in (
        errors.InvalidRequest,
        errors.NotInRepository,
        errors.NotPossible,
        errors.NotReady,
        errors.Draining,
        errors.Unavailable,
    )
}


class FarOperators:
    """See above.

    Attributes:
        way: The way in for operators.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics, counted: CallerMetrics, say: Callable[[FromFrontEnd], None]) -> None:
        """Read who may come.

        Args:
            config: The settings; they say that operators may come over HTTP.
            metrics: Of the front end.
            counted: Where operators are counted, who are no callers of models.
            say: Tells the process that started this one.

        Raises:
            ConfigError: If the file of operators cannot be used.
        """
        self._config, self._say = config, say
        book = read_operators_book(config)
        assert book is not None, "settings without a file of operators are refused"
        self._callers = Callers(book, counted)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Listing]] = {}
        self.way = OperatorCalls(RunningCalls(Records(metrics), self._callers), self._carry_out)

    def sources(self) -> Iterator[Source]:
        """Yield the file that may change meanwhile."""
        assert self._config.admin_tokens_file is not None
        load = partial(read_operators_book, self._config)
        yield Source("operators", (self._config.admin_tokens_file,), load, self._callers.replace)

    def take(self, done: CarriedOut) -> None:
        """Take in what has become of an order."""
        future = self._waiting.get(done.number)
        if future is None or future.done():
            return
        if done.listing is not None:
            future.set_result(done.listing)
        else:
            future.set_exception(_error(done))

    def drain(self) -> None:
        """Refuse everything new; who waits for a change is told that the server ends."""
        self.way.calls.draining.set()
        self.way.calls.end_all()

    async def _carry_out(self, operator: Operator, order: Order) -> Listing:
        number = next(self._numbers)
        future: asyncio.Future[Listing] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._say(Ordered(number, operator, order))
        try:
            return await future
        finally:
            del self._waiting[number]


async def answer_order(carry_out: CarryOut, ordered: Ordered) -> CarriedOut:
    """Carry out what was ordered at a front end; return what it is to be told."""
    try:
        return CarriedOut(ordered.number, await carry_out(ordered.operator, ordered.order))
    except errors.ServiceError as error:
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "")
        return CarriedOut(ordered.number, None, kind, error.message, error.retry_after_seconds)
    except Exception:
        log.exception("an order could not be carried out", verb=ordered.order.verb)
        return CarriedOut(ordered.number, None)


def _error(done: CarriedOut) -> errors.ServiceError:
    """Return the error that was raised where the order was carried out; one of a kind that nobody foresaw says nothing."""
    if (kind := _ERRORS.get(done.error)) is None:
        return errors.Unavailable("the change could not be made")
    error = kind.__new__(kind)
    errors.ServiceError.__init__(error, done.message, done.retry_after_seconds)
    return error
