"""Glossaries of a model: files `NAME.tsv` and `NAME.tbx` of terms, read when they are used and again when they have changed.

TSV has a line for each term: the source, a tab, and targets separated by tabs; a source alone stays as it is. TBX (ISO 30042) has
concepts with terms in two languages, of which the root's `xml:lang` is the source. A file that cannot be used leaves the content
before in use.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.parsers import expat

import structlog

from dragoman.model.errors import InputError
from dragoman.model.files import leads_out, read_given
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.languages import listed, shown
from dragoman.server.service.requests import MAX_CHARACTERS, Term
from dragoman.server.service.terms import MAX_TARGETS, TermIndex, num_characters

log = structlog.get_logger("dragoman.glossaries")

FOLDER = "glossaries"
SUFFIXES = (".tsv", ".tbx")
POLL_SECONDS = 1.0
MAX_FILE_BYTES, MAX_ENTRIES = 64 * 2**20, 200_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Stamp = tuple[int, int, int]


class GlossaryError(InputError):
    """A glossary file that cannot be used."""


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
        return sorted({name for name, suffix in parts if suffix in SUFFIXES and _NAME.fullmatch(name)})

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
        if self._folder is not None and _NAME.fullmatch(name):
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
    found: list[Term] = []
    try:
        for place, source, targets in _read_tbx(content) if path.suffix == ".tbx" else _read_tsv(content):
            if len(found) == MAX_ENTRIES:
                raise GlossaryError(f"more than {MAX_ENTRIES} terms")
            if not source or max(map(num_characters, (source, *targets))) > MAX_CHARACTERS or len(targets) > MAX_TARGETS:
                limits = f"1 to {MAX_CHARACTERS} characters and at most {MAX_TARGETS} targets"
                raise GlossaryError(f"line {place}: a term has {limits}")
            found.append(Term(source, tuple(targets)))
    except GlossaryError as error:
        raise GlossaryError(f"{path}: {error}") from None
    return found


def _read_tsv(content: bytes) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Yield the line, source and targets of each term."""
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise GlossaryError(f"byte {error.start} is not UTF-8") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            source, *targets = map(str.strip, line.split("\t"))
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
