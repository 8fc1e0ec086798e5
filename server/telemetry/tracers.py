"""Creation of the tracer from the settings; imports OpenTelemetry only if tracing is enabled."""

from typing import TYPE_CHECKING

from dragoman.extras import install_command
from dragoman.server.config import ConfigError, ServerConfig

if TYPE_CHECKING:  # imports OpenTelemetry
    from dragoman.server.telemetry.tracing import Tracer


def make_tracer(config: ServerConfig, version: str) -> "Tracer | None":
    """Return a tracer, None without a collector; raise `ConfigError` if OpenTelemetry is missing or rejects its settings."""
    if not config.tracing_endpoint:
        return None
    try:
        from dragoman.server.telemetry.tracing import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(f"tracing_endpoint: OpenTelemetry is not installed; {install_command('tracing')}") from error
    try:
        return Tracer(config.tracing_endpoint, config.tracing_sample_ratio, version)
    except Exception as error:  # OpenTelemetry's environment variables have errors of their own
        raise ConfigError(f"tracing_endpoint: a variable OTEL_* cannot be used: {error}") from error
