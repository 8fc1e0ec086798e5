"""A watcher of health whose HTTP/2 window is zero; then an engine dies, and the server is told to end."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from benchmarks.attacks.attack import Attack, Figure, Scene, seconds
from benchmarks.attacks.http2 import INITIAL_WINDOW_SIZE, Connection
from benchmarks.attacks.others import Look, Prober
from benchmarks.harness.apart import Apart
from benchmarks.harness.replica import Replica

WATCH = "/grpc.health.v1.Health/Watch"
NUM_WATCHERS = 5
DRAIN_SECONDS = 5
SEEN_LIMIT_SECONDS, END_LIMIT_SECONDS = 30.0, 45.0
SETTLE_SECONDS = 1.0


def run(scene: Scene) -> Iterator[Figure]:
    """Kill the engine and end the server while nobody reads what watchers are sent."""
    flags = (f"--drain-seconds={DRAIN_SECONDS}", "--restart-backoff-initial-seconds=2")
    with scene.serve(*flags) as server, Connection(server.address, {INITIAL_WINDOW_SIZE: 0}) as attacker:
        for i in range(NUM_WATCHERS):
            attacker.call(2 * i + 1, WATCH, b"")
        time.sleep(SETTLE_SECONDS)
        with Apart(Prober, server.address, 0.01) as honest:
            died = time.monotonic()
            os.kill(server.engine_pid, signal.SIGKILL)
            took = _until(honest, lambda look: look.status == "NOT_SERVING", died)
            yield Figure("engine killed, until health says NOT_SERVING, s", seconds(took, SEEN_LIMIT_SECONDS))
            came_back = _engine_back(server)
            took = _until(honest, lambda look: look.status == "SERVING", came_back)
            yield Figure("engine back, until health says SERVING, s", seconds(took, SEEN_LIMIT_SECONDS))
            honest.call("stop")
        yield Figure(f"SIGTERM (drain of {DRAIN_SECONDS} s) until the end, s", seconds(end(server), END_LIMIT_SECONDS))


def end(server: Replica) -> float | None:
    """Return how long a server takes to end after SIGTERM, None for longer than the limit."""
    began = time.monotonic()
    try:
        server.terminate(END_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return None
    return time.monotonic() - began


def _engine_back(server: Replica) -> float:
    """Return when a second engine became ready."""
    until = time.monotonic() + 60
    while server.log().count('"event":"engine ready"') < 2:
        if time.monotonic() > until:
            raise TimeoutError("no second engine")
        time.sleep(0.01)
    return time.monotonic()


def _until(honest: Apart, condition: Callable[[Look], bool], since: float) -> float | None:
    """Return how long it took from a moment until a call that began after it saw something; None for longer than the limit."""
    while time.monotonic() < since + SEEN_LIMIT_SECONDS:
        for look in honest.call("looks"):
            if look.began >= since and condition(look):
                return float(look.began + look.took - since)
        time.sleep(0.05)
    return None


ATTACK = Attack("watch", "health watched with a window of zero", run)
