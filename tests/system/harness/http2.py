"""An HTTP/2 client of hand-made frames: for tests of what no gRPC client would do, such as never taking an answer.

It is synchronous and does only what it is told, but that it acknowledges SETTINGS and PING while it reads.
"""

import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4
DEFAULT_WINDOW = 65_535

Headers: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def status(self) -> int | None:
        name = b"grpc-status"
        if self.kind != HEADERS or name not in self.payload:
            return None
        at = self.payload.index(name) + len(name)
        return int(self.payload[at + 1 : at + 1 + self.payload[at]])


class Http2:
    def __init__(self, port: int, *, window: int = DEFAULT_WINDOW, timeout_seconds: float = 30) -> None:
        """Connect and greet; the server may send so many bytes of messages on each stream unasked."""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_seconds)
        settings = struct.pack("!HIHI", HEADER_TABLE_SIZE, 0, INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._next_stream = 1
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def call(
        self, path: str, message: bytes | None = b"", headers: tuple[tuple[str, str], ...] = (), *, is_last: bool = True
    ) -> int:
        """Begin an RPC, with a message that fits into what the server takes unasked, if any; return its stream's number."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        usual = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"), ("te", "trailers"))
        block = b"".join(literal(*pair) for pair in (*usual, ("content-type", "application/grpc"), *headers))
        frames = frame(HEADERS, END_HEADERS | (END_STREAM if is_last and message is None else 0), stream, block)
        if message is not None:
            frames += frame(DATA, END_STREAM if is_last else 0, stream, prefixed(message))
        self.socket.sendall(frames)
        return stream

    def send(self, stream: int, message: bytes, *, is_last: bool = False) -> None:
        self.socket.sendall(frame(DATA, END_STREAM if is_last else 0, stream, prefixed(message)))

    def open_window(self, stream: int, size: int) -> None:
        self.socket.sendall(frame(WINDOW_UPDATE, 0, stream, struct.pack("!I", size)))

    def read(self) -> Frame | None:
        """Return the next frame, SETTINGS and PING included, which are acknowledged; None at the connection's end."""
        head = self._read(9)
        if head is None:
            return None
        size = int.from_bytes(head[:3])
        kind, flags, stream = struct.unpack("!BBI", head[3:])
        payload = self._read(size)
        if payload is None:
            return None
        if kind in (SETTINGS, PING) and not flags & ACK:
            self.socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        return Frame(kind, flags, stream, payload)

    def wait_for(self, kind: int, stream: int | None = None) -> Frame:
        """Return the next frame of a kind, on a stream if one is named, and drop those before it."""
        while (found := self.read()) is not None:
            if found.kind == kind and stream in (None, found.stream):
                return found
        raise EOFError("the server has closed the connection")

    def wait_for_status(self, stream: int) -> int:
        while (status := self.wait_for(HEADERS, stream).status) is None:
            pass
        return status

    def wait_for_end(self) -> None:
        while self.read() is not None:
            pass

    def _read(self, size: int) -> bytes | None:
        while len(self._received) < size:
            try:
                chunk = self.socket.recv(65_536)
            except ConnectionError:
                chunk = b""
            if not chunk:
                return None
            self._received += chunk
        found, self._received = self._received[:size], self._received[size:]
        return found


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + struct.pack("!BBI", kind, flags, stream) + payload


def prefixed(message: bytes, *, is_compressed: bool = False) -> bytes:
    """Return a message with the five bytes that gRPC puts before each."""
    return struct.pack("!BI", is_compressed, len(message)) + message


def literal(name: str, value: str) -> bytes:
    """Return a header field as HPACK has it without tables and without compression."""
    return b"\0" + b"".join(_length(len(text)) + text for text in (name.encode(), value.encode()))


def _length(number: int) -> bytes:
    """Return an HPACK integer with a prefix of 7 bits."""
    if number < 127:
        return bytes([number])
    number -= 127
    rest = b""
    while number >= 128:
        rest += bytes([number % 128 + 128])
        number //= 128
    return b"\x7f" + rest + bytes([number])
