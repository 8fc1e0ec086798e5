"""The way to a desk that lives in the same process: calls, where `engine/link.py` has a socket."""

from collections.abc import Callable

from dragoman.server.dispatch.desk import Desk
from dragoman.server.engine.messages import Command, Event, Hello

ORIGIN = b"here"


class DirectLink:
    """A `Link`, see there: what is sent is taken at once, and what is told is heard at once. There is one at a time."""

    def __init__(self, desk: Desk) -> None:
        """Attach to nothing yet; `Hello` does that."""
        self._desk = desk
        self._is_closed = False

    def open(self, receive: Callable[[Event], None], on_broken: Callable[[], None]) -> None:
        """See `Link`; nothing that is heard cannot be handled."""
        self._hear = receive

    def send(self, command: Command) -> None:
        """See `Link`."""
        if self._is_closed:
            return
        if isinstance(command, Hello):
            self._desk.attach(ORIGIN, self._hear)
        else:
            self._desk.take(ORIGIN, command)

    def close(self) -> None:
        """See `Link`."""
        self._is_closed = True
        self._desk.detach(ORIGIN)
