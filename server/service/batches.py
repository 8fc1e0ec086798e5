"""Execution of batches: at the lowest priority, in the slots that other requests leave, by one process of all that share a folder.

Answers are appended to a log, in the order in which they are ready. Its records have a checksum, so that after a crash all whole
ones count and no line with one is computed again; results are written from it in the order of the lines, and appear at once.
"""

import asyncio
import os
import struct
import time
import zlib
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import BinaryIO, NamedTuple

import msgspec
import structlog
from msgspec.structs import replace
from structlog.contextvars import bind_contextvars

from dragoman.server.engine.messages import LOWEST_PRIORITY
from dragoman.server.errors import ClientFault, DeadlineExceeded, NotPossible, ServerFault, ServiceError, Unauthenticated
from dragoman.server.service.answers import AnswerLimit, Generated
from dragoman.server.service.batch_gate import Gate, Preempted
from dragoman.server.service.batch_store import MAX_LINES, Batch, BatchError, BatchStore, Counts, NoSuchObject, Status
from dragoman.server.service.callers import RETRY_SECONDS, Caller
from dragoman.server.service.context import Call
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.service import Service
from dragoman.server.service.texts import num_slots_of

# Batches that run at once, and of one caller.
MAX_RUNNING, MAX_RUNNING_PER_CALLER = 8, 4
# Lines of a batch that are under way, and wait for limits of their caller or a model.
MAX_LINES_AT_ONCE, MAX_BYTES_AT_ONCE = 256, 8 * 2**20
POLL_SECONDS, FLUSH_SECONDS, ROOM_SECONDS, PURGE_SECONDS = 1.0, 0.5, 5.0, 3600.0
# Lines of a file, of which most may be blank.
MAX_LINES_WITH_BLANK = 4 * MAX_LINES
# Broken lines that are told, and times that a line is tried if the server's faults end it.
MAX_ERRORS, MAX_TRIES = 100, 3
# Refusals that pass, for which a line waits until the window of its batch ends.
PASSING = ("queue_full", "limit", "not_ready", "draining", "deadline_unmet", "unauthenticated")
# Record of the log: number of the line, whether it failed, tokens of sources and answers, length and checksum of the JSON after it.
_RECORD = struct.Struct("<IBIIII")

log = structlog.get_logger("dragoman.batches")


class Line(NamedTuple):
    """A line of an input file: its requests, and the JSON of a response with their answers or an error, for its id."""

    custom_id: str
    requests: Sequence[GenerateRequest]
    respond: Callable[[Sequence[Generated], str], Awaitable[bytes]]
    refuse: Callable[[ServiceError, str], bytes]
    num_bytes: int


class BrokenLine(ClientFault):
    """A line of an input file that cannot be read, or was not executed."""

    code = "INVALID_ARGUMENT"

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = BatchError(code, message, param=param)


