"""Whose a port is. The kernel is the real one."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dragoman.server.config import ConfigError
from dragoman.server.fronts.port import HeldPort

HOSTS = ["127.0.0.1", "0.0.0.0", "localhost"]


@contextmanager
def listening(port: int, *options: int, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Listen as others do."""
    with socket.socket() as listener:
        for option in options:
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((host, port))
        listener.listen()
        yield listener


OURS = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("is_chosen", [True, False])
def test_front_ends_share_it_and_nobody_else_does(host: str, is_chosen: bool) -> None:
    with HeldPort(host, free_port() if is_chosen else 0) as held:
        for _ in range(2):  # also when the first front ends are gone
            with pytest.raises(OSError), listening(held.port, socket.SO_REUSEADDR):
                pass
            with pytest.raises(ConfigError, match=f"port: cannot listen on {host}:{held.port}"):
                HeldPort(host, held.port)
            with listening(held.port, *OURS), listening(held.port, *OURS):
                with pytest.raises(OSError), listening(held.port, socket.SO_REUSEADDR):
                    pass
                with pytest.raises(ConfigError, match="is another process using it"):
                    HeldPort(host, held.port)
    HeldPort(host, held.port).close()


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), OURS], ids=["none", "address", "port"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_port_that_somebody_listens_on_is_refused(host: str, options: tuple[int, ...]) -> None:
    with listening(0, *options) as taken, pytest.raises(ConfigError, match="is another process using it"):
        HeldPort(host, taken.getsockname()[1])


def test_it_takes_no_connections() -> None:
    with HeldPort("127.0.0.1", free_port()) as held, socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", held.port))


def test_every_connection_goes_to_a_front_end() -> None:
    with HeldPort("127.0.0.1", free_port()) as held, ExitStack() as stack:
        front_ends = [stack.enter_context(listening(held.port, *OURS)) for _ in range(2)]
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", held.port)))
        counts = []
        for front_end in front_ends:
            front_end.setblocking(False)
            counts.append(0)
            with pytest.raises(BlockingIOError):
                while True:
                    stack.enter_context(front_end.accept()[0])
                    counts[-1] += 1
        assert sum(counts) == 64 and min(counts) > 0


def test_connections_of_one_that_ended_are_no_reason_to_wait() -> None:
    """The server's end closes first, and the kernel remembers the connection for a minute."""
    with listening(0, socket.SO_REUSEADDR) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    HeldPort("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["nobody.invalid", "198.51.100.7", "\ud800", "x" * 70])
def test_a_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="port: cannot listen on"):
        HeldPort(host, free_port())


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])
