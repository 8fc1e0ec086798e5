"""Weights of several graphs put into one file: each block of bytes once, and where processors can load it in one piece.

ONNX Runtime writes the weights of a graph, and those of products also in its own order, one right behind the other. Its kernels
expect that order at addresses that are multiples of 64 bytes, and end the process where they find it elsewhere. Graphs of one model
have most of their weights in common, in either order.

A graph says of each tensor where its bytes are, in texts that its message holds (`external_data`, see onnx/onnx.proto); only those
are written anew, for which the few kinds of fields that messages consist of are read here.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

WEIGHTS_FILE = "weights.data"
ALIGNMENT = 64

# Numbers of the fields that lead to the texts, and the kinds of fields.
GRAPH, INITIALIZER, EXTERNAL_DATA, KEY, VALUE = 7, 5, 13, 1, 2
NUMBER, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
PACKED_PREFIX = "prepacked_"

Fields = Iterable[tuple[int, int, bytes]]


class Layout:
    """A folder of graphs that is being filled."""

    def __init__(self, directory: Path) -> None:
        """Begin the file of weights."""
        self._directory = directory
        self._file: BinaryIO = (directory / WEIGHTS_FILE).open("xb")
        self._places: dict[bytes, int] = {}

    def __enter__(self) -> "Layout":
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the file."""
        self._file.close()

    def add(self, graph: Path, weights: Path) -> None:
        """Put a graph into the folder, and what it does not share with others before it into the file of weights.

        Raises:
            ValueError: If it is no graph whose weights are there.
        """
        with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:

            def place(start: int, length: int) -> int:
                with memoryview(mapped) as whole, whole[start : start + length] as block:
                    if len(block) != length:
                        raise ValueError(f"{weights}: ends before {start} + {length}")
                    return self._place(block)

            message = graph.read_bytes()
            moved = _changed(message, GRAPH, lambda found: _changed(found, INITIALIZER, lambda tensor: _moved(tensor, place)))
        (self._directory / graph.name).write_bytes(moved)

    def _place(self, block: memoryview) -> int:
        """Return where in the file a block lies."""
        digest = hashlib.sha256(block).digest()
        if (known := self._places.get(digest)) is not None:
            return known
        start = self._file.tell()
        if rest := start % ALIGNMENT:
            start += self._file.write(bytes(ALIGNMENT - rest))
        self._file.write(block)
        self._places[digest] = start
        return start


def _moved(tensor: bytes, place: Callable[[int, int], int]) -> bytes:
    """Return a tensor whose texts say where its bytes are now."""
    found = [value for number, _, value in _fields(tensor) if number == EXTERNAL_DATA]
    entries = [{number: value for number, _, value in _fields(entry)} for entry in found]
    if not entries:
        return tensor
    texts = {entry[KEY].decode(): entry[VALUE].decode() for entry in entries}
    start = place(int(texts.get("offset", "0")), int(texts["length"]))
    changed = {"location": WEIGHTS_FILE, "offset": str(start)}
    changed |= {key: _moved_packed(text, place) for key, text in texts.items() if key.startswith(PACKED_PREFIX)}
    new = (_joined(((KEY, BYTES, key.encode()), (VALUE, BYTES, text.encode()))) for key, text in (texts | changed).items())
    rest = [field for field in _fields(tensor) if field[0] != EXTERNAL_DATA]
    return _joined([*rest, *((EXTERNAL_DATA, BYTES, entry) for entry in new)])


def _moved_packed(text: str, place: Callable[[int, int], int]) -> str:
    """Return what says where an order of its own lies: `NAME|START;LENGTH;…`, once more from `|` for each further block."""
    name, *blocks = text.split("|")
    moved = []
    for block in blocks:
        start, length, *rest = block.split(";")
        moved.append(";".join([str(place(int(start), int(length))), length, *rest]))
    return "|".join([name, *moved])


def _changed(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """Return a message with the fields of a number, messages themselves, changed."""
    return _joined((found, kind, change(value) if found == number else value) for found, kind, value in _fields(message))


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the fields of a message: number, kind, and what it holds."""
    position = 0
    while position < len(message):
        tag, position = _number(message, position)
        kind, start = tag & 7, position
        if kind == BYTES:
            length, start = _number(message, position)
            position = start + length
        elif kind == NUMBER:
            _, position = _number(message, position)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            position += 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError("not a message that a graph consists of")
        if position > len(message):
            raise ValueError("a message that ends too early")
        yield tag >> 3, kind, message[start:position]


def _joined(fields: Fields) -> bytes:
    """Return the message that consists of fields."""
    parts: list[bytes] = []
    for number, kind, value in fields:
        parts.append(_written(number << 3 | kind))
        if kind == BYTES:
            parts.append(_written(len(value)))
        parts.append(value)
    return b"".join(parts)


def _number(message: bytes, position: int) -> tuple[int, int]:
    """Return the number that is written at a position, seven bits a byte, and the position behind it."""
    value = shift = 0
    while True:
        if position >= len(message) or shift > 63:
            raise ValueError("a number that does not end")
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def _written(value: int) -> bytes:
    """Return how a number is written."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
