"""HTTP/2 written by hand, as a client that keeps to no rule needs it: frames, and headers that are never compressed."""

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
TIMEOUT_SECONDS = 10.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def split_frames(data: bytes) -> tuple[list[tuple[int, int, int, bytes]], bytes]:
    """Return the whole frames at the start of what was read, as kind, flags, stream and payload, and the rest."""
    frames = []
    while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
        frames.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return frames, data


def _length(value: int) -> bytes:
    """Return a number with a prefix of seven bits (RFC 7541, 5.1), the eighth being zero: no Huffman code."""
    if value < 127:
        return bytes([value])
    value -= 127
    encoded = [127]
    while value > 127:
        encoded.append(value % 128 + 128)
        value //= 128
    return bytes([*encoded, value])


def header_block(headers: Mapping[str, str]) -> bytes:
    """Return headers as literals that are not kept (RFC 7541, 6.2.2)."""
    block = b""
    for name, value in headers.items():
        block += b"\0" + _length(len(name)) + name.encode() + _length(len(value)) + value.encode()
    return block


def call_frames(stream: int, path: str, message: bytes) -> bytes:
    """Return a whole gRPC call with one message that is not compressed."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    body = b"\0" + struct.pack(">I", len(message)) + message
    return frame(HEADERS, END_HEADERS, stream, header_block(headers)) + frame(DATA, END_STREAM, stream, body)


class Connection:
    """A connection that says hello, answers what keeps it alive, and reads what comes without heeding it."""

    def __init__(self, address: str, settings: Mapping[int, int] | None = None) -> None:
        """Describe it; settings are HTTP/2's own, by number."""
        self._address, self._settings = address, settings or {}

    def __enter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_SECONDS)
        pairs = b"".join(struct.pack(">HI", key, value) for key, value in self._settings.items())
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, pairs))
        self.is_closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # the server was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(TIMEOUT_SECONDS)
        self.socket.close()

    def call(self, stream: int, path: str, message: bytes) -> None:
        """Make a call; its answer is not read."""
        self.socket.sendall(call_frames(stream, path, message))

    def _read(self) -> None:
        rest = b""
        self.socket.settimeout(None)
        try:
            while data := self.socket.recv(65536):
                frames, rest = split_frames(rest + data)
                for kind, flags, _, payload in frames:
                    if kind in (SETTINGS, PING) and not flags & ACK:
                        self.socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        except OSError:
            pass
        self.is_closed.set()
