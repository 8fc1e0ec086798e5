"""The load of `benchmarks/harness/load.py` on any of the servers that are compared, from a process of its own.

`python -m benchmarks.peers.sender` reads an `Order` as JSON on standard input and writes a `Record` as JSON on standard output. The
arrivals are the same for every server.
"""

import asyncio
import subprocess
import sys
import time

import msgspec

from benchmarks.harness.load import ROOT, Call, Load, Record, send_in_turns, send_openly
from benchmarks.peers.faces import FACES, Ask, AskError


class Order(msgspec.Struct, frozen=True):
    """Whom to send what.

    Attributes:
        face: Key of `FACES`.
        load: What to send; every search is greedy.
    """

    face: str
    load: Load


def run(order: Order) -> Record:
    """Send from a new process, and return what came of it.

    Raises:
        subprocess.CalledProcessError: If that process fails; it has said why on standard error.
    """
    command = [sys.executable, "-m", "benchmarks.peers.sender"]
    done = subprocess.run(command, input=msgspec.json.encode(order), stdout=subprocess.PIPE, cwd=ROOT, check=True)
    return msgspec.json.decode(done.stdout, type=Record)


async def send(order: Order) -> Record:
    """Send from this process."""
    async with FACES[order.face](order.load.address) as ask:
        await ask(order.load.texts[0])  # the connection is there before the first arrival is due
        call = _named(ask)
        wall, cpu = time.perf_counter(), time.process_time()
        outcomes = await (send_in_turns if order.load.rate is None else send_openly)(call, order.load)
        return Record(outcomes, time.process_time() - cpu, time.perf_counter() - wall)


async def translate(face: str, address: str, texts: list[str], concurrency: int) -> list[str]:
    """Return a server's translations.

    Raises:
        AskError: If one is refused.
    """
    places = asyncio.Semaphore(concurrency)
    async with FACES[face](address) as ask:

        async def place(text: str) -> str:
            async with places:
                return await ask(text)

        return await asyncio.gather(*map(place, texts))


def _named(ask: Ask) -> Call:
    async def call(text: str) -> str:
        try:
            await ask(text)
        except AskError as error:
            return str(error)
        return "OK"

    return call


def main() -> None:
    """Do what standard input says."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(send(order))))


if __name__ == "__main__":
    main()
