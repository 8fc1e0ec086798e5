"""A TCP connection that can be cut in the middle: what stands between a client and a server, and forwards until it does not."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

_CHUNK = 65536


class CutLine:
    """A forwarder of TCP connections, as an asynchronous context.

    Attributes:
        address: Where to connect instead; set on entering.
    """

    def __init__(self, address: str) -> None:
        """Describe it; `address` is where connections go."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self.address = ""
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cut()

    def cut(self) -> None:
        """Drop every connection at once and take no new ones."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there_writer)
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    writer.transport.abort()
