"""Glossaries that callers make: a file each, in a folder for each caller, which frontends and servers may share.

A file begins with a line of JSON; the entries of its dictionaries follow as TSV. A folder is named by a digest of its caller.
"""

import fcntl
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.model.files import replaced
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.documents import SharedFolder, digest_of
from dragoman.server.service.glossaries import MAX_ENTRIES, Stamp
from dragoman.server.service.requests import Term
from dragoman.server.service.terms import TermIndex

# Of one caller together, as many as DeepL has and as large as its largest: to index these takes three seconds of a core.
MAX_GLOSSARIES, MAX_BYTES = 1000, 10 * 2**20
# Entries of all indexes that are kept, about 0.7 KiB each.
MAX_INDEXED = 250_000
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOCK = ".lock"


class GlossaryLimit(InvalidRequest):
    """A caller has too many glossaries, entries or bytes."""


class Pair(NamedTuple):
    """Languages of a dictionary: lower-case codes without a region."""

    source: str
    target: str


class Dictionary(Struct, frozen=True, array_like=True):
    """Entries for one pair of languages."""

    source: str
    target: str
    num_entries: int
    num_bytes: int = 0

    @property
    def pair(self) -> Pair:
        """The languages."""
        return Pair(self.source, self.target)


class Glossary(Struct, frozen=True):
    """Dictionaries under one name; `created` is in seconds since 1970."""

    name: str
    created: float
    dictionaries: tuple[Dictionary, ...] = ()
    id: str = ""


@dataclass(slots=True)
class Draft:
    """Content of a glossary that is to be written: the TSV of its dictionaries."""

    name: str = ""
    created: float = field(default_factory=time.time)
    contents: dict[Pair, bytes] = field(default_factory=dict)


class GlossaryStore(SharedFolder):
    """Glossaries of callers by owner, the caller's name, and id. All methods read or write files: call them on a thread."""

    def __init__(self, folder: Path | None = None) -> None:
        """Keep glossaries in a folder, or in a temporary one, made for the first glossary."""
        super().__init__(folder)
        # By state of the file and languages, the last used at the end.
        self._indexes: OrderedDict[tuple[Path, Stamp, Pair], TermIndex] = OrderedDict()

    def all(self, owner: str) -> list[Glossary]:
        """Return an owner's glossaries, the oldest first."""
        found = filter(None, map(self._read, self._paths(owner)))
        return sorted(found, key=lambda glossary: (glossary.created, glossary.id))

    def find(self, owner: str, glossary_id: str) -> Glossary | None:
        """Return a glossary; None if the owner has none of this id."""
        path = self._path(owner, glossary_id)
        return None if path is None else self._read(path)

    def entries(self, owner: str, glossary_id: str, pair: Pair) -> bytes | None:
        """Return a dictionary as TSV; None if there is none."""
        path = self._path(owner, glossary_id)
        return None if path is None or (draft := self._load(path)) is None else draft.contents.get(pair)

    def index(self, owner: str, glossary_id: str, pair: Pair) -> TermIndex | None:
        """Return the index of a dictionary, kept while it does not change; None if there is none."""
        path = self._path(owner, glossary_id)
        try:
            status = None if path is None else path.stat()
        except FileNotFoundError:
            return None
        if path is None or status is None:
            return None
        key = path, (status.st_ino, status.st_size, status.st_mtime_ns), pair
        if (index := self._indexes.get(key)) is None:
            if (tsv := self.entries(owner, glossary_id, pair)) is None:
                return None
            index = TermIndex(Term(source, (target,)) for source, target in entries_of(tsv).items())
        self._indexes[key] = index
        self._indexes.move_to_end(key)
        while sum(map(len, self._indexes.values())) > MAX_INDEXED and len(self._indexes) > 1:
            self._indexes.popitem(last=False)
        return index

    def write(self, owner: str, glossary_id: str, change: Callable[[Draft], None]) -> Glossary | None:
        """Change a glossary, one after the other also between processes, or make one without an id; None if there is none.

        Raises:
            GlossaryLimit: If the owner would have too much; nothing is written then.
        """
        with self._locked(owner) as folder:
            path = self._path(owner, glossary_id or str(uuid4()))
            if path is None or (draft := self._load(path) if glossary_id else Draft()) is None:
                return None
            change(draft)
            parts = [Dictionary(*pair, tsv.count(b"\n") + 1, len(tsv)) for pair, tsv in sorted(draft.contents.items())]
            glossary = Glossary(draft.name, draft.created, tuple(parts), path.name)
            others = [other for other in self.all(owner) if other.id != path.name]
            _check_limits([*others, glossary])
            with replaced(folder / path.name) as temporary:
                header = msgspec.json.encode(replace(glossary, id=""))
                temporary.write_bytes(b"".join([header, b"\n", *(draft.contents[part.pair] for part in parts)]))
            return glossary

    def delete(self, owner: str, glossary_id: str) -> bool:
        """Remove a glossary; return whether it was there."""
        with self._locked(owner):
            path = self._path(owner, glossary_id)
            if path is None or not path.is_file():
                return False
            path.unlink()
            return True

    def _path(self, owner: str, glossary_id: str) -> Path | None:
        return self._folder / digest_of(owner) / glossary_id if ID.fullmatch(glossary_id) else None

    def _paths(self, owner: str) -> Iterator[Path]:
        folder = self._folder / digest_of(owner)
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return iter(())
        return (folder / name for name in names if ID.fullmatch(name))

    @contextmanager
    def _locked(self, owner: str) -> Iterator[Path]:
        folder = self._folder / digest_of(owner)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder

    def _read(self, path: Path) -> Glossary | None:
        try:
            with path.open("rb") as file:
                return replace(msgspec.json.decode(file.readline(), type=Glossary), id=path.name)
        except (FileNotFoundError, msgspec.DecodeError):  # of another program, if it is damaged: writing is atomic
            return None

    def _load(self, path: Path) -> Draft | None:
        try:
            with path.open("rb") as file:
                glossary = msgspec.json.decode(file.readline(), type=Glossary)
                contents = {part.pair: file.read(part.num_bytes) for part in glossary.dictionaries}
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return Draft(glossary.name, glossary.created, contents)


def tsv_of(entries: Mapping[str, str]) -> bytes:
    """Return entries as TSV."""
    return "\n".join(f"{source}\t{target}" for source, target in entries.items()).encode()


def entries_of(tsv: bytes) -> dict[str, str]:
    """Return the entries of TSV that `tsv_of` has written."""
    return dict(line.split("\t") for line in tsv.decode().split("\n"))


def _check_limits(glossaries: list[Glossary]) -> None:
    parts = [part for glossary in glossaries for part in glossary.dictionaries]
    for name, count, most in (
        ("glossaries", len(glossaries), MAX_GLOSSARIES),
        ("entries", sum(part.num_entries for part in parts), MAX_ENTRIES),
        ("bytes", sum(part.num_bytes for part in parts), MAX_BYTES),
    ):
        if count > most:
            raise GlossaryLimit(name, f"a caller's glossaries would have {count}; at most {most} are kept")
