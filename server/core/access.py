"""From the settings to who may call: the file of callers, read at the start and again when it has changed."""

from collections.abc import Callable

import structlog

from dragoman.server.config import ServerConfig
from dragoman.server.core.callers import Callers
from dragoman.server.core.callers_file import Book, read_book
from dragoman.server.core.deadlines import Deadlines
from dragoman.server.core.usage import OwnUsage, Usage
from dragoman.server.telemetry.metrics import Metrics

log = structlog.get_logger("dragoman.callers")


def read_callers(
    config: ServerConfig, metrics: Metrics, deadlines: Deadlines, usage_of: Callable[[str], Usage] = OwnUsage
) -> Callers | None:
    """Return who may call; None if anybody may.

    Args:
        config: Names the file, if there is one.
        metrics: Where callers are counted.
        deadlines: The server's own.
        usage_of: Returns what a caller of a name has used of its limits.

    Raises:
        ConfigError: If the file cannot be used.
    """
    book = read_callers_book(config)
    return None if book is None else Callers(book, metrics.callers, deadlines, usage_of=usage_of)


def read_operators_book(config: ServerConfig) -> Book | None:
    """Return what the file of operators says; None if there is none, and whoever reaches the admin service may use it.

    Raises:
        ConfigError: If it cannot be used.
    """
    if config.admin_tokens_file is None:
        return None
    has_certificates = config.tls_client_ca is not None
    book = read_book(config.admin_tokens_file, has_client_certificates=has_certificates, setting="admin_tokens_file")
    for warning in book.warnings:
        log.warning("file of operators", warning=warning)
    return book


def read_callers_book(config: ServerConfig) -> Book | None:
    """Return what the file of callers says; None if there is none.

    Raises:
        ConfigError: If it cannot be used.
    """
    if config.auth_tokens_file is None:
        return None
    book = read_book(config.auth_tokens_file, has_client_certificates=config.tls_client_ca is not None)
    for warning in book.warnings:
        log.warning("file of callers", warning=warning)
    return book
