"""Input files and output folders: of this machine, or in object stores (`s3://`, `gs://`, `az://`) through obstore."""

import fcntl
import glob
import io
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, cast

from dragoman.model.errors import InputError
from dragoman.server.stores.address import OBJECT_SCHEMES, Address

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Read ahead of an object.
BUFFER_BYTES = 4 * 2**20
PARTIAL_SUFFIX = ".dragoman-partial"


class Input(NamedTuple):
    """A file to read: its name below the output folder, its address for messages, and its size in bytes."""

    name: str
    address: str
    num_bytes: int

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file for reading, with `seek`; raise `InputError` within the block if it cannot be read."""
        with _naming(self.address):
            opened = _open_object(self.address) if "://" in self.address else partial(open, self.address, "rb")
            with opened() as stream:
                yield cast(BinaryIO, stream)


class Output(Protocol):
    """Folder of output files, by relative names with forward slashes; all methods raise `InputError`, naming the file."""

    address: str

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if there is none."""

    def size(self, name: str) -> int | None:
        """Return a file's bytes; None if there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file, which appears whole or not at all, and stays after a power failure."""

    def names(self) -> list[str]:
        """Return the names of all files."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other jobs out of the folder, where that is possible; raise `InputError` if there is one."""


def open_output(address: str) -> Output:
    """Return the output folder of an address, which is made where it is needed; raise `InputError` for a name that is no text."""
    if not _is_unicode(address):
        raise InputError(f"{address!r}: is no name in UTF-8")
    return Bucket(_object_address(address)) if "://" in address else Folder(address)


