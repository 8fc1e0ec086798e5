"""The port that frontend workers share, on the real kernel."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from dragoman.server.config import ConfigError
from dragoman.server.workers.port import BoundPort

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
    with closing(BoundPort(host, free_port() if is_chosen else 0)) as held, socket.socket() as client:
        with pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", held.port))
        for _ in range(2):  # also when the first workers are gone
            with listening(held.port, *OURS), listening(held.port, *OURS):
                check_closed(host, held.port)
            check_closed(host, held.port)
    BoundPort(host, held.port).close()


def check_closed(host: str, port: int) -> None:
    """Check that no other process can listen."""
    with pytest.raises(OSError), listening(port, socket.SO_REUSEADDR):
        pass
    with pytest.raises(ConfigError, match=f"port: cannot listen on {host}:{port}.*is another process using it"):
        BoundPort(host, port)


@pytest.mark.parametrize("options", [(), OURS[:1], OURS], ids=["none", "address", "port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_port_of_another_process_is_refused(host: str, options: tuple[int, ...]) -> None:
    with listening(0, *options) as taken, pytest.raises(ConfigError, match="is another process using it"):
        BoundPort(host, taken.getsockname()[1])


@pytest.mark.parametrize("host", ["nobody.invalid", "198.51.100.7", "\ud800", "x" * 70])
def test_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="port: cannot listen on"):
        BoundPort(host, free_port())
