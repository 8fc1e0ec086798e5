"""Weights of CPU sessions: a copy for each from the bundle, or one mapped file shared by all.

ONNX Runtime reorders weights of products when it opens a graph, and each session keeps its own copy. It can also write the
reordered weights into a file, which sessions of the written graph map, so that the pages are in memory once. The order depends on
the processor and on ONNX Runtime's version, so the files are a cache and not part of a bundle. When opening such a graph, ONNX
Runtime reorders weight by weight and uses mapped bytes only if their digest matches; the file's SHA-256 protects those bytes.

`Layout` deduplicates the blocks of several graphs in one file: a model's graphs share most weights. ONNX Runtime's kernels require
blocks at multiples of 64 bytes (the process ends otherwise), but it writes them without gaps. A graph stores the place of each
tensor's bytes as text (`external_data`, see onnx/onnx.proto); only these texts are rewritten.
"""

import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import onnxruntime
import structlog

from dragoman.export.bundle import Bundle
from dragoman.export.fields import MAX_COPY_BYTES
from dragoman.export.processor import overflows_in_8_bits, processor_identity
from dragoman.export.session import WRITTEN_SUFFIX, Session, open_session
from dragoman.server.runtime.weights_cache import Cache, CacheError, Entry
from dragoman.server.system import last_line, module_command

log = structlog.get_logger("dragoman.engine")

# Free bytes needed per byte of weights: two for the files, two for a graph being written.
ROOM = 4
# Version of the files, part of the key.
FORMAT = 1
MAKING_SECONDS = 600.0
WEIGHTS_FILE = "weights.data"
ALIGNMENT = 64

# Protobuf field numbers on the path to `external_data`, and wire types.
GRAPH, INITIALIZER, EXTERNAL_DATA, KEY, VALUE = 7, 5, 13, 1, 2
NUMBER, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
PACKED_PREFIX = "prepacked_"

Fields = Iterable[tuple[int, int, bytes]]


class Weights:
    """Opens a bundle's graphs on the CPU."""

    def __init__(self, bundle: Bundle, entry: Entry | None = None) -> None:
        self._bundle, self._entry = bundle, entry
        self._is_precise = _is_precise(bundle)

    @classmethod
    def of(cls, bundle: Bundle, folder: str) -> "Weights":
        """Find or create a bundle's cache entry (empty folder for none); on failure log the reason and use a copy for each session.

        Raises `BundleError` if the bundle was replaced meanwhile.
        """
        if not folder:
            return cls(bundle)
        started = time.monotonic()
        try:
            entry = _entry_of(bundle, Path(folder))
        except CacheError as error:
            log.warning("weights are not shared, each engine keeps a copy", model=bundle.manifest.name, reason=str(error))
            return cls(bundle)
        seconds = round(time.monotonic() - started, 3)
        log.info("weights are shared", model=bundle.manifest.name, folder=str(entry.directory), seconds=seconds)
        return cls(bundle, entry)

    @property
    def folder(self) -> Path | None:
        """The cache's folder, private to this user; None if the weights are not shared."""
        return None if self._entry is None else self._entry.directory.parent

    def open(self, path: Path, num_threads: int, *, is_spinning: bool = True) -> Session:
        if self._entry is not None:
            path = self._entry.directory / path.name
            return open_session(str(path), num_threads, is_precise=self._is_precise, is_spinning=is_spinning, is_written=True)
        is_packed = path != self._bundle.scorer_path or self._bundle.manifest.num_weight_bytes <= MAX_COPY_BYTES
        return open_session(str(path), num_threads, is_precise=self._is_precise, is_spinning=is_spinning, is_packed=is_packed)


def write_graphs(bundle: Bundle, directory: Path) -> None:
    """Write the files that sessions of `Weights` map, and open them as a check."""
    is_precise = _is_precise(bundle)
    with tempfile.TemporaryDirectory(dir=directory) as scratch, Layout(directory) as layout:
        for path in _graphs(bundle):
            written = Path(scratch) / path.name
            open_session(str(path), 1, is_precise=is_precise, write_to=written)
            weights = written.with_suffix(WRITTEN_SUFFIX)
            layout.add(written, weights)
            weights.unlink()
    for path in _graphs(bundle):
        open_session(str(directory / path.name), 1, is_precise=is_precise, is_written=True)


