"""What all streams of requests of a server share, whichever service they are of."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.faces.grpc.hand import Allowance, Hand
from dragoman.server.faces.grpc.places import Places, owner_of
from dragoman.server.faces.grpc.reading import OfConnections, Turns

# Requests in hand for each slot of the largest model: one that decodes and one that is ready to take its place.
REQUESTS_PER_SLOT = 2
# Each of them may have a large message half sent.
MAX_STREAMS_PER_CONNECTION = 64


def requests_per_stream(core: Core) -> int:
    """Return how many requests a stream may have in hand."""
    return REQUESTS_PER_SLOT * max((model.max_slots for model in core.models.all()), default=1)


class Streams:
    """Gives each stream its place, its turns at reading, and its part of what may be in hand."""

    def __init__(self, core: Core) -> None:
        """Start without streams."""
        self._core = core
        self._allowance = Allowance()
        self._turns = OfConnections(Turns)
        self._places = Places("max_batch_streams_per_connection", sys.maxsize, MAX_STREAMS_PER_CONNECTION)

    def turns(self, peer: str) -> Turns:
        """Return the turns of a connection's streams."""
        return self._turns.of(peer)

    @contextmanager
    def open(self, call: Call, peer: str) -> Iterator[Hand]:
        """Give a stream its place and its hand within the `with`.

        Raises:
            ConnectionLimit: If the connection has its share of places.
        """
        with self._places.take(peer), self.hand(call, peer) as hand:
            yield hand

    @contextmanager
    def hand(self, call: Call, peer: str) -> Iterator[Hand]:
        """Give a call of several requests, which ends by itself, its hand within the `with`."""
        with self._allowance.held(requests_per_stream(self._core), owner_of(call, peer)) as hand:
            yield hand
