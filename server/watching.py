"""Hot reload of files, such as certificates and tokens.

Changes are detected by content: Kubernetes swaps a link above a secret's files, which does not change their attributes. Invalid
content is logged and shown as stale in the metrics, and the previous content stays in use.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from dragoman.model.errors import InputError
from dragoman.model.files import open_regular
from dragoman.server.telemetry.server_metrics import ReloadMetrics

POLL_SECONDS = 1.0
MAX_FILE_BYTES = 64 * 2**20

log = structlog.get_logger("dragoman.watching")


@dataclass(slots=True, eq=False)
class Source:
    """Files that belong together, such as a certificate and its key."""

    name: str  # in log and metrics
    paths: Sequence[Path]
    load: Callable[[], Any]  # reads the files, in a thread; raises `InputError` if they are invalid
    use: Callable[[Any], None] = lambda _: None  # applies the result of `load`, on the event loop
    used: bytes = b""  # fingerprint of the content in use
    seen: bytes = b""  # fingerprint of the content at the last check
    refused: bytes | None = field(default=None)  # fingerprint of invalid content; None while the files are in use


class Watcher:
    """Polls sources (`run`), and checks them immediately on demand (`check`)."""

    def __init__(self, metrics: ReloadMetrics, poll_seconds: float = POLL_SECONDS) -> None:
        """Start without sources."""
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._sources: list[Source] = []
        self._checking = asyncio.Lock()

    def add(self, source: Source) -> None:
        """Watch a source whose current content is in use."""
        source.used = source.seen = fingerprint(source.paths)
        self._sources.append(source)
        self._metrics.set_stale(source.name, False)

    async def run(self) -> None:
        """Poll forever; content must be the same in two polls, as a file may be half written at the first."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                await self.poll()
            except Exception:  # for example no memory for a thread; the next poll may succeed
                log.exception("files cannot be checked for changes")

    async def poll(self) -> None:
        """Poll once."""
        async with self._checking:
            for source in self._sources:
                found = await asyncio.to_thread(fingerprint, source.paths)
                is_settled, source.seen = found == source.seen, found
                if found == source.used:
                    self._settle(source)
                elif is_settled and found != source.refused:
                    await self._load(source, found)

    async def check(self) -> None:
        """Reload changed files, and invalid ones, immediately."""
        async with self._checking:
            for source in self._sources:
                source.seen = await asyncio.to_thread(fingerprint, source.paths)
                if source.seen == source.used:
                    self._settle(source)
                    log.info("unchanged", source=source.name)
                else:
                    await self._load(source, source.seen)

    def _settle(self, source: Source) -> None:
        """Record that the content is in use, possibly again after invalid content."""
        if source.refused is not None:
            source.refused = None
            self._metrics.set_stale(source.name, False)
            log.info("what is in use is there again", source=source.name)

    async def _load(self, source: Source, found: bytes) -> None:
        try:
            source.use(await asyncio.to_thread(source.load))
        except Exception as error:
            source.refused = found
            self._metrics.set_stale(source.name, True)
            reason = str(error) if isinstance(error, InputError) else None
            log.error(
                "cannot be used, what was read before stays in use",
                source=source.name,
                reason=reason,
                exc_info=None if reason is not None else error,
            )
        else:
            source.used, source.refused = found, None
            self._metrics.set_stale(source.name, False)
            log.info("reloaded", source=source.name)


def fingerprint(paths: Sequence[Path]) -> bytes:
    """Return a digest of the files' content; an unreadable file counts by its error."""
    total = hashlib.sha256()
    for path in paths:
        try:
            with open_regular(path) as file:
                content = hashlib.sha256(file.read(MAX_FILE_BYTES)).digest()
        except (OSError, ValueError) as error:
            content = f"{type(error).__name__} {getattr(error, 'errno', '')}".encode()
        total.update(len(content).to_bytes(4, "big") + content)
    return total.digest()
