"""Requests that share an RPC: each has a record of its own, as those of GenerateBatch do."""

from collections.abc import Iterator
from contextlib import contextmanager

from structlog.contextvars import bind_contextvars

from dragoman.server.core.calls import Call
from dragoman.server.core.records import Records
from dragoman.server.errors import Unavailable
from dragoman.server.faces.grpc.interceptors import Context, own_ending


class Items:
    """Accompanies the requests of one RPC."""

    def __init__(self, records: Records, rpc: Call, context: Context) -> None:
        """Begin without any.

        Args:
            records: What writes the record of each.
            rpc: Record of the RPC.
            context: Of the RPC.
        """
        self.rpc = rpc
        self._records = records
        self._context = context

    @contextmanager
    def one(self, request_id: str, name: str = "") -> Iterator[Call]:
        """Accompany a request within the `with`, in a task of its own; what it raises is recorded.

        Args:
            request_id: Its id, or that of the message that has it.
            name: What the log calls it; empty for its id.

        Raises:
            ServiceError: What the caller is to be told, whatever was raised inside.
        """
        rpc = self.rpc
        call = Call.begin(rpc.method)
        call.request_id = request_id
        bind_contextvars(request_id=name or request_id, batch_id=rpc.request_id)
        self._records.begin_item(call, rpc)
        try:
            yield call
        except BaseException as error:
            if (code := own_ending(self._context, rpc.arrival, error)) is not None:
                self._finish(call, Unavailable.code if rpc.is_ended_by_server else code)
                raise
            if not isinstance(error, Exception):
                raise
            fault = self._records.fault(error)
            call.refusal = fault.refusal
            self._finish(call, fault.code)
            raise fault from None
        else:
            self._finish(call, "OK")

    def _finish(self, call: Call, code: str) -> None:
        """Write a request's record; its tokens count for the RPC's too."""
        self.rpc.source_tokens += call.source_tokens
        self.rpc.generated_tokens += call.generated_tokens
        self._records.finish(call, code, event="item")
