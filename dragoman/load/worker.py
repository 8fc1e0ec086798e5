"""A sender process: started by `dragoman.load.pool`, a process of its own so that nothing else delays its calls.

Standard input brings the plan as a line of JSON, then, when it has said that it is connected, the time to start on the machine's
monotonic clock. A line after that, or the end of standard input, ends the sending; a second line gives up what is under way.
Standard output has a line of JSON for each `Message`.
"""

import asyncio
import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from grpc import aio

from dragoman.client.errors import CallError, InvalidArgument, Unavailable
from dragoman.load.calls import Caller
from dragoman.load.connection import open_channel
from dragoman.load.items import Items
from dragoman.load.plan import Plan, Server
from dragoman.load.sender import Progress, Sender
from dragoman.model.errors import InputError
from dragoman.v1 import generation_pb2_grpc

CONNECT_SECONDS = 10.0
PROGRESS_SECONDS = 0.5


class Message(msgspec.Struct, omit_defaults=True):
    """Message of a sender process: ready, progress, or error."""

    is_ready: bool = False  # it is connected
    progress: Progress | None = None  # counts
    error: str = ""  # why it ends
    code: str = ""  # name of the gRPC status, where that is a call's failure and not the user's mistake


class Input:
    """Lines of standard input, read by a thread; an empty one is the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._loop = loop
        threading.Thread(target=self._read, daemon=True).start()

    async def line(self) -> bytes:
        """Return the next line."""
        return await self._lines.get()

    def _read(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            # Not a buffered file: its lock, held by this thread, would abort the interpreter's shutdown.
            with open(os.dup(0), "rb", buffering=0) as lines:
                for line in iter(lines.readline, b""):
                    self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
            for _ in range(2):
                self._loop.call_soon_threadsafe(self._lines.put_nowait, b"")


async def work(orders: Input) -> None:
    """Carry out the plan that comes; what is wrong is said."""
    plan = msgspec.json.decode(await orders.line(), type=Plan)
    try:
        async with _connected(plan.server) as channel:
            stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            items = Items(plan)  # before the clock starts: a large file takes its time
            start = await _start_time(orders)
            if start is not None:
                await _send(plan, items, stub, start, orders)
    except InputError as error:
        _say(Message(error=str(error)))
    except InvalidArgument as error:  # it cannot be put in a message, so no server was asked
        _say(Message(error=error.message))
    except CallError as error:
        _say(Message(error=error.message, code=error.code))


async def _send(plan: Plan, items: Items, stub: Any, start: float, orders: Input) -> None:
    sender = Sender(plan, lambda: time.monotonic() - start, items)
    caller = Caller(plan, stub, sender.record, lambda: time.monotonic() - start)
    cpu = time.process_time()

    def tell(is_last: bool = False) -> None:
        used = time.process_time() - cpu
        counts = sender.num_sent, sender.num_in_flight, used, sender.end
        _say(Message(progress=Progress(sender.take(), *counts, sender.is_cut, is_last)))

    async def report() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            tell()

    async def listen() -> None:
        await orders.line()
        sender.stop()
        await orders.line()
        sender.give_up()

    helpers = [asyncio.create_task(report()), asyncio.create_task(listen())]
    try:
        await sender.run(caller)
    finally:
        for helper in helpers:
            helper.cancel()
    tell(is_last=True)


async def _start_time(orders: Input) -> float | None:
    """Say that all is ready; return when to start, None for not at all."""
    _say(Message(is_ready=True))
    line = await orders.line()
    return float(line) if line.strip() else None


@contextlib.asynccontextmanager
async def _connected(server: Server) -> AsyncIterator[aio.Channel]:
    """Open a connection.

    Raises:
        Unavailable: If nobody answers in time.
    """
    async with open_channel(server) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
        except TimeoutError as error:
            raise Unavailable(f"{server.target}: no connection within {CONNECT_SECONDS:g} s") from error
        yield channel


def _say(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Do what standard input says; Ctrl-C is for the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Waits of `select` are exact; those of epoll are rounded up to a millisecond, which every latency would have in it.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(work(Input(loop)))
    except BrokenPipeError:  # nobody wants to know any more
        os._exit(1)
    finally:
        loop.close()


if __name__ == "__main__":
    main()
