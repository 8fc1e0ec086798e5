"""Glossaries of a model: files `NAME.tsv` and `NAME.tbx` of terms, read when they are used and again when they have changed.

TSV has a line for each term: the source, a tab, and targets separated by tabs; a source alone stays as it is. TBX (ISO 30042) has
concepts with terms in two languages, of which the root's `xml:lang` is the source. A file that cannot be used leaves the content
before in use.
"""

import asyncio
import csv
import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from xml.parsers import expat

import structlog

from dragoman.model.errors import InputError
from dragoman.model.files import leads_out, read_given, replaced
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.languages import listed, shown
from dragoman.server.service.requests import MAX_CHARACTERS, Term
from dragoman.server.service.terms import MAX_TARGETS, TermIndex, num_characters

log = structlog.get_logger("dragoman.glossaries")

FOLDER = "glossaries"
SUFFIXES = (".tsv", ".tbx")
POLL_SECONDS = 1.0
MAX_FILE_BYTES, MAX_ENTRIES = 64 * 2**20, 200_000
# Formats of entries of callers.
ENTRY_FORMATS = ("tsv", "csv")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Reads glossaries, which may take seconds, while other work on texts goes on.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="glossaries")

Stamp = tuple[int, int, int]
T = TypeVar("T")


class GlossaryError(InputError):
    """A glossary that cannot be used."""


async def on_glossary_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run work on glossaries on their thread and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, partial(work, *arguments))


class _Used:
    """A glossary in use: its index, None if there has been no usable file."""

    def __init__(self) -> None:
        self.index: TermIndex | None = None
        self.stamp: Stamp | None = None  # of the file that was read last
        self.seen: Stamp | None = None  # of the file at the last look
        self.next_look = 0.0


class Glossaries:
    """Glossaries in a folder, which need not exist."""

    def __init__(self, folder: Path | None, poll_seconds: float = POLL_SECONDS) -> None:
        """Start without reading; None for no glossaries. `poll_seconds` is the interval of looks at a file in use."""
        self._folder, self._poll_seconds = folder, poll_seconds
        self._used: dict[str, _Used] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all glossaries, sorted."""
        try:
            entries = [] if self._folder is None else os.listdir(self._folder)
        except OSError:
            return []
        parts = map(os.path.splitext, entries)
        return sorted({name for name, suffix in parts if suffix in SUFFIXES and NAME.fullmatch(name)})

    def find(self, name: str) -> TermIndex:
        """Return the index of a glossary; raise `InvalidRequest` if there is none. It reads files: call it on a thread."""
        used = self._used.get(name) or _Used()
        if time.monotonic() >= used.next_look and self._lock.acquire(blocking=used.index is None):
            try:
                used = self._used.get(name, used)  # another request may have read it meanwhile
                if time.monotonic() >= used.next_look:
                    self._look(name, used)
            finally:
                self._lock.release()
        if used.index is None:
            there = listed(self.names()) or "none"
            reason = "cannot be used" if used.stamp else "is not known"
            raise InvalidRequest("glossary", f"{shown(name)} {reason}; the model has {there}")
        return used.index

    def read(self, name: str) -> dict[str, str]:
        """Return the first target of each source of a glossary, the source where it has none; empty if it cannot be used."""
        path, _ = self._file_of(name)
        return {} if path is None else _read_entries(path)

    def describe(self, name: str) -> tuple[int, float]:
        """Return the number of sources of a glossary, 0 if it cannot be used, and the time of its last change since 1970."""
        path, stamp = self._file_of(name)
        return (0, 0.0) if path is None or stamp is None else (_num_entries(path, stamp), stamp[2] / 1e9)

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a glossary's file, empty if there is none; raises `OSError`."""
        path, _ = self._file_of(name)
        return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()

    def write(self, name: str, suffix: str, content: bytes) -> None:
        """Replace a glossary atomically, checked before; an empty suffix removes it.

        Raises:
            GlossaryError: If the content cannot be used.
            OSError: If the folder cannot be written, or leads out of the model's.
        """
        assert self._folder is not None and NAME.fullmatch(name)
        if suffix and not read_terms(content, suffix):
            raise GlossaryError("has no terms")
        if leads_out(self._folder, self._folder.parent):
            raise OSError(errno.EXDEV, "leads out of the model's folder")
        if suffix:
            self._folder.mkdir(exist_ok=True)
            with replaced(self._folder / f"{name}{suffix}") as temporary:
                temporary.write_bytes(content)
        for other in SUFFIXES:
            if other != suffix:
                (self._folder / f"{name}{other}").unlink(missing_ok=True)

    def _look(self, name: str, used: _Used) -> None:
        """Read a glossary's file if it is new, or has changed and is the same at two looks."""
        path, stamp = self._file_of(name)
        if path is None:
            if used.stamp is not None:
                log.warning("a glossary is gone", name=name)
            used.index, used.stamp = None, None
            self._used.pop(name, None)
            return
        self._used[name] = used
        is_settled, used.seen = used.index is None or stamp == used.seen, stamp
        used.next_look = time.monotonic() + self._poll_seconds
        if stamp == used.stamp or not is_settled:
            return
        used.stamp = stamp
        try:
            used.index = TermIndex(read_glossary(path))
        except GlossaryError as error:
            log.error("a glossary cannot be used, what was read before stays in use", reason=str(error))
        else:
            log.info("glossary read", file=str(path), num_terms=len(used.index))

    def _file_of(self, name: str) -> tuple[Path | None, Stamp | None]:
        if self._folder is not None and NAME.fullmatch(name):
            for suffix in SUFFIXES:
                path = self._folder / f"{name}{suffix}"
                try:
                    status = path.stat()
                except OSError:
                    continue
                if leads_out(path, self._folder.parent):
                    continue
                return path, (status.st_ino, status.st_size, status.st_mtime_ns)
        return None, None