class Folder:
    """A folder of this machine as `Output`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def read(self, name: str) -> bytes | None:
        with _naming(path := self._path(name)), suppress(FileNotFoundError, NotADirectoryError):
            return path.read_bytes()
        return None

    def size(self, name: str) -> int | None:
        with _naming(path := self._path(name)), suppress(FileNotFoundError, NotADirectoryError):
            return path.stat().st_size
        return None

    def write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        partial_path = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(partial_path, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial_path, path)
            except BaseException:
                with suppress(OSError):
                    partial_path.unlink()
                raise

    def names(self) -> list[str]:
        root = Path(self.address)
        files = (path for path in root.rglob("*") if path.is_file() and not path.name.endswith(PARTIAL_SUFFIX))
        return sorted(path.relative_to(root).as_posix() for path in files)

    def remove(self, name: str) -> None:
        with _naming(path := self._path(name)):
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        root = Path(self.address)
        with _naming(root):
            root.mkdir(parents=True, exist_ok=True)
            number = os.open(root, os.O_RDONLY)
        try:
            with suppress(OSError):  # of file systems without locks
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise InputError(f"{root}: another job is writing there") from None
            _clear(root)  # of jobs that were killed
            try:
                yield
            finally:
                _clear(root)  # of engines that were killed
        finally:
            os.close(number)

    def _path(self, name: str) -> Path:
        return Path(self.address) / name


def _clear(root: Path) -> None:
    """Remove files that were not written to their ends."""
    with suppress(OSError):  # a folder that others change
        for left in root.rglob(f".*{PARTIAL_SUFFIX}"):
            left.unlink(missing_ok=True)


class Bucket:
    """A prefix of an object store as `Output`; the store makes objects appear whole."""

    def __init__(self, address: Address) -> None:
        self.address, self._store = address.text, _open_store(address)

    def read(self, name: str) -> bytes | None:
        import obstore

        with _naming(f"{self.address}/{name}"), suppress(FileNotFoundError):
            return bytes(obstore.get(self._store, name).bytes())
        return None

    def size(self, name: str) -> int | None:
        import obstore

        with _naming(f"{self.address}/{name}"), suppress(FileNotFoundError):
            return int(obstore.head(self._store, name)["size"])
        return None

    def write(self, name: str, content: bytes) -> None:
        import obstore

        with _naming(f"{self.address}/{name}"):
            obstore.put(self._store, name, content)

    def names(self) -> list[str]:
        import obstore

        with _naming(self.address):
            return sorted(each["path"] for page in obstore.list(self._store) for each in page)

    def remove(self, name: str) -> None:
        import obstore

        with _naming(f"{self.address}/{name}"), suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()


def find_inputs(addresses: Sequence[str], is_known: Callable[[str], bool], output: str) -> list[Input]:
    """Return the files of paths, globs, folders and object addresses, in order; of folders only those whose names are `is_known`.

    Files below the output folder are taken by their own names only. Raises `InputError` for an address without files, a folder
    that is the output folder, too, and two files whose outputs would have one name.
    """
    found: dict[str, Input] = {}
    for address in addresses:
        with _naming(address):
            files, root, is_folder = _objects(_object_address(address)) if "://" in address else _files(address)
        if root is not None and (own := _names_below(output, root)):
            files = [each for each in files if not each.name.startswith(own)]
        wanted = [each for each in files if is_known(each.name)] if is_folder else files
        if not wanted:
            raise InputError(f"{address}: there is {'no file of a known kind' if files else 'no such file'}")
        for each in wanted:
            if ".." in each.name.split("/") or not _is_unicode(each.name):
                raise InputError(f"{each.address}: its output cannot have this name")
            other = found.setdefault(each.name, each)
            if other.address != each.address:
                raise InputError(f"{each.address} and {other.address}: their outputs would both be called {each.name}")
    return list(found.values())


def _names_below(output: str, root: str) -> str:
    """Return what names of files below a root begin with if they are in the output folder; empty if that is elsewhere."""
    inner, outer = ((each if "://" in each else os.path.realpath(each)).rstrip("/") + "/" for each in (output, root))
    if inner == outer:
        raise InputError(f"{output}: is the output folder, and has inputs")
    return inner.removeprefix(outer) if inner.startswith(outer) else ""


def _is_unicode(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _files(address: str) -> tuple[list[Input], str | None, bool]:
    """Return the files of a path or glob, the folder that was searched, and whether it was given."""
    path = Path(address)
    is_folder = path.is_dir()
    if is_folder:
        paths, root = sorted(each for each in path.rglob("*") if not _is_hidden(each.relative_to(path))), path
    elif path.exists() or not _has_wildcard(address):
        if path.exists() and not path.is_file():
            raise InputError(f"{address}: is neither a file nor a folder")
        return [Input(path.name, str(path), path.stat().st_size)] if path.exists() else [], None, False
    else:
        paths = sorted(map(Path, glob.glob(address, recursive=True)))
        root = Path(*_fixed(path.parts))
    files = (each for each in paths if each.is_file())
    return [Input(each.relative_to(root).as_posix(), str(each), each.stat().st_size) for each in files], str(root), is_folder


def _fixed(parts: Sequence[str]) -> list[str]:
    """Return the parts before the first with a wildcard."""
    return list(takewhile(lambda part: not _has_wildcard(part), parts))


def _has_wildcard(text: str) -> bool:
    return any(char in text for char in "*?[")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _object_address(text: str) -> Address:
    address = Address.parse(text)
    if address.scheme not in OBJECT_SCHEMES:
        raise InputError(f"{address.text}: files are read from folders, and from {', '.join(OBJECT_SCHEMES)}://")
    return address


def _objects(address: Address) -> tuple[list[Input], str | None, bool]:
    """Return the object of an address, those that match its wildcards or those below it, and the rest as `_files`."""
    import obstore

    bucket = f"{address.scheme}://{address.host}"
    wanted = address.text.removeprefix(bucket).strip("/")
    fixed = _fixed(wanted.split("/"))
    root, is_pattern = "/".join(fixed), _has_wildcard(wanted)
    with _naming(address.text):
        store = _open_store(Address.parse(bucket))
        if root and not is_pattern:
            with suppress(FileNotFoundError):
                return [Input(fixed[-1], address.text, int(obstore.head(store, root)["size"]))], None, False
        pages = obstore.list(store, root or None)
        sizes = {each["path"]: int(each["size"]) for page in pages for each in page}
    names = {path: path.removeprefix(f"{root}/") if root else path for path in sorted(sizes)}
    found = [
        Input(name, f"{bucket}/{path}", sizes[path])
        for path, name in names.items()
        if (fnmatchcase(path, wanted) if is_pattern else not _is_hidden(Path(name)))
    ]
    return found, f"{bucket}/{root}", not is_pattern


def _open_store(address: Address) -> "ObjectStore":
    from dragoman.server.stores.objects import open_bucket

    return open_bucket(address)


def _open_object(address: str) -> Callable[[], Any]:
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")  # keys hold what an address does not
    return lambda: io.BufferedReader(_ObjectReader(_open_store(Address.parse(f"{scheme}://{bucket}")), key), BUFFER_BYTES)


class _ObjectReader(io.RawIOBase):
    """Reader of an object."""

    def __init__(self, store: "ObjectStore", name: str) -> None:
        import obstore

        self._reader: Any = obstore.open_reader(store, name, buffer_size=BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())

    def readinto(self, buffer: Any) -> int:
        content = bytes(self._reader.read(len(buffer)))
        buffer[: len(content)] = content
        return len(content)


@contextmanager
def _naming(name: object) -> Iterator[None]:
    """Raise `InputError` with a name for errors of files and stores; a missing file stays `FileNotFoundError` for `suppress`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or str(error).partition(chr(10))[0]}") from error
    except Exception as error:
        if type(error).__module__.startswith("obstore"):
            raise InputError(f"{name}: {str(error).partition(chr(10))[0]}") from error
        raise
