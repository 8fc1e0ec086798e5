"""Documents of callers until they are fetched: two files each, for its state and its translation, in a folder that workers share.

A name begins with its owner's digest, so that other callers do not find it, and ends with 128 random bits.
"""

import hashlib
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.server.errors import QueueFull
from dragoman.server.service.callers import RETRY_SECONDS

# Documents of all callers, and of one. None is much larger than `max_message_bytes`: by default all take 512 MiB at most.
MAX_DOCUMENTS, MAX_DOCUMENTS_PER_CALLER = 128, 16
# Since the last change; LibreTranslate keeps files as long.
KEPT_SECONDS = 1800.0
_OWNER_DIGITS, _DIGITS = 16, 32
_NAME = re.compile(rf"[0-9A-F]{{{_OWNER_DIGITS + _DIGITS}}}")


class Document(Struct, frozen=True):
    """State of a document."""

    filename: str
    num_characters: int
    key: str = ""  # needed beside the name to find it; empty for none
    status: Literal["queued", "translating", "done", "error"] = "queued"
    process: int = 0  # id of the process that translates it
    began: float = 0.0  # `time.time()` when its translation did
    error: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it is not translated yet."""
        return self.status in ("queued", "translating")


class SharedFolder:
    """A folder shared with other processes, or a temporary one, made when it is first needed."""

    def __init__(self, shared_folder: Path | None = None) -> None:
        self._shared_folder = shared_folder

    @cached_property
    def _folder(self) -> Path:
        return self._shared_folder or Path(tempfile.mkdtemp(prefix="dragoman-"))

    def close(self) -> None:
        """Remove the folder, unless it is shared."""
        if self._shared_folder is None and "_folder" in vars(self):
            shutil.rmtree(self._folder, ignore_errors=True)


class DocumentStore(SharedFolder):
    """Documents by name, in a folder shared with other processes or a temporary one, made for the first document."""

    def add(self, owner: str, document: Document, content: bytes = b"") -> str:
        """Keep a document, with its translation once done, and return its name; the owner's oldest gives way if it is ready.

        Raise `QueueFull` without room.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self.purge()
        names, digest = sorted(self._names(), key=self._age, reverse=True), digest_of(owner)
        own = [name for name in names if name.startswith(digest)]
        if len(own) >= MAX_DOCUMENTS_PER_CALLER and not ((oldest := self.find(own[0])) and oldest.is_running):
            self._remove(own[0])
        elif len(names) >= MAX_DOCUMENTS or len(own) >= MAX_DOCUMENTS_PER_CALLER:
            raise QueueFull("file: too many documents are kept or under way", retry_after_seconds=RETRY_SECONDS)
        name = digest + secrets.token_hex(_DIGITS // 2).upper()
        self._write(name, document, content)
        return name

    def change(self, name: str, document: Document, content: bytes = b"") -> None:
        """Replace a document, if it is still there."""
        if self.find(name) is not None:
            self._write(name, document, content)

    def find(self, name: str) -> Document | None:
        """Return a document's state; None if there is none, or no longer. One whose process has ended is in error."""
        if _NAME.fullmatch(name) is None:
            return None
        try:
            document = msgspec.msgpack.decode((self._folder / name).read_bytes(), type=Document)
            if document.is_running:
                os.kill(document.process, 0)
        except FileNotFoundError:
            return None
        except (ProcessLookupError, PermissionError):
            document = replace(document, status="error", error="the process that translated it has ended")
        return document if document.is_running or self._age(name) <= KEPT_SECONDS else None

    def content(self, name: str) -> bytes | None:
        """Return the translation of a document that was found; None if it is not there any more."""
        try:
            return self._content(name).read_bytes()
        except FileNotFoundError:
            return None

    def take(self, name: str) -> bytes | None:
        """Remove a document and return its translation; None if it was not there: of two callers one gets it."""
        content = self.content(name)
        return content if self._remove(name) else None

    def purge(self) -> None:
        """Remove the documents that have been kept long enough."""
        if "_folder" in vars(self) and self._folder.is_dir():
            for name in os.listdir(self._folder):
                if self._age(name) > KEPT_SECONDS and self.find(name) is None:
                    self._remove(name)

    def _names(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if _NAME.fullmatch(name)]

    def _age(self, name: str) -> float:
        """Return the seconds since the last change of a document; infinity if there is none."""
        try:
            return time.time() - (self._folder / name).stat().st_mtime
        except FileNotFoundError:
            return math.inf

    def _remove(self, name: str) -> bool:
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        self._content(name).unlink(missing_ok=True)
        return True

    def _content(self, name: str) -> Path:
        return self._folder / f"{name}.content"

    def _write(self, name: str, document: Document, content: bytes) -> None:
        if document.status == "done":
            self._content(name).write_bytes(content)
        partial = self._folder / f"{name}.part"
        partial.write_bytes(msgspec.msgpack.encode(document))
        partial.replace(self._folder / name)


def digest_of(owner: str) -> str:
    """Return the beginning of the names of an owner's documents."""
    return hashlib.sha256(owner.encode()).hexdigest()[:_OWNER_DIGITS].upper()
