"""What a caller has used of its limits: the levels of its buckets, its requests under way, its open streams.

Here it is the process's own. Where several processes serve the same callers, `server/fronts/table.py` has one that they share.
"""

from typing import Protocol, Self

from dragoman.server.buckets import Bucket


class Usage(Protocol):
    """One caller's. It is looked at and changed within its `with` alone, which does not wait and is not entered twice.

    Attributes:
        num_running: Requests under way.
        num_streams: Streams of requests that are open.
        requests: What limits the rate of requests; None where nothing does.
        tokens: The same of tokens.
    """

    num_running: int
    num_streams: int
    requests: Bucket | None
    tokens: Bucket | None

    def __enter__(self) -> Self:
        """See what has been used until now."""
        ...

    def __exit__(self, *_: object) -> None:
        """Have what was changed seen by whoever looks next."""
        ...

    def change(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        """Have these buckets from now on; within the `with`, as everything."""
        ...


class OwnUsage:
    """What nobody else changes."""

    __slots__ = ("num_running", "num_streams", "requests", "tokens")

    def __init__(self, name: str) -> None:
        """Start with nothing used, whoever it is."""
        self.num_running = 0
        self.num_streams = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def __enter__(self) -> Self:
        """See `Usage`."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `Usage`."""

    def change(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        """See `Usage`."""
        self.requests, self.tokens = requests, tokens
