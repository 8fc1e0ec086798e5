"""The trace a call belongs to, told to the server as W3C Trace Context, where the program uses OpenTelemetry."""

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the active span; none where there is no span, or no OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:  # nobody can have started a span
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
