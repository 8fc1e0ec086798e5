"""Links carry commands to an engine and events back: over a socket here, by calls in `dispatch/direct_link.py`."""

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
    """A connection to an engine, or to the dispatcher before a model's engines."""

    def open(self, receive: Callable[[Event], None], on_broken: Callable[[], None]) -> None:
        """Connect, within the event loop that uses the link.

        Args:
            receive: Called with each event, in order.
            on_broken: Called when a message cannot be read or handled, and is lost.
        """
        ...

    def send(self, command: Command) -> None:
        """Send a command; after `close` nothing is sent."""
        ...

    def close(self) -> None:
        """Disconnect; idempotent."""
        ...


class ZmqLink:
    """A DEALER socket connected to an endpoint, at which something listens or will listen."""

    def __init__(self, endpoint: str, identity: bytes = b"") -> None:
        """Describe the connection.

        Args:
            endpoint: ZeroMQ address.
            identity: By which the other end knows this one; no two links ever have the same. By default ZeroMQ makes one up.
        """
        self.endpoint, self._identity = endpoint, identity
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor: int | None = None

    def open(self, receive: Callable[[Event], None], on_broken: Callable[[], None]) -> None:
        """See `Link`.

        Raises:
            zmq.ZMQError: If the endpoint cannot be an address, or there is no room for a socket.
        """
        self._hear, self._on_broken = receive, on_broken
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if self._identity:
            self._socket.setsockopt(zmq.IDENTITY, self._identity)
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        # Edge-triggered: the descriptor signals once that something has happened on the socket.
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._receive)

    def send(self, command: Command) -> None:
        """See `Link`."""
        if self._socket is None:
            return
        self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)
        if self._has_arrivals():  # sending may consume the descriptor's signal of an arrived message
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """See `Link`."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._context.term()

    def _receive(self) -> None:
        """Pass on every message that has arrived."""
        while self._socket is not None and self._has_arrivals():
            try:
                self._hear(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except Exception:
                log.exception("a message from the engine cannot be handled")
                self._on_broken()

    def _has_arrivals(self) -> bool:
        assert self._socket is not None
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)
