"""A sender process: started by `dragoman.load.run`, a process of its own so that nothing else delays its calls.

Standard input brings the plan as a line of JSON, then, when the process has written that it is connected, the time to start on the
machine's monotonic clock. A line after that, or the end of standard input, ends the sending; a second line gives up what is under
way. Standard output has a line of JSON for each `Message`.
"""

import asyncio
import os
import selectors
import signal
import sys
import time
from typing import Any

import msgspec

from dragoman.client.errors import CallError, InvalidArgument, Unavailable
from dragoman.load.calls import Caller
from dragoman.load.connection import open_channel
from dragoman.load.items import Items
from dragoman.load.plan import Plan
from dragoman.load.sender import Sender
from dragoman.load.tally import Tally
from dragoman.model.errors import InputError
from dragoman.v1 import generation_pb2_grpc

CONNECT_SECONDS = 10.0
PROGRESS_SECONDS = 0.5
# Longest line between the processes: an hour's histograms would fit.
MAX_LINE_BYTES = 64 * 1024 * 1024


class Progress(msgspec.Struct):
    """Report of a sender process."""

    tally: Tally  # counts since the last report
    num_sent: int  # calls sent
    num_in_flight: int  # calls under way
    cpu_seconds: float  # processor time since the start of the run
    end: float  # when sending ended, or is to end, seconds of the run
    is_cut: bool = False  # whether sending ended for being too far behind
    is_last: bool = False  # whether nothing follows


class Message(msgspec.Struct, omit_defaults=True):
    """Message of a sender process: connected, where nothing is set, or progress, or an error."""

    progress: Progress | None = None  # counts
    error: str = ""  # why it ends
    code: str = ""  # name of the gRPC status, where that is a call's failure and not the user's mistake


async def work() -> None:
    """Carry out the plan of standard input; write what is wrong."""
    orders = asyncio.StreamReader(MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    plan = msgspec.json.decode(await orders.readline(), type=Plan)
    try:
        async with open_channel(plan.server) as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
            except TimeoutError as error:
                raise Unavailable(f"{plan.server.target}: no connection within {CONNECT_SECONDS:g} s") from error
            items = Items(plan)  # before the clock starts: a large file takes its time
            _write(Message())
            line = await orders.readline()
            if line.strip():
                stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
                await _send(plan, items, stub, float(line), orders)
    except InputError as error:
        _write(Message(error=str(error)))
    except InvalidArgument as error:  # it cannot be put in a message, so no server was asked
        _write(Message(error=error.message))
    except CallError as error:
        _write(Message(error=error.message, code=error.code))


async def _send(plan: Plan, items: Items, stub: Any, start: float, orders: asyncio.StreamReader) -> None:
    sender = Sender(plan, lambda: time.monotonic() - start, items)
    caller = Caller(plan, stub, sender.record, lambda: time.monotonic() - start)
    cpu = time.process_time()

    def report(is_last: bool = False) -> None:
        used = time.process_time() - cpu
        counts = sender.num_sent, sender.num_in_flight, used, sender.end
        _write(Message(Progress(sender.take(), *counts, sender.is_cut, is_last)))

    async def report_often() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            report()

    async def listen() -> None:
        await orders.readline()
        sender.stop()
        await orders.readline()
        sender.give_up()

    helpers = [asyncio.create_task(report_often()), asyncio.create_task(listen())]
    try:
        await sender.run(caller.call)
    finally:
        for helper in helpers:
            helper.cancel()
    report(is_last=True)


def _write(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Carry out what standard input asks for; Ctrl-C is for the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Waits of `select` are exact; those of epoll are rounded up to a millisecond, which every latency would have in it.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        try:
            runner.run(work())
        except BrokenPipeError:  # nobody reads any more
            os._exit(1)
