"""One front end's process: started, told things, listened to, ended. It ends when this one does, too: its standard input closes."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import msgspec

from dragoman.server.fronts.messages import FromFrontEnd, Start, ToFrontEnd, read_message, to_bytes


class FrontEndHost:
    """See above."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Take over a process that has been started; use `start`."""
        self._process = process
        self._decoder = msgspec.msgpack.Decoder(FromFrontEnd)

    @classmethod
    async def start(cls, start: Start) -> "FrontEndHost":
        """Start the process, with this one's import path and never what happens to lie in the working directory.

        Raises:
            OSError: If the system has no room for it.
        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "dragoman.server.fronts.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=[start.table],
            start_new_session=True,
        )
        host = cls(process)
        host.send(start)
        return host

    @property
    def process_id(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: ToFrontEnd) -> None:
        """Tell it something; without effect if it is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(to_bytes(message))

    async def messages(self) -> AsyncIterator[FromFrontEnd]:
        """Yield what it says, until it says nothing more because it is gone.

        Raises:
            msgspec.MsgspecError: If it says what nobody can understand.
        """
        assert self._process.stdout is not None
        while (payload := await read_message(self._process.stdout)) is not None:
            yield self._decoder.decode(payload)

    async def wait(self) -> str:
        """Return how it ended, once it has."""
        code = await self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
