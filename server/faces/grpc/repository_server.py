"""The gRPC server of the admin service: an address of its own, with the server's TLS and with tokens of its own."""

from typing import Any

import grpc
import structlog

from dragoman.server.addresses import in_url
from dragoman.server.config import ConfigError, ServerConfig, is_loopback
from dragoman.server.core.administration import Administration
from dragoman.server.core.running import RunningCalls
from dragoman.server.faces.grpc.connections import connection_options
from dragoman.server.faces.grpc.interceptors import CallInterceptor
from dragoman.server.faces.grpc.lifecycle import Lifecycle
from dragoman.server.faces.grpc.repository import RepositoryServicer
from dragoman.server.faces.grpc.security import AuthInterceptor
from dragoman.server.faces.grpc.tls import credentials, peer_names
from dragoman.server.faces.large_requests import LARGE_BYTES
from dragoman.server.faces.tls_files import TlsFiles
from dragoman.v1 import repository_pb2_grpc


class RepositoryServer:
    """It listens once it is made, inside the event loop, and answers once it is started.

    Attributes:
        port: Where it listens.
        tls: The files that it shows; None where nothing is encrypted.
    """

    def __init__(self, config: ServerConfig, administration: Administration, calls: RunningCalls) -> None:
        """Take the port.

        Args:
            config: Address and credentials.
            administration: What does what is asked for.
            calls: Those that run, and who may make them.

        Raises:
            ConfigError: If the port is taken or credentials cannot be used.
        """
        self.tls = TlsFiles.of(config)
        interceptors: list[grpc.aio.ServerInterceptor] = [CallInterceptor(calls, peer_names=peer_names)]
        if calls.callers is not None:
            interceptors.append(AuthInterceptor(calls.callers))
            if calls.callers.has_tokens and self.tls is None and not is_loopback(config.admin_host):
                structlog.get_logger().warning("operators' tokens travel unencrypted: set tls_certificate and tls_key")
        options: list[tuple[str, Any]] = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", LARGE_BYTES),
            ("grpc.max_send_message_length", -1),
            *connection_options(config),
        ]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        servicer = RepositoryServicer(administration)
        repository_pb2_grpc.add_RepositoryServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._server.add_generic_rpc_handlers((Lifecycle(administration).handler(),))
        address = f"{in_url(config.admin_host)}:{config.admin_port}"
        try:
            self.port: int = (
                self._server.add_insecure_port(address)
                if self.tls is None
                else self._server.add_secure_port(address, credentials(self.tls))
            )
        except RuntimeError as error:
            raise ConfigError(f"admin_port: cannot listen on {address}; is another process using it?") from error

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()

    async def stop(self) -> None:
        """Close the port, for a process that goes on."""
        await self._server.stop(None)
