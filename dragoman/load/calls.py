"""Making one call with the bare stubs and noting when what came: the client proper would cost the sender more than the call."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from dragoman.client.aio_batch_stream import EndStatus
from dragoman.client.aio_calls import is_task_cancelled
from dragoman.client.errors import CallError, Cancelled, DeadlineExceeded, Overloaded, Unavailable, from_rpc_error, from_status
from dragoman.client.retry import Attempts, RetryPolicy
from dragoman.client.settings import Settings
from dragoman.load.items import REFUSALS, Item
from dragoman.load.plan import Plan
from dragoman.load.tally import ACCEPTED, INCOMPLETE, OK, UNFINISHED, Outcome
from dragoman.v1 import generation_pb2

_INTENDED = {"cancel": frozenset({"CANCELLED"}), "deadline": frozenset({"DEADLINE_EXCEEDED"}), "malformed": REFUSALS}
# Tolerance between our clock and that of gRPC's deadlines.
_TIMER_SECONDS = 0.002


@dataclass(slots=True)
class _Call:
    """A call under way."""

    item: Item
    due: float
    pending: dict[str, generation_pb2.GenerateRequest]  # requests without an outcome, by id
    seconds: float = 0.0  # time of the attempt
    num_retries: int = 0
    retry_error: CallError | None = None  # last failure of a request of a batch that may be tried again
    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)


class Caller:
    """Makes calls with the stub of a connection, and calls `record` with the outcome of each of their requests.

    `clock` returns seconds since the start of the run.
    """

    def __init__(self, plan: Plan, stub: Any, record: Callable[[Outcome], None], clock: Callable[[], float]) -> None:
        self._plan = plan
        self._stub = stub
        self._record = record
        self._clock = clock
        self._policy = RetryPolicy(max_attempts=1 + plan.num_retries)
        server = plan.server
        self._metadata = Settings(server.target, plan.timeout_seconds, self._policy, server.token, {}, clock).metadata()
        self._attempt = {"unary": self._attempt_unary, "stream": self._attempt_stream, "batch": self._attempt_batch}

    async def call(self, item: Item, due: float) -> None:
        """Make a call; each of its requests is recorded exactly once, also where the task is cancelled."""
        call = _Call(item, due, {request.request_id: request for request in item.requests})
        code, message = UNFINISHED, ""
        try:
            error = await self._try_call(call)
            code, message = (INCOMPLETE, "") if error is None else (error.code, error.message)
        finally:
            for request_id in list(call.pending):
                self._fail(call, request_id, code, message)

    async def _try_call(self, call: _Call) -> CallError | None:
        """Try until every request has its outcome or there is no time left; return why requests are left, None for no reason."""
        timeout = self._plan.injections.deadline_seconds if call.item.injection == "deadline" else self._plan.timeout_seconds
        attempts = Attempts(self._policy, timeout, clock=self._clock)
        while True:
            error = await self._try_once(call, attempts)
            has_begun = call.item.kind == "stream" and call.first_token is not None
            wait = None if error is None or has_begun else attempts.wait_seconds(error)
            if wait is None:
                return error
            call.num_retries += 1
            await asyncio.sleep(wait)

    async def _try_once(self, call: _Call, attempts: Attempts) -> CallError | None:
        """Make one attempt; return why requests are left, None where it ended by itself."""
        call.retry_error = None
        try:
            call.seconds = attempts.start()
            await self._attempt[call.item.kind](call)
        except aio.AioRpcError as failure:
            if self._plan.num_retries:
                return from_rpc_error(failure)
            return CallError(failure.details() or "", code=failure.code().name)  # nobody asks when to try again
        except CallError as error:
            return error
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return Cancelled("")
        return call.retry_error

    async def _attempt_unary(self, call: _Call) -> None:
        (request,) = call.pending.values()
        self._answer(call, request.request_id, await self._open(call, self._stub.Generate, request))

    async def _attempt_stream(self, call: _Call) -> None:
        (request,) = call.pending.values()
        slow = self._plan.injections.slow_seconds if call.item.injection == "slow" else 0.0
        last = 0.0
        result = None
        async for message in self._open(call, self._stub.GenerateStream, request):
            now = self._clock()
            if message.tokens:
                if call.first_token is None:
                    call.first_token = now
                else:
                    call.gaps.append(now - last)
                last = now
            if message.HasField("result"):
                result = message.result
            if slow:
                await asyncio.sleep(slow)
        if result is not None:
            self._answer(call, request.request_id, result)

    async def _attempt_batch(self, call: _Call) -> None:
        begun = self._clock()
        rpc = self._open(call, self._stub.GenerateBatch, list(call.pending.values()))
        status = EndStatus(rpc)
        try:
            async for message in rpc:
                if message.request_id not in call.pending:
                    continue
                if message.HasField("response"):
                    self._answer(call, message.request_id, message.response)
                    continue
                error = from_status(message.error)
                if self._plan.num_retries and isinstance(error, Overloaded | Unavailable):
                    call.retry_error = error
                else:
                    self._fail(call, message.request_id, error.code, error.message)
        except aio.AioRpcError:
            if failure := await status.error():
                raise failure from None
        except asyncio.CancelledError as cancelled:
            if call.item.injection == "cancel" or is_task_cancelled():
                raise
            # Nobody cancelled but grpc.aio, which could not write that there are no more requests and forgets why.
            if self._clock() - begun >= call.seconds - _TIMER_SECONDS:
                raise DeadlineExceeded("the call's time has passed") from cancelled
            raise Unavailable("the connection broke while it was written to") from cancelled

    def _open(self, call: _Call, method: Callable[..., Any], requests: object) -> Any:
        """Begin an attempt, and plan its cancelling if the call is to be cancelled."""
        rpc = method(requests, timeout=call.seconds, metadata=self._metadata)
        if call.item.injection == "cancel":
            asyncio.get_running_loop().call_later(self._plan.injections.cancel_seconds, rpc.cancel)
        return rpc

    def _answer(self, call: _Call, request_id: str, response: generation_pb2.GenerateResponse) -> None:
        outcome = self._outcome(call, ACCEPTED if call.item.injection == "malformed" else OK)
        outcome.first_token, outcome.gaps = call.first_token, call.gaps
        outcome.source_tokens = response.usage.source_tokens
        outcome.generated_tokens = response.usage.generated_tokens
        if response.HasField("timings"):
            outcome.queue_seconds = response.timings.queue_seconds
            outcome.server_seconds = response.timings.total_seconds
        del call.pending[request_id]
        self._record(outcome)

    def _fail(self, call: _Call, request_id: str, code: str, message: str) -> None:
        outcome = self._outcome(call, code)
        outcome.message, outcome.is_intended = message, code in _INTENDED.get(call.item.injection, ())
        del call.pending[request_id]
        self._record(outcome)

    def _outcome(self, call: _Call, code: str) -> Outcome:
        item = call.item
        return Outcome(item.group, bool(item.injection), call.due, self._clock(), code, num_retries=call.num_retries)
