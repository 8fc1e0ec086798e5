"""Lines of text: read from a file or a stream, processed concurrently in order, shown on a progress bar."""

import json
import os
import select
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import copy_context
from dataclasses import asdict, fields
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from dragoman.client.batch import check_concurrency
from dragoman.client.calls import Scope
from dragoman.client.errors import InvalidArgument
from dragoman.client.search import refusal
from dragoman.model.errors import InputError

_CHUNK_BYTES = 1 << 16
Item = TypeVar("Item")
Output = TypeVar("Output")


class Pause:
    """Marker among items: the next may be long in coming, so those in flight are answered first."""


PAUSE: Final = Pause()


class LineFile:
    """The lines of a UTF-8 file, ended by line feeds; raises `InputError` if it cannot be read, naming a wrong line."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        for _ in self:
            pass

    def __len__(self) -> int:
        return self._content.count(b"\n") + (self._content[-1:] not in (b"", b"\n"))

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(BytesIO(self._content), start=1):
            yield decode_line(line, self.name, number)

    def endings(self) -> Iterator[str]:
        """Yield what ends each line: a line feed, or a carriage return and one."""
        for line in BytesIO(self._content):
            yield "\r\n" if line.endswith(b"\r\n") else "\n"


def stream_lines(stream: BinaryIO, name: str) -> Iterator[str | Pause]:
    """Yield the lines of a stream as they come, and `PAUSE` where the next is not there yet; raises as `decode_line`."""
    number = 0
    rest = b""
    while True:
        if not _has_data(stream):
            yield PAUSE
        chunk = os.read(stream.fileno(), _CHUNK_BYTES) if _has_descriptor(stream) else stream.read(_CHUNK_BYTES)
        *lines, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            lines, rest = [rest], b""
        for line in lines:
            number += 1
            yield decode_line(line, name, number)
        if not chunk:
            return


def decode_line(line: bytes, name: str, number: int) -> str:
    """Decode a line without its end, the first without a byte order mark; raises `InputError` naming it if it is not UTF-8."""
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}, line {number}: not UTF-8: {error.reason} at byte {error.start}") from error


def _has_descriptor(stream: BinaryIO) -> bool:
    try:
        stream.fileno()
    except OSError:  # in memory
        return False
    return True


def _has_data(stream: BinaryIO) -> bool:
    """Return whether reading would not block; False for a stream where this is not known."""
    if not _has_descriptor(stream):
        return True
    try:
        return bool(select.select([stream], [], [], 0)[0])
    except (OSError, ValueError):
        return False


def in_order(
    items: Iterable[Item | Pause], work: Callable[[Item, Scope], Output], scope: Scope, concurrency: int = 32
) -> Generator[Output, None, None]:
    """Yield the results of the work on each item, in order; stop at the first that fails, with its error.

    Items are read as results are asked for, at most `2 * concurrency` ahead, so that one slow item does not leave others idle.
    At `PAUSE` results in flight are yielded before the next item is read; so are those before an item that raises.
    `work` is called on `concurrency` threads with an item and the scope, which is cancelled when the results end or are dropped.
    """
    check_concurrency(concurrency)
    return _in_order(iter(items), work, scope, concurrency)


def _in_order(
    source: Iterator[Item | Pause], work: Callable[[Item, Scope], Output], scope: Scope, concurrency: int
) -> Generator[Output, None, None]:
    pending: deque[Future[Output]] = deque()
    executor = ThreadPoolExecutor(concurrency, thread_name_prefix="client")
    is_read, failure = False, None
    try:
        while not is_read:
            item: Item | Pause = PAUSE
            try:
                item = next(source)
            except StopIteration:
                is_read = True
            except Exception as error:
                is_read, failure = True, error
            if not isinstance(item, Pause):
                pending.append(executor.submit(copy_context().run, work, item, scope))  # the active trace goes along
            while pending and (isinstance(item, Pause) or len(pending) == 2 * concurrency):
                yield pending.popleft().result()
        if failure is not None:
            raise failure
    finally:
        scope.cancel()
        executor.shutdown(wait=True, cancel_futures=True)


def naming_refused(
    results: Generator[Output, None, None], name: Callable[[int], str], first: int = 1
) -> Generator[Output, None, None]:
    """Yield results, and close them; raise `InputError` for a text that the server refuses, with its name by its number."""
    number = first
    with closing(results):
        try:
            for result in results:
                yield result
                number += 1
        except InvalidArgument as error:
            raise refusal(name(number), error.message) from error


def json_line(value: Any, kind: type, **blank: object) -> str:
    """Return a dataclass as a line of JSON; None as one whose other fields are null. Bytes that are not UTF-8 become U+FFFD."""
    values = {field.name: None for field in fields(kind)} | blank if value is None else asdict(value)
    return json.dumps(values, ensure_ascii=False, default=lambda piece: piece.decode(errors="replace")) + "\n"


class LinesPerSecond(ProgressColumn):
    """The pace, once there is one."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        pace = task.finished_speed or task.speed
        return Text("" if pace is None else f"{pace:,.1f} lines/s")


@contextmanager
def line_progress(stream: TextIO | None, description: str, total: int, num_done: int = 0) -> Iterator[Callable[[], None]]:
    """Show a bar while the block runs, if the stream is a terminal; yields the function to call after each line."""
    if stream is None or not stream.isatty():
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        LinesPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as progress:
        task = progress.add_task(description, total=total, completed=num_done)
        yield lambda: progress.advance(task)
