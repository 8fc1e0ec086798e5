"""An object in a process of its own, without threads, interpreter or allocator in common with the caller."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

STOP_SECONDS = 10.0


class Actor:
    """Context manager that creates the object in a new process, raises its errors, and ends that process.

    Calls block, one at a time. Arguments, results and exceptions are pickled.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Describe the object; `make` is a class or function that the other process can import."""
        self._make, self._arguments = make, arguments

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._make, self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and return its result, or raise its exception.

        Raises:
            RuntimeError: If the process has ended.
        """
        try:
            self._connection.send((method, arguments))
        except BrokenPipeError as error:
            raise self._ended() from error
        return self._receive()

    def _receive(self) -> Any:
        try:
            result, error = self._connection.recv()
        except EOFError as broken:
            raise self._ended() from broken
        if error is not None:
            raise error
        return result

    def _ended(self) -> RuntimeError:
        self._process.join(STOP_SECONDS)
        name = getattr(self._make, "__name__", str(self._make))
        return RuntimeError(f"the process of {name} ended with exit code {self._process.exitcode}")

    def _stop(self) -> None:
        self._connection.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Create the object and serve calls until the other end is closed."""
    try:
        target = make(*arguments)
    except Exception as error:
        connection.send((None, error))
        return
    connection.send((None, None))
    while True:
        try:
            method, call_arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = getattr(target, method)(*call_arguments)
        except Exception as error:
            connection.send((None, error))
        else:
            connection.send((result, None))
