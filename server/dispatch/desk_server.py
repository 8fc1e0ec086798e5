"""A desk behind a socket: front ends in processes of their own attach to it as they would to an engine."""

import asyncio
from functools import partial

import msgspec
import structlog
import zmq

from dragoman.server.dispatch.desk import Desk
from dragoman.server.engine.link import POLLIN
from dragoman.server.engine.messages import Command, Event, Hello

log = structlog.get_logger("dragoman.desk")


class DeskServer:
    """A ROUTER socket; front ends attach with `Hello` and are answered by identity, which is their own name.

    Attributes:
        endpoint: Where it listens.
    """

    def __init__(self, endpoint: str, desk: Desk) -> None:
        """Listen, within the event loop that the desk belongs to.

        Args:
            endpoint: ZeroMQ address.
            desk: Of the model.

        Raises:
            zmq.ZMQError: If there can be no such address.
        """
        self.endpoint = endpoint
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._origins: set[bytes] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._descriptor: int | None = None
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        # The descriptor says that something has happened on the socket, once; what that was is for the socket to say.
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._receive)

    @property
    def num_attached(self) -> int:
        """Attachments that there are."""
        return len(self._origins)

    def detach(self, name: str) -> None:
        """End everything that a front end has asked for which is gone."""
        if (origin := name.encode()) in self._origins:
            self._origins.discard(origin)
            self._desk.detach(origin)

    def close(self) -> None:
        """Listen no more; doing so again does nothing."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
        self._socket.close()
        self._context.term()

    def _receive(self) -> None:
        """Hand on everything that has arrived; what cannot be read is nobody's we know."""
        while self._descriptor is not None and self._has_arrivals():
            origin, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                command = self._decoder.decode(payload)
            except msgspec.MsgspecError:
                log.error("a message from a front end cannot be read", front_end=origin.decode(errors="replace"))
                continue
            if isinstance(command, Hello):
                self._origins.add(origin)
                self._desk.attach(origin, partial(self._send, origin))
            else:
                self._desk.take(origin, command)

    def _send(self, origin: bytes, event: Event) -> None:
        if self._socket.closed:
            return
        self._socket.send_multipart((origin, self._encoder.encode(event)), zmq.NOBLOCK)
        # Sending may swallow what the descriptor would have said of a message that has arrived.
        if self._has_arrivals():
            self._loop.call_soon(self._receive)

    def _has_arrivals(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)
