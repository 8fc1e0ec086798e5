"""Where an engine's sessions have weights from: each from the bundle, with a copy in its own order, or all from one mapped file.

ONNX Runtime puts weights of products into another order when it opens a graph, and each session of each process keeps its own
copy. It can also write that order into a file beside the graph, and sessions of that file map it: the pages are in memory once,
however many sessions and processes use them. The order depends on the processor and on ONNX Runtime's version, so that the files
are no part of a bundle but a cache, made where it is used. Opening such a graph, ONNX Runtime makes the order anew, weight by
weight, and takes what is mapped only where its digest is the new one's; that the file still holds that is for its SHA-256 to say.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import onnxruntime
import structlog

from dragoman.export.bundle import Bundle
from dragoman.export.fields import MAX_COPY_BYTES
from dragoman.export.processor import overflows_in_8_bits, processor_identity
from dragoman.export.session import WRITTEN_SUFFIX, Session, open_session
from dragoman.server.runtime.weights_cache import Cache, CacheError, Entry
from dragoman.server.runtime.weights_layout import Layout

log = structlog.get_logger("dragoman.engine")

ROOM = 4
"""Bytes that must be free where the files go for a byte of weights: two at the most for what stays, two for a graph on its way."""

FORMAT = 1
"""Of the files; other formats' are not found."""

MAKING_SECONDS = 600.0


class Weights:
    """Opens a bundle's graphs on the CPU."""

    def __init__(self, bundle: Bundle, entry: Entry | None = None) -> None:
        """Take them from the bundle, or from an entry of the cache that was made of it."""
        self._bundle, self._entry = bundle, entry
        self._is_precise = _is_precise(bundle)

    @classmethod
    def of(cls, bundle: Bundle, folder: str) -> "Weights":
        """Find a bundle's files in a cache, or make them; where that cannot be done, the log says why and each session has a copy.

        Args:
            bundle: Opened, and therefore checked.
            folder: Of the cache; empty for none.

        Raises:
            BundleError: If another bundle has come in its place while files were made of it.
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
    def is_shared(self) -> bool:
        """Whether they are mapped, once for all processes."""
        return self._entry is not None

    def open(self, path: Path, num_threads: int, *, is_spinning: bool = True) -> Session:
        """Load a graph of the bundle."""
        if self._entry is not None:
            path = self._entry.directory / path.name
            return open_session(str(path), num_threads, is_precise=self._is_precise, is_spinning=is_spinning, is_written=True)
        is_packed = path != self._bundle.scorer_path or self._bundle.manifest.num_weight_bytes <= MAX_COPY_BYTES
        return open_session(str(path), num_threads, is_precise=self._is_precise, is_spinning=is_spinning, is_packed=is_packed)


def write_graphs(bundle: Bundle, directory: Path) -> None:
    """Write what sessions of `Weights` map, and open it, to see that they can."""
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
    """Return the bundle's entry of a cache.

    Raises:
        CacheError: If there is none and none can be made.
        BundleError: If what was made of the bundle may be of another.
    """
    cache = Cache(folder)

    def make(directory: Path, lock: int) -> None:
        _refuse_full(bundle, directory)
        _run_writer(bundle, directory, lock)
        bundle.check_unchanged()  # or others would find another's weights under its key

    return cache.find_or_make(f"{bundle.manifest.name}-{_key(bundle)}", make, MAKING_SECONDS)


def _graphs(bundle: Bundle) -> tuple[Path, ...]:
    return bundle.encoder_path, bundle.decoder_path, bundle.scorer_path


def _is_precise(bundle: Bundle) -> bool | None:
    """Return how a bundle's graphs are to be opened: in the slower way nowhere, if its products cannot overflow."""
    return None if bundle.manifest.can_overflow else False


def _key(bundle: Bundle) -> str:
    """Return what changes with everything that the files depend on.

    Raises:
        CacheError: If the processor does not say what it is.
    """
    if not (processor := processor_identity()):
        raise CacheError("this processor does not say what it can do")
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items() if name.endswith((".onnx", ".weights"))}
    runtime = onnxruntime.__version__, onnxruntime.get_build_info(), bundle.manifest.can_overflow and overflows_in_8_bits()
    return hashlib.sha256(msgspec.json.encode([FORMAT, processor, runtime, files], order="sorted")).hexdigest()[:16]


def _refuse_full(bundle: Bundle, directory: Path) -> None:
    """Raise if the files may not fit; whether they do shows when they are written."""
    needed = bundle.manifest.num_weight_bytes * ROOM
    if (free := shutil.disk_usage(directory).free) < needed:
        raise CacheError(f"{directory.parent.parent}: {free >> 20} MiB are free, and {needed >> 20} MiB may be needed")


def _run_writer(bundle: Bundle, directory: Path, lock: int) -> None:
    """Have the files written by another process, which takes the memory that this needs with it when it ends.

    Raises:
        CacheError: If it fails.
    """
    command = [sys.executable, "-P", "-m", "dragoman.server.runtime.weights", str(bundle.directory), str(directory)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
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
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2][-300:]
        raise CacheError(f"they cannot be written: {last or f'exit code {error.returncode}'}") from error


def main() -> None:
    """Write a bundle's files, as `Weights` asks for it."""
    os.umask(0o077)
    write_graphs(Bundle.open(Path(sys.argv[1]), is_checked=False), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
