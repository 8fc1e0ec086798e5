"""An object store that never comes to an end."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from dragoman.server.stores import objects
from dragoman.server.stores.address import Address
from dragoman.server.stores.objects import ObjectStore
from dragoman.server.stores.store import SilentError

HEAD = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nContent-Length: 1000000000\r\n\r\n'


@pytest.fixture
def dripping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An S3 server that answers every request with a byte now and then."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def drip(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(HEAD)
            while not ended.wait(0.1):
                connection.sendall(b" ")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=drip, args=[listening.accept()[0]]))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept)
        accepting.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
        for name, value in zip(names, (address, "id", "secret", "us-east-1"), strict=True):
            monkeypatch.setenv(name, value)
        yield
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)
        for thread in (accepting, *threads):
            thread.join()


@pytest.mark.parametrize("ask", [ObjectStore.list, lambda store: store.read("file", 0, len)], ids=["list", "read"])
def test_threads_that_are_left_alone_with_a_store_that_drips_come_to_an_end(
    dripping: None, monkeypatch: pytest.MonkeyPatch, ask: Callable[[ObjectStore], None]
) -> None:
    """They were for a week, one more at each look into the store."""
    monkeypatch.setattr(objects, "_READ_SECONDS", 1.0)
    before = set(threading.enumerate())
    with pytest.raises(SilentError):
        ask(ObjectStore(Address.parse("s3://models/all"), 0.5))
    for thread in set(threading.enumerate()) - before:
        if thread.name == "store":
            thread.join(20)
            assert not thread.is_alive()
