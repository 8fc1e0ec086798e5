"""Shared counters: the usage of each caller, in memory mapped by all frontend workers.

A record has a caller's running requests and open streams, its two token buckets, and each worker's part of the first two, which is
subtracted when the worker dies. Records are locked for microseconds with `fcntl`, whose locks end with their process; they are
found by a digest of the name and never freed.
"""

import fcntl
import mmap
import os
import struct
from hashlib import blake2b
from typing import Self

from dragoman.model.errors import InputError
from dragoman.server.buckets import Bucket

# Callers since the start. Unused parts of the table take no memory.
MAX_CALLERS = 1 << 17
KEY_BYTES = 16
# The header holds the number of records, on a cache line whose first byte is the lock of the directory.
LINE_BYTES = 64
_NUMBER = struct.Struct("<I")
# Running requests and streams, then level and time of the request bucket and of the token bucket; time 0 means no bucket.
_TOTALS = struct.Struct("<iidddd")
# Running requests and streams of one worker.
_PART = struct.Struct("<ii")


class UsageTable:
    """The table as mapped by one process. `open` creates it; other processes map its descriptor."""

    def __init__(self, descriptor: int, num_front_ends: int, number: int) -> None:
        """Map the memory of a descriptor for the worker of a number from 0; `close` also closes the descriptor."""
        self.descriptor = descriptor
        self.num_front_ends = num_front_ends
        self.number = number
        record_bytes = KEY_BYTES + _TOTALS.size + num_front_ends * _PART.size
        self._record_bytes = -(-record_bytes // LINE_BYTES) * LINE_BYTES
        # Load factor of at most one half, so that few digests collide.
        self._num_places = 2 * MAX_CALLERS
        self._records_at = LINE_BYTES + self._num_places * _NUMBER.size
        size = self._records_at + MAX_CALLERS * self._record_bytes
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self.memory = mmap.mmap(descriptor, size)

    @classmethod
    def open(cls, num_front_ends: int) -> Self:
        """Create an empty table, in the parent."""
        return cls(os.memfd_create("dragoman-callers"), num_front_ends, 0)

    @property
    def num_callers(self) -> int:
        """Number of records."""
        return int(_NUMBER.unpack_from(self.memory, 0)[0])

    def of(self, name: str) -> "SharedUsage":
        """Return the usage of a caller; raise `InputError` after too many callers since the start."""
        key = blake2b(name.encode(), digest_size=KEY_BYTES).digest()
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1)
        try:
            return SharedUsage(self, self._find(key))
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)

    def clear(self, number: int) -> None:
        """Subtract the running requests and streams of a dead worker."""
        for index in range(self.num_callers):
            with SharedUsage(self, self._records_at + index * self._record_bytes) as usage:
                usage.end_all(number)

    def close(self) -> None:
        """Unmap the table in this process."""
        self.memory.close()
        os.close(self.descriptor)

    def _find(self, key: bytes) -> int:
        """Return the offset of a key's record, added if missing."""
        place = int.from_bytes(key[:8], "little") % self._num_places
        while True:
            at = LINE_BYTES + place * _NUMBER.size
            found = _NUMBER.unpack_from(self.memory, at)[0]
            if not found:
                return self._add(key, at)
            offset: int = self._records_at + (found - 1) * self._record_bytes
            if self.memory[offset : offset + KEY_BYTES] == key:
                return offset
            place = (place + 1) % self._num_places

    def _add(self, key: bytes, at: int) -> int:
        number = self.num_callers
        if number >= MAX_CALLERS:
            raise InputError(f"auth_tokens_file: more than {MAX_CALLERS} callers since the start; restart the server")
        offset = self._records_at + number * self._record_bytes
        self.memory[offset : offset + KEY_BYTES] = key
        _NUMBER.pack_into(self.memory, 0, number + 1)
        _NUMBER.pack_into(self.memory, at, number + 1)
        return offset


class SharedUsage:
    """A `service.callers.Usage` shared between processes."""

    __slots__ = (
        "_at",
        "_descriptor",
        "_memory",
        "_part_at",
        "_parts_at",
        "_seen",
        "_table",
        "num_running",
        "num_streams",
        "requests",
        "tokens",
    )

    def __init__(self, table: UsageTable, offset: int) -> None:
        self._table, self._descriptor, self._memory = table, table.descriptor, table.memory
        self._at = offset + KEY_BYTES
        self._parts_at = self._at + _TOTALS.size
        self._part_at = self._parts_at + table.number * _PART.size
        self._seen: tuple[int, int, float, float, float, float] = (0, 0, 0.0, 0.0, 0.0, 0.0)
        self.num_running = 0
        self.num_streams = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def __enter__(self) -> Self:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._at)
        self._seen = seen = _TOTALS.unpack_from(self._memory, self._at)
        self.num_running, self.num_streams, requests_level, requests_time, tokens_level, tokens_time = seen
        if self.requests is not None and requests_time:
            self.requests.state = requests_level, requests_time
        if self.tokens is not None and tokens_time:
            self.tokens.state = tokens_level, tokens_time
        return self

    def __exit__(self, *_: object) -> None:
        num_running, num_streams, *_states = seen = self._seen
        if self.num_running != num_running or self.num_streams != num_streams:
            running, streams = _PART.unpack_from(self._memory, self._part_at)
            part = running + self.num_running - num_running, streams + self.num_streams - num_streams
            _PART.pack_into(self._memory, self._part_at, *part)
        requests = seen[2:4] if self.requests is None else self.requests.state
        tokens = seen[4:6] if self.tokens is None else self.tokens.state
        _TOTALS.pack_into(self._memory, self._at, self.num_running, self.num_streams, *requests, *tokens)
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._at)

    def change(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        """Set the buckets; a bucket that other workers have keeps its level."""
        for old, new, (level, time) in ((self.requests, requests, self._seen[2:4]), (self.tokens, tokens, self._seen[4:6])):
            if old is None and new is not None and time:
                new.state = level, time
        self.requests, self.tokens = requests, tokens

    def end_all(self, number: int) -> None:
        """Clear a worker's part and recompute the totals, as the worker may have died during a change; only inside `with`."""
        _PART.pack_into(self._memory, self._parts_at + number * _PART.size, 0, 0)
        places = range(self._parts_at, self._parts_at + self._table.num_front_ends * _PART.size, _PART.size)
        parts = [_PART.unpack_from(self._memory, place) for place in places]
        self.num_running, self.num_streams = (sum(column) for column in zip(*parts, strict=True))
        self._seen = (self.num_running, self.num_streams, *self._seen[2:])
