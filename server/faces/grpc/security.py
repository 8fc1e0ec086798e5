"""Who may call over gRPC: an interceptor that looks at tokens before messages, and TLS, whose files are read at the start."""

import ssl
from typing import Any, NoReturn

import grpc

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.core.callers import Callers
from dragoman.server.errors import Unauthenticated
from dragoman.server.faces.grpc.interceptors import HEALTH_PREFIX, Context, Continuation, Handler, current_caller


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every RPC of nobody who is known, unknown methods too, before its message is read; health needs no caller.

    A certificate is known only with the message: where one would do, an RPC without a token is let through this far.
    """

    def __init__(self, callers: Callers) -> None:
        """Let these call; may change."""
        self._callers = callers
        # A stream on both sides fits every kind of RPC: it takes no message before it answers.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the RPC's handler, or one that refuses."""
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        caller = self._callers.by_token(handler_call_details.invocation_metadata)
        if caller is None and not self._callers.has_certificates:
            return self._refusal
        current_caller.set(caller)
        return await continuation(handler_call_details)


def tls_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return the server's credentials, with client certificates required where there is an authority for them; None without TLS.

    Raises:
        ConfigError: Naming the setting whose file cannot be used.
    """
    if config.tls_certificate is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # gRPC only logs what is wrong with a file and then fails to bind, so the files are tried here first.
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_certificate, tls_key: {config.tls_certificate}, {config.tls_key}: {error}") from error
    authorities = None
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except OSError as error:
            raise ConfigError(f"tls_client_ca: {config.tls_client_ca}: {error}") from error
        authorities = config.tls_client_ca.read_bytes()
    pair = (config.tls_key.read_bytes(), config.tls_certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)


def _no_password() -> NoReturn:
    """Refuse to ask for a password: nobody is there to type it."""
    raise ValueError("the key is encrypted")


async def _refuse(_: Any, context: Context) -> NoReturn:
    raise Unauthenticated("authorization: a bearer token that this server knows is needed")
