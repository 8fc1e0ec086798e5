"""Admin requests of operators at a frontend worker: authenticated in the worker, executed in the parent."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import structlog

from dragoman.server import errors
from dragoman.server.config import ServerConfig
from dragoman.server.service.administration import CarryOut, Listing, Operator, OperatorCalls, Order
from dragoman.server.service.callers import Callers
from dragoman.server.service.callers_file import read_operators_book
from dragoman.server.service.context import RunningCalls
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.server_metrics import CallerMetrics
from dragoman.server.watching import Source
from dragoman.server.workers.messages import AdminRequest, AdminResponse, FromWorker

log = structlog.get_logger("dragoman.workers")

# Errors of admin requests that keep their class across processes.
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


class WorkerOperators:
    """Admin calls of this worker; `calls` is the entry for the protocols."""

    def __init__(self, config: ServerConfig, metrics: Metrics, counted: CallerMetrics, send: Callable[[FromWorker], None]) -> None:
        """Read the operators file; raise `ConfigError` if it is invalid."""
        self._config, self._send = config, send
        book = read_operators_book(config)
        assert book is not None, "settings without a file of operators are refused"
        self._callers = Callers(book, counted)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Listing]] = {}
        self.calls = OperatorCalls(RunningCalls(metrics, callers=self._callers), self._carry_out)

    def sources(self) -> Iterator[Source]:
        """Yield the watched operators file."""
        assert self._config.admin_tokens_file is not None
        load = partial(read_operators_book, self._config)
        yield Source("operators", (self._config.admin_tokens_file,), load, self._callers.replace)

    def receive(self, response: AdminResponse) -> None:
        """Complete the request of a response."""
        future = self._waiting.get(response.number)
        if future is None or future.done():
            return
        if response.listing is not None:
            future.set_result(response.listing)
        elif (kind := _ERRORS.get(response.error)) is None:
            future.set_exception(errors.Unavailable("the change could not be made"))
        else:
            error = kind.__new__(kind)
            errors.ServiceError.__init__(error, response.message, response.retry_after_seconds)
            future.set_exception(error)

    def drain(self) -> None:
        """Reject new requests, and end running ones."""
        self.calls.calls.draining.set()
        self.calls.calls.end_all()

    async def _carry_out(self, operator: Operator, order: Order) -> Listing:
        number = next(self._numbers)
        future: asyncio.Future[Listing] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._send(AdminRequest(number, operator, order))
        try:
            return await future
        finally:
            del self._waiting[number]


async def answer_admin_request(carry_out: CarryOut, request: AdminRequest) -> AdminResponse:
    """Execute a worker's admin request in the parent; return the response."""
    try:
        return AdminResponse(request.number, await carry_out(request.operator, request.order))
    except errors.ServiceError as error:
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "")
        return AdminResponse(request.number, None, kind, error.message, error.retry_after_seconds)
    except Exception:
        log.exception("an order could not be carried out", verb=request.order.verb)
        return AdminResponse(request.number, None)