def read_glossary(path: Path) -> list[Term]:
    """Return the terms of a file; raise `GlossaryError` naming the file and the place."""
    content = read_given(path, MAX_FILE_BYTES, GlossaryError)
    try:
        return read_terms(content, path.suffix)
    except GlossaryError as error:
        raise GlossaryError(f"{path}: {error}") from None


def read_terms(content: bytes, suffix: str) -> list[Term]:
    """Return the terms of a file's content; raise `GlossaryError` naming the place."""
    found: list[Term] = []
    for place, source, targets in _read_tbx(content) if suffix == ".tbx" else _read_tsv(content):
        if len(found) == MAX_ENTRIES:
            raise GlossaryError(f"more than {MAX_ENTRIES} terms")
        if not source or max(map(num_characters, (source, *targets))) > MAX_CHARACTERS or len(targets) > MAX_TARGETS:
            limits = f"1 to {MAX_CHARACTERS} characters and at most {MAX_TARGETS} targets"
            raise GlossaryError(f"line {place}: a term has {limits}")
        found.append(Term(source, tuple(targets)))
    return found


def read_entries(text: str, kind: str, source_language: str, target_language: str) -> dict[str, str]:
    """Return the target of each source of a text in one of `ENTRY_FORMATS`; raise `InvalidRequest` naming the line.

    CSV may repeat the languages in two more columns.
    """
    entries: dict[str, str] = {}
    try:
        for number, row in _csv_rows(text) if kind == "csv" else _tsv_rows(text):
            languages = [language.lower().partition("-")[0] for language in row[2:]]
            if not (len(row) == 2 or (kind == "csv" and languages == [source_language, target_language])) or not all(row[:2]):
                raise GlossaryError(f"line {number}: has to have a source and a target")
            source, target = row[:2]
            if max(num_characters(source), num_characters(target)) > MAX_CHARACTERS or _CONTROL.search(source + target):
                limits = f"at most {MAX_CHARACTERS} characters, and no control character"
                raise GlossaryError(f"line {number}: a source and a target have {limits}")
            if source in entries:
                raise GlossaryError(f"line {number}: its source is that of an earlier line")
            if len(entries) == MAX_ENTRIES:
                raise GlossaryError(f"more than {MAX_ENTRIES} lines")
            entries[source] = target
        if not entries:
            raise GlossaryError("is missing or blank")
    except GlossaryError as error:
        raise InvalidRequest("entries", str(error)) from None
    return entries


def _read_entries(path: Path) -> dict[str, str]:
    entries: dict[str, str] = {}
    try:
        for term in read_glossary(path):
            entries.setdefault(term.source, (*term.targets, term.source)[0])
    except GlossaryError:  # logged when it is used
        return {}
    return entries


@lru_cache(maxsize=1024)
def _num_entries(path: Path, _: Stamp) -> int:
    return len(_read_entries(path))


def _tsv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, [*map(str.strip, line.split("\t"))]


def _csv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    rows = csv.reader(text.splitlines(keepends=True), strict=True)
    try:
        for row in rows:
            if any(row):
                yield rows.line_num, [*map(str.strip, row)]
    except csv.Error as error:
        raise GlossaryError(f"line {rows.line_num}: {error}") from None


def _read_tsv(content: bytes) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Yield the line, source and targets of each term."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GlossaryError(f"byte {error.start} is not UTF-8") from None
    for number, (source, *targets) in _tsv_rows(text):
        yield number, source, [target for target in targets if target]


def _read_tbx(content: bytes) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Yield the line, source and targets of each term; entities of its own are refused, so that a small file stays small."""
    concepts: list[tuple[int, dict[str, list[str]]]] = []
    source_language, language, text = "", "", list[str]()
    is_term = False

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal source_language, language, is_term
        own = attributes.get("xml:lang", "").lower().partition("-")[0]
        if not source_language:
            source_language = own or "?"
        if name in ("termEntry", "conceptEntry"):
            concepts.append((parser.CurrentLineNumber, {}))
        elif name in ("langSet", "langSec"):
            language = own
        elif name == "term":
            is_term = True
            text.clear()

    def end(name: str) -> None:
        nonlocal is_term
        if name == "term" and concepts:
            is_term = False
            concepts[-1][1].setdefault(language, []).append(" ".join("".join(text).split()))

    def data(part: str) -> None:
        if is_term:
            text.append(part)

    def refuse(*_: Any) -> None:
        raise GlossaryError(f"line {parser.CurrentLineNumber}: declares an entity")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, data
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise GlossaryError(f"line {error.lineno}: {expat.ErrorString(error.code)}") from None
    except GlossaryError:
        raise
    except (ValueError, LookupError):
        raise GlossaryError("has an encoding that is not known; use UTF-8") from None
    others = {own for _, terms in concepts for own in terms} - {source_language}
    if len(others) > 1 or not any(source_language in terms for _, terms in concepts):
        there = ", ".join(sorted(others)) or "none"
        raise GlossaryError(f"has to have the language of its root ({source_language}) and one other; there are {there}")
    for place, terms in concepts:
        targets = [target for own, each in terms.items() if own != source_language for target in each]
        yield from ((place, source, targets) for source in terms.get(source_language, ()))
