"""One model's desk: the one queue, before however many engines run it. Front ends attach to it as they would to an engine.

Everything here is called on one event loop, and is done when it returns. Who starts engines and notices that they are gone is
`replicas.py`; who is next, and where it goes, is `dispatcher.py`.
"""

from collections.abc import Callable

from dragoman.server.engine.messages import Command, Event, Ready, Report


class Desk:
    """Takes requests from front ends, gives each to one replica, and brings back what becomes of it."""

    def attach(self, origin: bytes, deliver: Callable[[Event], None]) -> None:
        """Begin to tell a front end what happens: `Ready` as soon as the model is ready, which may be at once; `Down` when not.

        Args:
            origin: Identity of the front end; one that is attached already begins anew, and what it had asked for is ended.
            deliver: Called with each event, on the loop, also from within `attach` and `take`; it must not raise.
        """
        raise NotImplementedError

    def take(self, origin: bytes, command: Command) -> None:
        """Take in what a front end says, `Submit`, `Score` or `Cancel`; `Hello` and `Stop` are not for a desk, and do nothing."""
        raise NotImplementedError

    def detach(self, origin: bytes) -> None:
        """End everything that a front end has asked for, and tell it nothing more; without effect for one that is not attached."""
        raise NotImplementedError

    def open_replica(self, index: int, ready: Ready, send: Callable[[Command], None]) -> None:
        """Give work to a replica from now on.

        Args:
            index: Which of the model's replicas it is.
            ready: What it has said.
            send: Sends it a command.
        """
        raise NotImplementedError

    def hear(self, index: int, report: Report) -> None:
        """Take in what a replica says."""
        raise NotImplementedError

    def close_replica(self, index: int, reason: str, retry_after_seconds: float) -> None:
        """End what a replica had as `lost`; with the last one everything that waits ends, and front ends are told `Down`.

        Args:
            index: Of a replica; one that is not open is none to close.
            reason: For callers, of `Down`.
            retry_after_seconds: See `Down`.
        """
        raise NotImplementedError
