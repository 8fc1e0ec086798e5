"""What carries commands to an engine and events back. Over a socket here; `dispatch/direct_link.py` has one that needs none."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog
import zmq

from dragoman.server.engine.messages import Command, Event

log = structlog.get_logger("dragoman.engine.client")

# As a plain number: `&` of enumerations makes an object each time.
POLLIN = int(zmq.POLLIN)


class Link(Protocol):
    """A way to one engine, or to what stands before several."""

    def open(self, hear: Callable[[Event], None], on_broken: Callable[[], None]) -> None:
        """Begin to listen, within the event loop that uses it.

        Args:
            hear: Called with each event, in order.
            on_broken: Called once if something comes that cannot be handled; nothing is heard after that.
        """
        ...

    def send(self, command: Command) -> None:
        """Send a command; after `close` that does nothing."""
        ...

    def close(self) -> None:
        """Listen and send no more; doing so again does nothing."""
        ...


class ZmqLink:
    """A DEALER socket that is attached to whoever listens at an endpoint, or will."""

    def __init__(self, endpoint: str, identity: bytes = b"") -> None:
        """Attach; must be called within the event loop that uses it.

        Args:
            endpoint: ZeroMQ address.
            identity: What the other end is to know it by; no two links ever have the same. By default ZeroMQ makes one up.
        """
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._descriptor: int | None = None
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def open(self, hear: Callable[[Event], None], on_broken: Callable[[], None]) -> None:
        """See `Link`."""
        self._hear, self._on_broken = hear, on_broken
        # The descriptor says that something has happened on the socket, once; what that was is for the socket to say.
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._receive)

    def send(self, command: Command) -> None:
        """See `Link`."""
        if self._socket.closed:
            return
        self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)
        # Sending may swallow what the descriptor would have said of a message that has arrived.
        if self._has_arrivals():
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """See `Link`."""
        self._stop_receiving()
        self._socket.close()
        self._context.term()

    def _receive(self) -> None:
        """Hand on everything that has arrived; what cannot be handled ends the attachment."""
        try:
            while self._descriptor is not None and self._has_arrivals():
                self._hear(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        except Exception:
            log.exception("a message from the engine cannot be handled")
            self._stop_receiving()
            self._on_broken()

    def _has_arrivals(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)

    def _stop_receiving(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
