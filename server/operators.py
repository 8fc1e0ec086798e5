"""Administration endpoint: the admin service, its authentication and its shutdown, in the parent process."""

from collections.abc import Iterator
from functools import partial

import structlog

from dragoman.server.config import ServerConfig, is_loopback
from dragoman.server.models.administration import Administrator
from dragoman.server.models.manager import ModelManager
from dragoman.server.protocols.grpc.repository import RepositoryServer
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.callers import Callers
from dragoman.server.service.callers_file import read_operators_book
from dragoman.server.service.context import RunningCalls
from dragoman.server.service.service import CLOSE_SECONDS
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.server_metrics import CallerMetrics
from dragoman.server.watching import Source

log = structlog.get_logger("dragoman.operators")


class Operators:
    """Admin service over gRPC and HTTP; does nothing unless `admin_port` or `http_admin` is set."""

    def __init__(self, config: ServerConfig, manager: ModelManager, metrics: Metrics, counted: CallerMetrics) -> None:
        """Read the operators' tokens, or raise `ConfigError`; `counted` counts operators, who are not callers of models."""
        self._config = config
        self._administrator = Administrator(manager, has_store=isinstance(config.models, str))
        is_there = config.admin_port is not None or config.http_admin
        book = read_operators_book(config) if is_there else None
        self._callers = None if book is None else Callers(book, counted)
        self._calls = RunningCalls(metrics, callers=self._callers)
        self._server: RepositoryServer | None = None

    @property
    def port(self) -> int | None:
        """Port of the gRPC service; None if it does not listen."""
        return None if self._server is None else self._server.port

    @property
    def over_http(self) -> OperatorCalls | None:
        """Calls of operators over HTTP; None if `http_admin` is off."""
        return OperatorCalls(self._calls, self._administrator.carry_out) if self._config.http_admin else None

    async def start(self) -> None:
        """Listen and answer; changes are made only after `begin`. Raise `ConfigError` if the port or credentials cannot be used."""
        config, has_tokens = self._config, self._callers is not None and self._callers.has_tokens
        if config.http_admin and has_tokens and config.tls_key is None and not is_loopback(config.http_host):
            log.warning("operators' tokens travel unencrypted over HTTP: set tls_certificate and tls_key")
        if config.admin_port is None:
            return
        self._server = RepositoryServer(self._config, self._administrator.carry_out, self._calls)
        await self._server.start()
        log.info("admin service listens", host=self._config.admin_host, port=self._server.port)

    def sources(self) -> Iterator[Source]:
        """Yield the files to watch while the service is open."""
        if self._server is not None and (tls := self._server.tls) is not None:
            yield Source("admin_tls", tls.paths, tls.reload)
        if (path := self._config.admin_tokens_file) is not None and self._callers is not None:
            yield Source("operators", (path,), partial(read_operators_book, self._config), self._callers.replace)

    def begin(self) -> None:
        """Start making changes."""
        self._administrator.begin()

    def drain(self) -> None:
        """Refuse new calls, and end those that wait for a change."""
        self._calls.draining.set()
        self._calls.end_all()

    async def end(self) -> None:
        """Abandon changes in progress, and wait briefly for calls to be answered."""
        self.drain()
        await self._administrator.end()
        await self._calls.wait_ended(CLOSE_SECONDS)
        self._calls.log_suppressed()
