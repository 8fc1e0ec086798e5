"""A proxy in front of a store that cuts, stalls, alters or redirects answers, as networks do."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Harm:
    """Harm done to the first answers for paths that end so: the body is cut, stalls, or has one bit flipped after some bytes."""

    path: str
    at: int
    what: str
    times: int = 1


@dataclass
class Proxy:
    """Passes requests on to an upstream port, one a connection, and keeps their heads in small letters.

    Requests whose path ends with a key of `redirections` are sent there, path included; `on_harm` is called before a harm.
    """

    upstream: int
    port: int = 0
    harms: list[Harm] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    on_harm: Callable[[], None] = lambda: None
    redirections: dict[str, str] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def asked(self, path: str) -> list[str]:
        """Return the heads of the requests whose path ends so."""
        return [head for head in self.requests if head.split()[1].partition("?")[0].endswith(path)]

    async def serve(self, started: threading.Event, ended: asyncio.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await ended.wait()
        server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), aborting(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.requests.append(head.lower())
            path = head.split()[1].partition("?")[0]
            if (elsewhere := next((place for end, place in self.redirections.items() if path.endswith(end)), None)) is not None:
                writer.write(f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}{path}\r\nContent-Length: 0\r\n\r\n".encode())
                await flushed(writer)
                return
            harm = next((each for each in self.harms if path.endswith(each.path) and each.times > 0), None)
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.upstream)
            with aborting(upstream):
                first, _, rest = head.partition("\r\n")
                kept = [line for line in rest.split("\r\n") if line and not line.lower().startswith("connection:")]
                upstream.write("\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1"))
                writer.write(await upstream_reader.readuntil(b"\r\n\r\n"))
                size = 0
                while piece := await upstream_reader.read(1 << 16):
                    if harm is not None and size <= harm.at < size + len(piece):
                        harm.times -= 1
                        self.on_harm()
                        at = harm.at - size
                        if harm.what == "flip":
                            piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
                        else:
                            writer.write(piece[:at])
                            await flushed(writer)
                            if harm.what == "stall":
                                self.stalled.set()
                                await reader.read()  # until the other end gives up
                            return
                    size += len(piece)
                    writer.write(piece)
                    await writer.drain()
                await flushed(writer)


@contextlib.contextmanager
def aborting(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Close a connection at the end without waiting for the other end."""
    try:
        yield
    finally:
        writer.transport.abort()


async def flushed(writer: asyncio.StreamWriter) -> None:
    """Wait until everything has been handed to the system, and for the other end to have read it or to be gone."""
    writer.transport.set_write_buffer_limits(0)
    await writer.drain()


@contextlib.contextmanager
def proxy_to(upstream: int) -> Iterator[Proxy]:
    """Lend a proxy to a port, on a thread of its own."""
    proxy, started = Proxy(upstream), threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        ended = asyncio.Event()
        loops.append((asyncio.get_running_loop(), ended))
        await proxy.serve(started, ended)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        started.wait()
        yield proxy
    finally:
        loop, ended = loops[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()
