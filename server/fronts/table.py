"""What callers have used of their limits, shared by all front ends: a table in memory that each of them has mapped.

A caller has one record, wherever its connections land: the levels of its two buckets, and for each front end the requests under way
and the streams open there, so that those of a front end that dies can be taken away. A record is locked, with a lock of the kernel's
that a dying process gives back, for the microseconds in which it is looked at and changed. Records are found by a digest of the name
and never given up: a caller that comes back goes on from where it was.
"""

import fcntl
import mmap
import os
import struct
from hashlib import blake2b
from typing import Self

from dragoman.model.errors import InputError
from dragoman.server.buckets import Bucket

# Names of callers that there may have been since the start. What is not used of the table takes no memory.
MAX_CALLERS = 1 << 17
KEY_BYTES = 16
# The table begins with the number of records, on a line of its own, whose first byte stands for the lock of the directory.
HEADER_BYTES = 64
_NUMBER = struct.Struct("<I")
# Level and time of a bucket, that of requests and then that of tokens; a time of 0 is that of a bucket nobody has had yet.
_BUCKET = struct.Struct("<dd")


class UsageTable:
    """The table as one process sees it. `open` makes it; whoever gets its descriptor sees the same.

    Attributes:
        descriptor: Of the memory; for `inherited` in another process.
    """

    def __init__(self, descriptor: int, num_front_ends: int, number: int) -> None:
        """Map what there is.

        Args:
            descriptor: Of the memory; closed with the table.
            num_front_ends: That there are.
            number: Which of them this process is, from 0.
        """
        self.descriptor = descriptor
        self.number = number
        self._cells = struct.Struct(f"<{2 * num_front_ends}i")
        self.cells_at = KEY_BYTES + 2 * _BUCKET.size
        self._record_bytes = -(-(self.cells_at + self._cells.size) // HEADER_BYTES) * HEADER_BYTES
        # Twice as many places as callers, so that few names want the same.
        self._num_places = 2 * MAX_CALLERS
        self._records_at = HEADER_BYTES + self._num_places * _NUMBER.size
        size = self._records_at + MAX_CALLERS * self._record_bytes
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self.memory = mmap.mmap(descriptor, size)

    @classmethod
    def open(cls, num_front_ends: int) -> Self:
        """Return a new one, without callers, as it is seen by the process that starts front ends."""
        return cls(os.memfd_create("dragoman-callers"), num_front_ends, 0)

    @property
    def num_callers(self) -> int:
        """Callers that have a record."""
        return int(_NUMBER.unpack_from(self.memory, 0)[0])

    @property
    def num_front_ends(self) -> int:
        """That there are."""
        return self._cells.size // 8

    def of(self, name: str) -> "SharedUsage":
        """Return what a caller has used.

        Raises:
            InputError: If there have been too many callers since the start.
        """
        key = blake2b(name.encode(), digest_size=KEY_BYTES).digest()
        self.lock(0)
        try:
            return SharedUsage(self, self._find(key))
        finally:
            self.unlock(0)

    def clear(self, number: int) -> None:
        """Take away what a front end had under way that is gone."""
        for index in range(self.num_callers):
            offset = self._records_at + index * self._record_bytes
            self.lock(offset)
            try:
                cells = self.read_cells(offset)
                cells[number] = cells[self.num_front_ends + number] = 0
                self.write_cells(offset, cells)
            finally:
                self.unlock(offset)

    def lock(self, offset: int) -> None:
        """Wait until no other process has the lock of what lies there."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, offset, os.SEEK_SET)

    def unlock(self, offset: int) -> None:
        """Give it back."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, offset, os.SEEK_SET)

    def read_cells(self, offset: int) -> list[int]:
        """Return the requests under way at each front end, then the streams, of the record there."""
        return list(self._cells.unpack_from(self.memory, offset + self.cells_at))

    def write_cells(self, offset: int, cells: list[int]) -> None:
        """Write them."""
        self._cells.pack_into(self.memory, offset + self.cells_at, *cells)

    def close(self) -> None:
        """Unmap it; what others see of it stays."""
        self.memory.close()
        os.close(self.descriptor)

    def _find(self, key: bytes) -> int:
        """Return where the record of a key is, a new one if there is none yet."""
        place = int.from_bytes(key[:8], "little") % self._num_places
        while True:
            at = HEADER_BYTES + place * _NUMBER.size
            found = _NUMBER.unpack_from(self.memory, at)[0]
            if not found:
                return self._add(key, at)
            offset: int = self._records_at + (found - 1) * self._record_bytes
            if self.memory[offset : offset + KEY_BYTES] == key:
                return offset
            place = (place + 1) % self._num_places

    def _add(self, key: bytes, at: int) -> int:
        """Begin a record, and note its number in the directory."""
        number = self.num_callers
        if number >= MAX_CALLERS:
            raise InputError(f"auth_tokens_file: more than {MAX_CALLERS} callers since the start; restart the server")
        offset = self._records_at + number * self._record_bytes
        self.memory[offset : offset + KEY_BYTES] = key
        _NUMBER.pack_into(self.memory, 0, number + 1)
        _NUMBER.pack_into(self.memory, at, number + 1)
        return offset


class SharedUsage:
    """A `core.usage.Usage`, see there, whose other part other processes change."""

    __slots__ = ("_cells", "_offset", "_seen", "_table", "_were_there", "num_running", "num_streams", "requests", "tokens")

    def __init__(self, table: UsageTable, offset: int) -> None:
        """Stand for the record at an offset."""
        self._table, self._offset = table, offset
        self._cells: list[int] = []
        self._seen = (0, 0)
        self._were_there = (False, False)
        self.num_running = 0
        self.num_streams = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def __enter__(self) -> Self:
        """Lock the record, and see what is in it. A bucket that is made before the end goes on from what others have of it."""
        table, offset = self._table, self._offset
        table.lock(offset)
        cells = self._cells = table.read_cells(offset)
        half = len(cells) // 2
        self._seen = self.num_running, self.num_streams = sum(cells[:half]), sum(cells[half:])
        were_there = self._were_there = self.requests is not None, self.tokens is not None
        if any(were_there):
            self._exchange_buckets((True, True))
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is new, and let others at it."""
        table, offset = self._table, self._offset
        now = self.num_running, self.num_streams
        if now != self._seen:
            cells, number = self._cells, table.number
            cells[number] += now[0] - self._seen[0]
            cells[len(cells) // 2 + number] += now[1] - self._seen[1]
            table.write_cells(offset, cells)
        if self.requests is not None or self.tokens is not None:
            self._exchange_buckets((not self._were_there[0], not self._were_there[1]))
        table.unlock(offset)

    def _exchange_buckets(self, are_read: tuple[bool, bool]) -> None:
        """Read or write the state of each bucket that there is; one that nobody has had yet is written in any case."""
        memory, at = self._table.memory, self._offset + KEY_BYTES
        for bucket, is_read in zip((self.requests, self.tokens), are_read, strict=True):
            if bucket is not None:
                level, filled = _BUCKET.unpack_from(memory, at)
                if is_read and filled:
                    bucket.state = level, filled
                else:
                    _BUCKET.pack_into(memory, at, *bucket.state)
            at += _BUCKET.size
