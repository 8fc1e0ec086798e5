"""What is promised to callers: the dashboard's tiles and lines.

`deploy/prometheus/rules` has the same figures; a test compares them.

Seconds must be edges of the latency histograms' buckets, or shares would be guesses.
"""

AVAILABILITY = 0.999
"""Share of the requests that end without an error that is the server's."""

LATENCY = 0.99
"""Share of the answers that take no longer than `LATENCY_SECONDS`."""

LATENCY_SECONDS = 1.0

FIRST_TOKEN_SECONDS = 0.5
"""No alert goes by it."""

SERVER_ERRORS = "INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN"
"""gRPC statuses that are the server's fault; refusing for a full queue is one."""
