"""Who may call over gRPC: an interceptor that looks at tokens before messages."""

from typing import Any, NoReturn

import grpc

from dragoman.server.core.callers import Callers
from dragoman.server.errors import Unauthenticated
from dragoman.server.faces.grpc.interceptors import Context, Continuation, Handler, current_caller
from dragoman.server.faces.grpc.methods import OTHER, OWN_METHODS, Methods


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every RPC of nobody who is known, unknown methods too, before its message is read; probes need no caller.

    Certificates are not told here: where one would do, an RPC without a token is let through to where they are, which is still
    before its message is read.
    """

    def __init__(self, callers: Callers, methods: Methods = OWN_METHODS) -> None:
        """Let these call.

        Args:
            callers: Who may; may change.
            methods: How calls of RPCs are treated.
        """
        self._callers = callers
        self._methods = methods
        # A stream on both sides fits every kind of RPC: it takes no message before it answers.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
        self._unknown: Handler = grpc.stream_stream_rpc_method_handler(_say_unknown)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the RPC's handler, or one that refuses."""
        if self._methods.get(handler_call_details.method, OTHER).is_probe:
            return await continuation(handler_call_details)
        caller = self._callers.by_token(handler_call_details.invocation_metadata)
        if caller is None and not self._callers.has_certificates:
            return self._refusal
        current_caller.set(caller)
        handler = await continuation(handler_call_details)
        return self._unknown if handler is None and caller is None else handler


async def _refuse(_: Any, context: Context) -> NoReturn:
    raise Unauthenticated("authorization: a bearer token that this server knows is needed")


async def _say_unknown(_: Any, context: Context) -> NoReturn:
    """Say what gRPC itself would of a method that is not there, to somebody who turned out to be known."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
