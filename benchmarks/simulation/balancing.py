"""Who gets the next request: a proxy that knows every pod at once, or clients that balance for themselves and hear of them late."""

import random
from collections.abc import Sequence
from typing import Protocol

from benchmarks.simulation.pod import Pod


class Balancer(Protocol):
    """Spreads requests over pods."""

    def update(self, now: float, ready: Sequence[Pod]) -> None:
        """Hear which pods there are."""

    def choose(self) -> Pod:
        """Return who gets the next request."""


class Proxy:
    """Knows every ready pod within a tick, and gives each request to the next."""

    def __init__(self) -> None:
        self._ready: Sequence[Pod] = []
        self._number = 0

    def update(self, now: float, ready: Sequence[Pod]) -> None:
        """Take the list."""
        self._ready = ready

    def choose(self) -> Pod:
        """Return the next in turn."""
        self._number += 1
        return self._ready[self._number % len(self._ready)]


class Clients:
    """Clients that balance for themselves, and look the pods up only when one of their connections ends.

    Args:
        num_clients: Clients, each with as much of the load as another.
        age_seconds: After which a server ends a connection, give or take a tenth; see `max_connection_age_seconds`.
        draws: Where chance comes from.
    """

    def __init__(self, num_clients: int, age_seconds: float, draws: random.Random) -> None:
        self._age_seconds, self._draws = age_seconds, draws
        self._known: list[dict[Pod, float]] = [{} for _ in range(num_clients)]
        self._numbers = [0] * num_clients

    def update(self, now: float, ready: Sequence[Pod]) -> None:
        """Let those look the pods up that lose a connection."""
        for known in self._known:
            is_first = not known
            if not is_first and all(pod in ready and end > now for pod, end in known.items()):
                continue
            ends = {pod: end for pod, end in known.items() if pod in ready and end > now}
            known.clear()
            known.update({pod: ends.get(pod) or now + self._lifetime(is_first) for pod in ready})

    def choose(self) -> Pod:
        """Return the next in turn of one of the clients."""
        client = self._draws.randrange(len(self._known))
        self._numbers[client] += 1
        pods = list(self._known[client])
        return pods[self._numbers[client] % len(pods)]

    def _lifetime(self, is_first: bool) -> float:
        """Return how long a connection lasts; the first ones have been there for a while."""
        seconds = self._age_seconds * self._draws.uniform(0.9, 1.1)
        return seconds * self._draws.random() if is_first else seconds
