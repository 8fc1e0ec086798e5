"""Connections that are many, slow, or busy with nothing: what a neighbour's small requests take meanwhile."""

import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.attacks.attack import Attack, Figure, Scene, percentile
from benchmarks.attacks.http2 import PING, PREFACE, RST_STREAM, SETTINGS, Connection, call_frames, frame
from benchmarks.attacks.others import Look, Prober
from benchmarks.harness.apart import Apart
from benchmarks.harness.replica import Replica
from benchmarks.harness.served import cpu_seconds
from dragoman.v1 import generation_pb2

SECONDS = 6.0
NUM_IDLE = 2000
NUM_FLOODERS = 2
REFUSED = "/dragoman.v1.Generation/Generate"
SMALL = generation_pb2.GenerateRequest(text="A dog.", max_new_tokens=1)
UNFIT = generation_pb2.GenerateRequest(text=" ")
# Streams of one connection: their numbers are odd and end at 2^31; some way before that another connection is opened.
STREAMS = range(1, 200_001, 2)


class Idlers:
    """Connections that say hello and nothing else."""

    def __init__(self, address: str, number: int) -> None:
        """Open them, as many as the server lets."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, number + 500)), hard))
        host, _, port = address.rpartition(":")
        self._sockets = []
        for _ in range(number):
            try:
                each = socket.create_connection((host, int(port)), 10)
                each.sendall(PREFACE + frame(SETTINGS, 0, 0))
            except OSError:
                continue  # refused, as it should be from some number on
            self._sockets.append(each)

    def num_open(self) -> int:
        """Return how many the server has not closed."""
        return sum(_is_open(each) for each in self._sockets)

    def close(self) -> None:
        """Close them."""
        for each in self._sockets:
            each.close()


class Flood:
    """Connections that write as fast as they can, in threads, and begin anew when they are thrown out."""

    def __init__(self, address: str, kind: str) -> None:
        """Start.

        Args:
            address: Of the server.
            kind: `resets`, `pings` or `refused`.
        """
        self._make = {"resets": _reset, "pings": _ping, "refused": _refused}[kind]
        self._address = address
        self._is_over = threading.Event()
        self._num_sent = self._num_connections = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_FLOODERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> tuple[int, int]:
        """Stop; return how many were sent, on how many connections."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)
        return self._num_sent, self._num_connections

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with Connection(self._address) as connection:
                    self._num_connections += 1
                    connection.socket.settimeout(2.0)
                    for part in self._parts(connection):
                        connection.socket.sendall(part)
            except OSError:
                self._is_over.wait(0.05)  # thrown out

    def _parts(self, connection: Connection) -> Iterator[bytes]:
        """Give what to write, until it is over or the server has had enough."""
        for stream in STREAMS:
            if self._is_over.is_set() or connection.is_closed.is_set():
                return
            self._num_sent += 1
            yield self._make(stream)


def _reset(stream: int) -> bytes:
    return call_frames(stream, REFUSED, SMALL.SerializeToString()) + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")


def _ping(stream: int) -> bytes:
    return frame(PING, 0, 0, stream.to_bytes(8, "big"))


def _refused(stream: int) -> bytes:
    return call_frames(stream, REFUSED, UNFIT.SerializeToString())


def run(scene: Scene) -> Iterator[Figure]:
    """Measure the neighbour alone, then beside each."""
    with scene.serve() as server:
        yield Figure("a neighbour alone: median, p99 ms", _times(_neighbour(server.address)))
        with Apart(Prober, server.address, 0.02, "generate") as older:
            idlers = Idlers(server.address, NUM_IDLE)
            newer = _neighbour(server.address)
            yield Figure(f"{NUM_IDLE} idle connections: left open", str(idlers.num_open()))
            idlers.close()
            yield Figure("beside them, who was there before: median, p99 ms", _times(older.call("stop")))
        yield Figure("beside them, who came after: median, p99 ms", _times(newer))
    for kind, title in (("resets", "calls that are reset at once"), ("pings", "pings"), ("refused", "calls that are refused")):
        with scene.serve() as server:
            yield from _flooded(server, kind, title)
    yield from _slow_handshakes(scene)


def _flooded(server: Replica, kind: str, title: str) -> Iterator[Figure]:
    used, lines = cpu_seconds(server.front_pid), server.log().count("\n")
    with Apart(Flood, server.address, kind) as flood:
        began = time.monotonic()
        looks = _neighbour(server.address)
        num_sent, num_connections = flood.call("stop")
        took = time.monotonic() - began
    cores = (cpu_seconds(server.front_pid) - used) / took
    logged = server.log().count("\n") - lines
    yield Figure(f"beside {title}: median, p99 ms", _times(looks))
    yield Figure(f"{title}: a second, connections", f"{num_sent / took:.0f}, {num_connections}")
    yield Figure(f"{title}: front end's cores, lines logged a second", f"{cores:.2f}, {logged / took:.0f}")


def _slow_handshakes(scene: Scene) -> Iterator[Figure]:
    """Open connections to a server with TLS and send a byte of a handshake."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out pem -days 2 -subj /CN=localhost"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
        server = stack.enter_context(scene.serve(f"--tls-certificate={Path(folder) / 'pem'}", f"--tls-key={Path(folder) / 'key'}"))
        host, _, port = server.address.rpartition(":")
        slow = []
        for _ in range(200):
            each = stack.enter_context(socket.create_connection((host, int(port)), 10))
            each.sendall(b"\x16")
            slow.append(each)
        began = time.monotonic()
        while time.monotonic() < began + 60 and any(map(_is_open, slow)):
            time.sleep(0.1)
        closed = time.monotonic() - began if not any(map(_is_open, slow)) else None
        held = len(os.listdir(f"/proc/{server.front_pid}/fd"))
    yield Figure(
        "200 TLS handshakes that do not go on: closed after, s", f"{closed:.1f}" if closed is not None else "not within 60"
    )
    yield Figure("descriptors then", str(held))


def _neighbour(address: str) -> list[Look]:
    """Return what small requests, fifty a second, came to."""
    with Apart(Prober, address, 0.02, "generate") as prober:
        time.sleep(SECONDS)
        looks: list[Look] = prober.call("stop")
    return looks


def _times(looks: list[Look]) -> str:
    """Return the times of those that were answered, and how many were not."""
    took = [look.took * 1000 for look in looks if look.status == "OK"]
    failed = len(looks) - len(took)
    return f"{percentile(took, 50):.1f}, {percentile(took, 99):.1f}" + (f" ({failed} of {len(looks)} failed)" if failed else "")


def _is_open(connection: socket.socket) -> bool:
    """Tell whether the other side has closed; what it has sent is read and dropped."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


ATTACK = Attack("connections", "idle and busy connections beside small requests", run)