def _entry_of(bundle: Bundle, folder: Path) -> Entry:
    cache = Cache(folder)

    def make(directory: Path, lock: int) -> None:
        _refuse_full(bundle, directory)
        _run_writer(bundle, directory, lock)
        bundle.check_unchanged()  # otherwise wrong weights would be stored under this key

    return cache.find_or_make(f"{bundle.manifest.name}-{_key(bundle)}", make, MAKING_SECONDS)


def _graphs(bundle: Bundle) -> tuple[Path, ...]:
    return bundle.encoder_path, bundle.decoder_path, bundle.scorer_path


def _is_precise(bundle: Bundle) -> bool:
    """Return whether the bundle's products have to be computed the slower way here, see `open_session`."""
    return bundle.manifest.can_overflow and overflows_in_8_bits()


def _key(bundle: Bundle) -> str:
    """Return a digest of all inputs of the files; raises `CacheError` if the processor is unknown."""
    if not (processor := processor_identity()):
        raise CacheError("this processor does not say what it can do")
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items() if name.endswith((".onnx", ".weights"))}
    runtime = onnxruntime.__version__, onnxruntime.get_build_info(), _is_precise(bundle)
    return hashlib.sha256(msgspec.json.encode([FORMAT, processor, runtime, files], order="sorted")).hexdigest()[:16]


def _refuse_full(bundle: Bundle, directory: Path) -> None:
    """Raise `CacheError` if the files may not fit."""
    needed = bundle.manifest.num_weight_bytes * ROOM
    if (free := shutil.disk_usage(directory).free) < needed:
        raise CacheError(f"{directory.parent.parent}: {free >> 20} MiB are free, and {needed >> 20} MiB may be needed")


def _run_writer(bundle: Bundle, directory: Path, lock: int) -> None:
    """Write the files in a subprocess, whose end frees its memory; raises `CacheError` if it fails."""
    command, environment = module_command("dragoman.server.runtime.weights", str(bundle.directory), str(directory))
    try:
        subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(lock,),
            timeout=MAKING_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise CacheError(f"writing them took more than {MAKING_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        reason = last_line(error.stderr) or f"exit code {error.returncode}"
        raise CacheError(f"they cannot be written: {reason}") from error


class Layout:
    """A folder of graphs that share one file of weights."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO = (directory / WEIGHTS_FILE).open("xb")
        self._places: dict[bytes, int] = {}

    def __enter__(self) -> "Layout":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, graph: Path, weights: Path) -> None:
        """Add a graph and those of its weights that are not in the file yet; raise `ValueError` if they do not match."""
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
        """Return the offset of a block in the file, added if new."""
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
    """Return a tensor with the new offsets of its bytes."""
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
    """Return new offsets of reordered blocks: `NAME|START;LENGTH;…|START;LENGTH;…`."""
    name, *blocks = text.split("|")
    moved = []
    for block in blocks:
        start, length, *rest = block.split(";")
        moved.append(";".join([str(place(int(start), int(length))), length, *rest]))
    return "|".join([name, *moved])


def _changed(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """Return a protobuf message with `change` applied to the fields of one number."""
    return _joined((found, kind, change(value) if found == number else value) for found, kind, value in _fields(message))


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the fields of a protobuf message: number, wire type, content."""
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
    parts: list[bytes] = []
    for number, kind, value in fields:
        parts.append(_written(number << 3 | kind))
        if kind == BYTES:
            parts.append(_written(len(value)))
        parts.append(value)
    return b"".join(parts)


def _number(message: bytes, position: int) -> tuple[int, int]:
    """Read a varint; return it and the following position."""
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
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def main() -> None:
    """Write a bundle's files, in a subprocess."""
    os.umask(0o077)
    write_graphs(Bundle.open(Path(sys.argv[1]), is_checked=False), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