class BatchRunner:
    """Runs batches, if it holds the lock of their folder; `read` converts a line for an endpoint, or raises `BrokenLine`."""

    def __init__(
        self, store: BatchStore, service: Service, limit: AnswerLimit, max_line_bytes: int, read: Callable[[bytes, str], Line]
    ) -> None:
        self.store, self.service, self.limit, self.max_line_bytes, self.read = store, service, limit, max_line_bytes, read
        self.gate = Gate(service)
        self._runs: dict[str, tuple[_Run, asyncio.Task[None]]] = {}
        self._num_left_of_others = 0
        self._task: asyncio.Task[None] | None = None
        self._purged_at = 0.0

    @property
    def num_lines_left(self) -> int:
        """Lines of all batches that are not done, if this process runs them."""
        return self._num_left_of_others + sum(_num_left(run.batch) for run, _ in self._runs.values())

    def start(self) -> None:
        """Start to run batches."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; another process, or the next one, goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        watching, lock = asyncio.create_task(self.gate.watch()), None
        has_begun = False
        try:
            while not self.service.is_draining:
                if watching.done():
                    watching = asyncio.create_task(self.gate.watch())
                try:
                    if lock is not None and not await self.store.run(self.store.is_held, lock):
                        await self._stop()
                        os.close(lock)
                        lock = None
                    lock = await self.store.run(self.store.lock) if lock is None else lock
                    has_begun = has_begun or self.service.is_ready
                    if lock is not None and has_begun:
                        await self._begin()
                except OSError as error:
                    log.warning("batch_folder cannot be used", reason=error.strerror)
                    await asyncio.sleep(ROOM_SECONDS)
                except Exception:
                    log.exception("batches cannot be run")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            watching.cancel()
            await self._stop()
            if lock is not None:
                os.close(lock)

    async def _begin(self) -> None:
        """Begin the batches that may run."""
        if time.monotonic() > self._purged_at + PURGE_SECONDS or not self._purged_at:
            await self.store.run(self.store.purge)
            self._purged_at = time.monotonic()
        self._runs = {name: run for name, run in self._runs.items() if not run[1].done()}  # before others are read, which may end
        batches = await self.store.run(self.store.open_batches)
        waiting = [batch for batch in batches if batch.id not in self._runs]
        for batch in waiting:
            owners = [run.batch.owner for run, _ in self._runs.values()]
            may_run = len(owners) < MAX_RUNNING and owners.count(batch.owner) < MAX_RUNNING_PER_CALLER
            if may_run or batch.status == "cancelling" or batch.expires_at < time.time():
                run = _Run(self, batch)
                self._runs[batch.id] = run, asyncio.create_task(run.run())
        self._num_left_of_others = sum(_num_left(batch) for batch in waiting if batch.id not in self._runs)

    async def _stop(self) -> None:
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runs.clear()
        self._num_left_of_others = 0


class _Run:
    """One batch under way."""

    def __init__(self, runner: BatchRunner, batch: Batch) -> None:
        self.batch = batch
        self._runner, self._store, self._service = runner, runner.store, runner.service
        self._records: list[bytes] = []  # not in the log yet
        self._num_bytes = 0  # of lines under way
        self._probing, self._has_room = asyncio.Lock(), asyncio.Event()
        self._is_full_until = 0.0

    async def run(self) -> None:
        """Run the batch to its end; after a failure of its folder once more, from what is there."""
        whole = self._whole = Call.begin("POST /v1/batches", is_counted=False, is_awaited=False)
        whole.request_id = self.batch.id
        bind_contextvars(request_id=self.batch.id, caller=self.batch.owner)
        while True:
            try:
                await self._advance()
                break
            except FileNotFoundError as error:
                if await self._is_lost():
                    log.warning("a batch ends, its files were removed", batch=self.batch.id)
                    break
                log.warning("a batch waits, a file is gone", reason=str(error))
            except OSError as error:
                log.warning("a batch waits, its folder cannot be used", reason=error.strerror)
            except Exception:
                log.exception("a batch waits, it cannot be run")
            await asyncio.sleep(ROOM_SECONDS)
        codes = {"completed": "OK", "cancelled": "CANCELLED", "expired": "DEADLINE_EXCEEDED", "failed": "INVALID_ARGUMENT"}
        self._service.calls.finish(whole, codes.get(self.batch.status, "NOT_FOUND"), event="batch")

    async def _is_lost(self) -> bool:
        """Return whether somebody has removed the batch; end it if that is so of its input alone."""
        try:
            await self._store.run(self._store.find_batch, self.batch.owner, self.batch.id)
            if not await self._store.run(self._store.part_of(self.batch, ".input").exists):
                errors = [BatchError("input_is_gone", "the server's copy of the input file is gone")]
                await self._change(status="failed", failed_at=int(time.time()), errors=errors)
        except NoSuchObject:
            return True
        except OSError:  # the folder of all batches is gone, and may come back
            return False
        return self.batch.has_ended

    async def _advance(self) -> None:
        """Bring the batch from any state to its end."""
        stop: Status | None = None
        if self.batch.status == "validating":
            stop = await self._until_stopped(self._validate(), has_answers=False)
            if self.batch.has_ended:
                return
        with ExitStack() as files:
            self._log = files.enter_context(await self._store.run(self._open, ".log", "a+b"))
            await self._recover()
            if stop is None and self.batch.request_counts.total:
                stop = await self._until_stopped(self._feed(), has_answers=True)
            await self._flush()
            await self._finalize(stop or await self._stopped() or "completed", files)

    async def _until_stopped(self, work: Awaitable[None], has_answers: bool) -> Status | None:
        """Do work until it is done, or the batch is cancelled or expires; return the reason. Meanwhile write answers."""
        task, room_at = asyncio.ensure_future(work), 0.0
        try:
            while not task.done() and (status := await self._stopped()) is None:
                if has_answers:
                    await self._flush()
                    if time.monotonic() > room_at:
                        await self._check_room()
                        room_at = time.monotonic() + ROOM_SECONDS
                await asyncio.wait({task}, timeout=FLUSH_SECONDS)
            if task.done():
                task.result()
                return None
            return status
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _stopped(self) -> Status | None:
        if self.batch.expires_at < time.time():
            return "expired"
        return "cancelled" if await self._store.run(self._store.part_of(self.batch, ".cancel").exists) else None

    async def _check_room(self) -> None:
        """Let lines begin only while there is room for their answers, and tell the caller."""
        try:
            await self._store.run(self._store.check_room, self.batch.owner)
        except NotPossible as error:
            self._has_room.clear()
            problem = [BatchError("no_room", f"waits: {error.message.partition(': ')[2]}")]
        else:
            self._has_room.set()
            problem = []
        if problem != self.batch.errors and (problem or self.batch.errors):
            await self._change(errors=problem)

    async def _change(self, **changes: object) -> None:
        batch = replace(self.batch, **changes)
        await self._store.run(self._store.write_batch, batch)
        self.batch = batch

    def _open(self, suffix: str, mode: str = "rb") -> BinaryIO:
        return self._store.part_of(self.batch, suffix).open(mode, buffering=-1 if mode == "rb" else 0)  # type: ignore[return-value]

    async def _validate(self) -> None:
        """Count the lines, or fail with the first that are broken."""
        errors, seen, total = list[BatchError](), set[bytes](), 0
        with await self._store.run(self._open, ".input") as source:
            async for lines in self._store.slices(self._read(source)):
                for number, line in lines:
                    error = line.error if isinstance(line, BrokenLine) else None
                    if isinstance(line, Line):
                        total += 1
                        key = line.custom_id.encode()
                        if key in seen:
                            error = BatchError("duplicate_custom_id", "custom_id: is that of another line", param="custom_id")
                        seen.add(key)
                    if total == MAX_LINES + 1 and error is None:
                        error = BatchError("too_many_lines", f"the file has more than {MAX_LINES} lines")
                    if error is not None:
                        errors.append(replace(error, line=number))
                if len(errors) >= MAX_ERRORS or total > MAX_LINES:
                    break
        if not errors and not total:
            errors = [BatchError("empty_file", "the file has no lines")]
        now = int(time.time())
        if errors:
            await self._change(status="failed", failed_at=now, errors=errors[:MAX_ERRORS])
        else:
            await self._change(status="in_progress", in_progress_at=now, request_counts=Counts(total))

    def _read(self, source: BinaryIO, skip: Callable[[int], bool] = lambda _: False) -> Iterator[tuple[int, Line | BrokenLine]]:
        """Yield the lines of an input file by number, without blank ones."""
        most, number = self._runner.max_line_bytes, 0
        while text := source.readline(most + 1):
            number += 1
            if number > MAX_LINES_WITH_BLANK:
                yield number, BrokenLine("too_many_lines", f"the file has more than {MAX_LINES_WITH_BLANK} lines with blank ones")
                return
            if len(text) > most:
                while text and not text.endswith(b"\n"):
                    text = source.readline(most + 1)
                yield number, BrokenLine("line_too_long", f"the line has more than {most} bytes")
            elif not text.isspace() and not skip(number):
                try:
                    yield number, self._runner.read(text, self.batch.endpoint)
                except BrokenLine as error:
                    yield number, error

    async def _recover(self) -> None:
        """Read which lines the log has, and remove a record that was not written whole."""
        self._offsets, self._end, self._records = array("q", [-1]), 0, []
        self._num_done, self._num_failed, self._num_source_tokens, self._num_generated_tokens = 0, 0, 0, 0
        async for _ in self._store.slices(self._read_log()):
            pass
        await self._store.run(self._log.truncate, self._end)

    def _read_log(self) -> Iterator[None]:
        while len(head := self._read_at(self._end, _RECORD.size)) == _RECORD.size:
            *_, length, checksum = _RECORD.unpack(head)
            if length > os.fstat(self._log.fileno()).st_size:
                return
            content = self._read_at(self._end + _RECORD.size, length)
            if len(content) < length or _checksum(head, content) != checksum:
                return
            self._note(head)
            yield

    def _read_at(self, offset: int, length: int) -> bytes:
        return os.pread(self._log.fileno(), length, offset)

    def _note(self, head: bytes) -> None:
        """Count a record of the log, which is at its end."""
        number, is_failed, source_tokens, generated_tokens, length, _ = _RECORD.unpack(head)
        while len(self._offsets) <= number:
            self._offsets.append(-1)
        self._offsets[number] = self._end
        self._end += _RECORD.size + length
        self._num_done += 1
        self._num_failed += is_failed
        self._num_source_tokens += source_tokens
        self._num_generated_tokens += generated_tokens

    def _is_done(self, number: int) -> bool:
        return number < len(self._offsets) and self._offsets[number] >= 0

    async def _flush(self) -> None:
        """Append what is ready to the log, and describe how far the batch is."""
        if records := self._records:
            self._records = []
            await self._store.run(_write_all, self._log, b"".join(records))
            for record in records:
                self._note(record[: _RECORD.size])
            counts = Counts(self.batch.request_counts.total, self._num_done - self._num_failed, self._num_failed)
            await self._change(request_counts=counts)

    async def _feed(self) -> None:
        """Compute the lines that are not in the log."""
        with await self._store.run(self._open, ".input") as source:
            tasks = set[asyncio.Task[None]]()
            async with asyncio.TaskGroup() as group:
                async for lines in self._store.slices(self._read(source, self._is_done)):
                    for number, line in lines:
                        if isinstance(line, BrokenLine):  # a server with other settings began the batch
                            error = {"code": line.error.code, "message": line.message, "line": number}
                            told = {"id": f"{self.batch.id}#{number}", "custom_id": None, "response": None, "error": error}
                            self._record(number, msgspec.json.encode(told), is_failed=True)
                            continue
                        caller = self._caller(is_known=False)
                        most = MAX_LINES_AT_ONCE if caller is None else max(1, (caller.most_at_once or 512) // 2)
                        while len(tasks) >= most or self._num_bytes > MAX_BYTES_AT_ONCE:
                            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                        await self._has_room.wait()
                        async with self._probing:  # a line waits for its model or limits: others need not try
                            pass
                        self._num_bytes += line.num_bytes
                        tasks.add(task := group.create_task(self._compute(number, line)))
                        task.add_done_callback(partial(self._release, line.num_bytes))
                        task.add_done_callback(tasks.discard)

    def _release(self, num_bytes: int, _: object) -> None:
        self._num_bytes -= num_bytes

    async def _compute(self, number: int, line: Line) -> None:
        """Compute a line, and add its record to those to be written."""
        name, answered, is_failed = f"{self.batch.id}#{number}", list[Generated](), False
        tokens = [0, 0]
        try:
            for request in line.requests:
                with self._service.calls.part(self._whole) as call:
                    call.max_at_once = 1
                    try:
                        generated = await self._generate(replace(request, priority=LOWEST_PRIORITY), call)
                    finally:
                        tokens = [tokens[0] + call.source_tokens, tokens[1] + call.generated_tokens]
                answered.append(replace(generated, request_id=name))
            content = await line.respond(answered, name)
        except Exception as error:
            content, is_failed = line.refuse(self._service.calls.fault(error), name), True
        self._record(number, content, is_failed, tokens)

    def _record(self, number: int, content: bytes, is_failed: bool, tokens: Sequence[int] = (0, 0)) -> None:
        """Let a line's answer be written to the log."""
        head = _RECORD.pack(number, is_failed, *tokens, len(content), 0)
        self._records.append(_RECORD.pack(number, is_failed, *tokens, len(content), _checksum(head, content)) + content)

    async def _generate(self, request: GenerateRequest, call: Call) -> Generated:
        """Return the answer to a request, which waits for whatever passes."""
        num_tries, num_preempted, is_refused = 0, 0, False
        while True:
            async with self._probing if is_refused else nullcontext():
                try:
                    return await self._try(request, call, num_preempted)
                except Preempted:
                    num_preempted += 1
                    continue
                except ServiceError as error:
                    is_refused = error.refusal in PASSING
                    num_tries += not is_refused and isinstance(error, ServerFault | DeadlineExceeded)
                    if not is_refused and not 0 < num_tries < MAX_TRIES:
                        raise
                    seconds = error.retry_after_seconds or RETRY_SECONDS
                await asyncio.sleep(seconds)

    async def _try(self, request: GenerateRequest, call: Call, num_preempted: int) -> Generated:
        caller, generation = self._caller(), self._service.generation
        num_slots = num_slots_of(request, generation.model_for(request, caller))
        async with self._runner.gate.slots(num_slots, num_preempted):
            call.arrival, call.generated_tokens = time.monotonic(), 0
            if caller is not None:
                call.enter(caller, is_background=True)
            try:
                return await generation.generate(request, call, None, self._runner.limit)
            finally:
                if call.is_entered:
                    call.leave()

    def _caller(self, *, is_known: bool = True) -> Caller | None:
        """Return the batch's caller; raise `Unauthenticated` if it has to be known and is not, which may pass."""
        callers = self._service.callers
        caller = None if callers is None else callers.named(self.batch.owner)
        if is_known and caller is None and (callers is not None or self.batch.owner):
            raise Unauthenticated("the caller is not known any more", 30 * RETRY_SECONDS)
        return caller

    async def _finalize(self, status: Status, files: ExitStack) -> None:
        """Write the results in the order of the lines, and end the batch."""
        now, batch = int(time.time()), self.batch
        if status == "completed":
            await self._change(status="finalizing", finalizing_at=now)
        written = [files.enter_context(await self._store.run(self._open, f".{name}.part", "wb")) for name in ("output", "errors")]
        source = files.enter_context(await self._store.run(self._open, ".input")) if status == "expired" else None
        async for _ in self._store.slices(self._write_results(written, source)):
            pass
        ids: list[str | None] = []
        for name, file, result in zip(("output", "errors"), written, batch.result_ids, strict=True):
            part = self._store.part_of(batch, f".{name}.part")
            await self._store.run(_sync, file)
            if is_empty := not await self._store.run(lambda path: path.stat().st_size, part):
                await self._store.run(part.unlink)
            else:
                named = f"{batch.id}_{name.removesuffix('s')}.jsonl"
                await self._store.run(self._store.keep_file, part, result, named, "batch_output", batch.output_seconds)
            ids.append(None if is_empty else result)
        usage = {"input_tokens": self._num_source_tokens, "output_tokens": self._num_generated_tokens}
        ended = {"status": status, f"{status}_at": int(time.time()), "output_file_id": ids[0], "error_file_id": ids[1]}
        if status == "cancelled":
            ended["cancelling_at"] = batch.cancelling_at or now
        await self._change(**ended, usage=usage, errors=())

    def _write_results(self, files: Sequence[BinaryIO], source: BinaryIO | None) -> Iterator[None]:
        """Write the answers of the log, and of an expired batch the lines without."""
        for offset in self._offsets:
            if offset >= 0:
                _, is_failed, _, _, length, _ = _RECORD.unpack(self._read_at(offset, _RECORD.size))
                _write_all(files[is_failed], self._read_at(offset + _RECORD.size, length) + b"\n")
                yield
        for number, line in () if source is None else self._read(source, self._is_done):
            if isinstance(line, Line):
                error = BrokenLine("batch_expired", "the completion window ended before this request was executed")
                _write_all(files[1], line.refuse(error, f"{self.batch.id}#{number}") + b"\n")
            yield


def _num_left(batch: Batch) -> int:
    counts = batch.request_counts
    return max(counts.total - counts.completed - counts.failed, 0)


def _checksum(head: bytes, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(head[:-4]))


def _write_all(file: BinaryIO, content: bytes) -> None:
    """Write everything to an unbuffered file."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
