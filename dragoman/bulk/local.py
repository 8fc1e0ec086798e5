"""Engines of a bulk job on this machine: a process each, which gets shards over a pipe."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.bulk.job import Done, Failure, Shard, Work, Worker
from dragoman.bulk.translator import MAX_SLOTS, MIN_SLOTS
from dragoman.export.bundle import Bundle
from dragoman.server.config import ServerConfig
from dragoman.server.engine.settings import DeviceSettings
from dragoman.server.runtime.weights_cache import weights_folder
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT
from dragoman.server.telemetry.logs import configure_logging
from dragoman.server.workers.engines import MAX_ENGINES, measure_engines, plan_engine

# Shards that an engine has: one that fills its slots, and the next; more while they have few rows.
SHARDS_PER_ENGINE = 2
ROWS_PER_SLOT = SHARDS_PER_ENGINE * REQUESTS_PER_SLOT
# Engines that may end one after the other without a finished shard, before the job fails.
MAX_DEATHS = 3


def local_engines(work: Work, num_engines: int) -> tuple[Work, int]:
    """Return the work with the threads of each engine, and the number of engines: as given, else those of a server.

    Raises:
        InputError: If there cannot be so many.
    """
    settings = work.settings
    bundle = Bundle.open(Path(settings.bundle))
    max_slots = settings.max_slots or MIN_SLOTS
    sizes: dict[str, Any] = {"replicas": num_engines, "num_threads": settings.num_threads, "max_slots": max_slots}
    config = ServerConfig(models=Path(settings.bundle), device=settings.device.name, **sizes)
    plan = asyncio.run(measure_engines(config, bundle, 1, MAX_ENGINES)) or plan_engine(config, bundle, 1)
    folder = plan.weights_cache or weights_folder(config.weights_cache, plan.num_replicas)
    device = DeviceSettings(settings.device.name, weights_cache=folder, wide=plan.wide)
    settings = replace(settings, num_threads=plan.num_threads, device=device)
    return replace(work, settings=settings), plan.num_replicas


class _Engine:
    """A process, and the shards that it has."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, work), daemon=True)
        resource_tracker.ensure_running()  # it unblocks signals
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is the parent's
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self.shards: dict[tuple[str, int], Shard] = {}
        self._most_rows = ROWS_PER_SLOT * (work.settings.max_slots or MAX_SLOTS)

    @property
    def num_rows(self) -> int:
        """Rows of its shards; one at least of each."""
        return sum(max(1, shard.cut.num_rows) for shard in self.shards.values())

    @property
    def has_room(self) -> bool:
        """Whether it may have another shard."""
        return len(self.shards) < SHARDS_PER_ENGINE or self.num_rows < self._most_rows

    def send(self, shard: Shard) -> None:
        """Give the process a shard."""
        self.shards[shard.input, shard.number] = shard
        with suppress(OSError):  # it has ended, which `wait` tells
            self.connection.send_bytes(msgspec.msgpack.encode(shard))

    def end(self) -> None:
        """End the process at once: what it has not stored is not there."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def run_locally(work: Work, items: Iterator[Shard | Done], num_engines: int) -> Generator[Done, None, None]:
    """Yield the shards that are done, as engines finish them.

    Raises:
        InputError: If the bundle cannot be loaded, or an output cannot be written.
        RuntimeError: If engines fail repeatedly.
    """
    engines: list[_Engine] = []
    left: list[Shard | Done] = []  # of engines that ended
    num_deaths = 0
    try:
        while True:
            while (free := [engine for engine in engines if engine.has_room]) or len(engines) < num_engines:
                item = left.pop() if left else next(items, None)
                if item is None:
                    break
                if isinstance(item, Done):
                    yield item
                    continue
                idlest = min(free, key=lambda engine: engine.num_rows, default=None)
                if idlest is None or (idlest.shards and len(engines) < num_engines):
                    engines.append(idlest := _Engine(work))
                idlest.send(item)
            if not any(engine.shards for engine in engines):
                return
            ready = wait([engine.connection for engine in engines])
            for place, engine in enumerate(engines):
                if engine.connection not in ready:
                    continue
                try:
                    event = msgspec.msgpack.decode(engine.connection.recv_bytes(), type=Done | Failure)
                except (EOFError, OSError):
                    engine.end()
                    num_deaths += 1
                    if num_deaths == MAX_DEATHS:
                        raise RuntimeError(f"{num_deaths} engines ended, the last with {engine.process.exitcode}") from None
                    left += reversed(engine.shards.values())
                    engines[place] = _Engine(work)
                    continue
                if isinstance(event, Failure):
                    raise event.error()
                num_deaths = 0
                del engine.shards[event.input, event.number]
                yield event
    finally:
        for engine in engines:
            engine.end()


def _run(connection: Connection, work: Work) -> None:
    """Translate the shards of a connection until it closes; the process of an engine."""
    configure_logging("warning", "console")
    worker = Worker(work)

    sender = ThreadPoolExecutor(1)  # shards end in order; this thread has always to receive

    def send(future: Future[Done | Failure]) -> None:
        with suppress(OSError):
            connection.send_bytes(msgspec.msgpack.encode(future.result()))

    with suppress(EOFError, OSError):
        while True:
            sender.submit(send, worker.submit(msgspec.msgpack.decode(connection.recv_bytes(), type=Shard)))
    os._exit(0)  # the parent has ended, whose work is not waited for
