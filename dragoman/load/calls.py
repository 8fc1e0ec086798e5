"""Making one call with the bare stubs and noting when what came: the client proper would cost the sender more than the call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpc import aio

from dragoman.client.aio_batch_stream import EndStatus
from dragoman.client.aio_calls import is_task_cancelled
from dragoman.client.errors import CallError, DeadlineExceeded, Overloaded, Unavailable, from_rpc_error, from_status
from dragoman.client.retry import Attempts, RetryPolicy
from dragoman.client.settings import Settings
from dragoman.load.items import REFUSALS, Item
from dragoman.load.plan import Plan
from dragoman.load.tally import ACCEPTED, INCOMPLETE, OK, UNFINISHED, Outcome
from dragoman.v1 import generation_pb2

_INTENDED = {"cancel": frozenset({"CANCELLED"}), "deadline": frozenset({"DEADLINE_EXCEEDED"}), "malformed": REFUSALS}
# Tolerance between our clock and that of gRPC's deadlines.
_TIMER_SECONDS = 0.002
_RETRIED = frozenset({Overloaded.default_code, Unavailable.default_code})


class Caller:
    """Makes calls, and hands on how each of their requests ended.

    Args:
        plan: How long calls may take, how often they are tried, and how they misbehave.
        stub: Of the connection.
        record: What to do with an outcome.
        clock: Seconds since the start of the run.
    """

    def __init__(self, plan: Plan, stub: Any, record: Callable[[Outcome], None], clock: Callable[[], float]) -> None:
        self._plan = plan
        self._stub = stub
        self._record = record
        self._clock = clock
        self._policy = RetryPolicy(max_attempts=1 + plan.num_retries)
        server = plan.server
        self._metadata = Settings(server.target, plan.timeout_seconds, self._policy, server.token, {}, clock).metadata()
        self._attempt: dict[str, Callable[[_Call], Awaitable[None]]] = {
            "unary": self._attempt_unary,
            "stream": self._attempt_stream,
            "batch": self._attempt_batch,
        }

    async def call(self, item: Item, due: float) -> None:
        """Make a call; each of its requests is recorded exactly once, also where the task is cancelled."""
        call = _Call(item, due)
        try:
            await self._try_call(call)
        finally:
            self._end(call, UNFINISHED)

    async def _try_call(self, call: "_Call") -> None:
        """Try until every request has its outcome or there is no time left."""
        timeout = self._plan.injections.deadline_seconds if call.item.injection == "deadline" else self._plan.timeout_seconds
        attempts = Attempts(self._policy, timeout, clock=self._clock)
        while True:
            try:
                call.seconds = attempts.start()
            except DeadlineExceeded as late:
                self._end(call, late.code, late.message)
                return
            error = await self._try_once(call)
            wait = None if error is None else attempts.wait_seconds(error)
            if wait is None:
                self._end(call, *(INCOMPLETE, "") if error is None else (error.code, error.message))
                return
            call.num_retries += 1
            await asyncio.sleep(wait)

    async def _try_once(self, call: "_Call") -> CallError | None:
        """Make one attempt; return why requests are left that may be tried again or fail, None where it ended by itself."""
        call.retry_error = None
        try:
            await self._attempt[call.item.kind](call)
        except aio.AioRpcError as failure:
            if call.first_token is not None and self._plan.num_retries:  # a stream that has begun is not retried
                self._end(call, failure.code().name, failure.details() or "")
                return None
            if self._plan.num_retries:
                return from_rpc_error(failure)
            return CallError(failure.details() or "", code=failure.code().name)  # nobody asks when to try again
        except CallError as error:
            return error
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            self._end(call, "CANCELLED")
            return None
        finally:
            call.stop_timer()
        return call.retry_error

    async def _attempt_unary(self, call: "_Call") -> None:
        (request,) = call.pending.values()
        rpc = self._stub.Generate(request, timeout=call.seconds, metadata=self._metadata)
        self._misbehave(call, rpc)
        self._answer(call, request.request_id, await rpc)

    async def _attempt_stream(self, call: "_Call") -> None:
        (request,) = call.pending.values()
        rpc = self._stub.GenerateStream(request, timeout=call.seconds, metadata=self._metadata)
        self._misbehave(call, rpc)
        slow = self._plan.injections.slow_seconds if call.item.injection == "slow" else 0.0
        last = 0.0
        result = None
        async for message in rpc:
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

    async def _attempt_batch(self, call: "_Call") -> None:
        rpc = self._stub.GenerateBatch(list(call.pending.values()), timeout=call.seconds, metadata=self._metadata)
        status = EndStatus(rpc)
        begun = self._clock()
        self._misbehave(call, rpc)
        try:
            await self._take_answers(call, rpc)
        except aio.AioRpcError:
            error = await status.error()
            if error is not None:
                raise error from None
        except asyncio.CancelledError as failure:
            if call.item.injection == "cancel" or is_task_cancelled():
                raise
            # Nobody cancelled but grpc.aio, which could not write that there are no more requests and forgets why.
            if self._clock() - begun >= call.seconds - _TIMER_SECONDS:
                raise DeadlineExceeded("the call's time has passed") from failure
            raise Unavailable("the connection broke while it was written to") from failure

    async def _take_answers(self, call: "_Call", rpc: Any) -> None:
        """Take in what comes on the stream of a batch."""
        async for message in rpc:
            if message.request_id not in call.pending:
                continue
            if message.HasField("response"):
                self._answer(call, message.request_id, message.response)
                continue
            error = from_status(message.error)
            if self._plan.num_retries and error.code in _RETRIED:
                call.retry_error = error
            else:
                self._fail(call, message.request_id, error.code, error.message)

    def _misbehave(self, call: "_Call", rpc: Any) -> None:
        if call.item.injection == "cancel":
            call.timer = asyncio.get_running_loop().call_later(self._plan.injections.cancel_seconds, rpc.cancel)

    def _answer(self, call: "_Call", request_id: str, response: generation_pb2.GenerateResponse) -> None:
        outcome = self._outcome(call)
        outcome.code = ACCEPTED if call.item.injection == "malformed" else OK
        outcome.first_token, outcome.gaps = call.first_token, call.gaps
        outcome.source_tokens = response.usage.source_tokens
        outcome.generated_tokens = response.usage.generated_tokens
        if response.HasField("timings"):
            outcome.queue_seconds = response.timings.queue_seconds
            outcome.server_seconds = response.timings.total_seconds
        del call.pending[request_id]
        self._record(outcome)

    def _fail(self, call: "_Call", request_id: str, code: str, message: str) -> None:
        outcome = self._outcome(call)
        outcome.code, outcome.message = code, message
        outcome.is_intended = code in _INTENDED.get(call.item.injection, ())
        del call.pending[request_id]
        self._record(outcome)

    def _end(self, call: "_Call", code: str, message: str = "") -> None:
        """Let what has no outcome yet end with a status."""
        for request_id in list(call.pending):
            self._fail(call, request_id, code, message)

    def _outcome(self, call: "_Call") -> Outcome:
        return Outcome(call.item.group, bool(call.item.injection), call.due, ended=self._clock(), num_retries=call.num_retries)


class _Call:
    """A call under way."""

    __slots__ = ("due", "first_token", "gaps", "item", "num_retries", "pending", "retry_error", "seconds", "timer")

    def __init__(self, item: Item, due: float) -> None:
        self.item, self.due = item, due
        self.pending = {request.request_id: request for request in item.requests}
        self.seconds = 0.0
        self.num_retries = 0
        self.retry_error: CallError | None = None
        self.first_token: float | None = None
        self.gaps: list[float] = []
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Cancel nobody any more."""
        if self.timer is not None:
            self.timer.cancel()
