"""The port that frontend workers share, on the real kernel."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dragoman.server.config import ConfigError
from dragoman.server.fronts.port import HeldPort

OURS = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)


@contextmanager
def listening(port: int, *options: int) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        for option in options:
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield listener


def free_port() -> int:
    with listening(0) as some:
        return int(some.getsockname()[1])


@pytest.mark.parametrize("is_chosen", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_only_workers_share_the_port(host: str, is_chosen: bool) -> None:
    with HeldPort(host, free_port() if is_chosen else 0) as held, socket.socket() as client:
        with pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", held.port))
        for _ in range(2):  # also when the first workers are gone
            with listening(held.port, *OURS), listening(held.port, *OURS):
                check_closed(host, held.port)
            check_closed(host, held.port)
    HeldPort(host, held.port).close()


def check_closed(host: str, port: int) -> None:
    """Check that no other process can listen."""
    with pytest.raises(OSError), listening(port, socket.SO_REUSEADDR):
        pass
    with pytest.raises(ConfigError, match=f"port: cannot listen on {host}:{port}.*is another process using it"):
        HeldPort(host, port)


@pytest.mark.parametrize("options", [(), OURS[:1], OURS], ids=["none", "address", "port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_port_of_another_process_is_refused(host: str, options: tuple[int, ...]) -> None:
    with listening(0, *options) as taken, pytest.raises(ConfigError, match="is another process using it"):
        HeldPort(host, taken.getsockname()[1])


def test_every_connection_goes_to_a_worker() -> None:
    with HeldPort("127.0.0.1", free_port()) as held, ExitStack() as stack:
        workers = [stack.enter_context(listening(held.port, *OURS)) for _ in range(2)]
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", held.port)))
        counts = [0, 0]
        for number, worker in enumerate(workers):
            worker.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    stack.enter_context(worker.accept()[0])
                    counts[number] += 1
        assert sum(counts) == 64 and min(counts) > 0


def test_port_is_free_although_its_last_connections_ended_just_now() -> None:
    """The server's end closes first, and the kernel remembers the connection for a minute."""
    with listening(0, socket.SO_REUSEADDR) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    HeldPort("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["nobody.invalid", "198.51.100.7", "\ud800", "x" * 70])
def test_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="port: cannot listen on"):
        HeldPort(host, free_port())
