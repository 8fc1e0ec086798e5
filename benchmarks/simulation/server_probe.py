"""Measures a real server beside the simulation of it: what the front end adds, and how far off the simulation is."""

import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.load import Load, arrivals, run
from benchmarks.harness.served import ServedModel, cpu_seconds
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.replica import SimulatedReplica, capacity
from benchmarks.simulation.surge import percentile

CALIBRATED_LOAD = 0.2
LOADS = (0.4, 0.6, 0.8, 0.9)
CALLERS = 48
IDLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load, measured or simulated.

    Attributes:
        p50: Latency, seconds.
        p95: The same.
        cores: Processor time over wall time.
    """

    p50: float
    p95: float
    cores: float


@dataclass(frozen=True, slots=True)
class Check:
    """One load on both.

    Attributes:
        rate: Requests a second.
        measured: Of the server.
        simulated: Of the simulation, with the same arrivals and texts.
    """

    rate: float
    measured: Figures
    simulated: Figures

    def row(self) -> dict[str, Any]:
        """Return a row of a table."""
        row: dict[str, Any] = {"requests/s": f"{self.rate:.1f}"}
        for name, unit in (("p50", 1000), ("p95", 1000), ("cores", 1)):
            measured, simulated = (getattr(figures, name) for figures in (self.measured, self.simulated))
            title = f"{name} ms" if unit > 1 else name
            digits = 1 if unit > 1 else 2
            row |= {title: f"{measured * unit:.{digits}f}", f"{title}, simulated": f"{simulated * unit:.{digits}f}"}
            row[f"{name} error"] = f"{simulated / measured - 1:+.0%}"
        return row


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Have this process, and those that it starts meanwhile, use these cores only; an empty set changes nothing."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def split_cores(count: int) -> tuple[set[int], set[int]]:
    """Return so many cores for the server and the others for the sender, which shares them where there are no others."""
    every = sorted(os.sched_getaffinity(0))
    return set(every[:count]), set(every[count:]) or set(every)


class ServerProbe:
    """A real server of one replica's size.

    Args:
        bundle: The model.
        texts: Sources, whose costs are the jobs.
        costs: Of the engine.
        seconds: Of each load.
    """

    def __init__(self, bundle: Path, texts: Sequence[str], costs: Costs, seconds: float) -> None:
        self._bundle, self._texts, self._seconds = bundle, list(texts), seconds
        self._jobs = dict(zip(texts, costs.jobs, strict=True))
        self._costs = costs

    def measure(self) -> tuple[Costs, list[Check], tuple[float, float]]:
        """Return the costs with the front end's, the validation, and the capacity, measured and simulated."""
        server_cores, sender_cores = split_cores(round(self._costs.cores))
        with on_cores(server_cores):
            server = ServedModel(self._bundle, f"--num-threads={round(self._costs.cores)}")
            server.__enter__()
        with server_exit(server), on_cores(sender_cores):
            answered = self._saturate(server)
            costs = self._calibrate(server)
            checks = [self._check(server, costs, capacity(costs) * load, seed) for seed, load in enumerate(LOADS, 2)]
        return costs, checks, (answered, capacity(costs))

    def _saturate(self, server: ServedModel) -> float:
        """Return requests a second with callers that wait; note what processor time the front end takes for each."""
        front = cpu_seconds(server.front_pid)
        record = run(Load(server.address, self._texts, self._costs.num_rows, self._seconds, concurrency=CALLERS))
        used = (cpu_seconds(server.front_pid) - front) / len(record.outcomes)
        self._costs = self._costs.but(front_cpu_seconds=used)
        third = self._seconds / 3
        return sum(third <= outcome.ended <= self._seconds for outcome in record.outcomes) / (self._seconds - third)

    def _calibrate(self, server: ServedModel) -> Costs:
        """Measure, with a light load, how long a request is in the front end."""
        before = _cpu(server)
        time.sleep(IDLE_SECONDS)
        idle = sum(_cpu(server)) - sum(before)
        load = self._load(server, capacity(self._costs) * CALIBRATED_LOAD, 1)
        record = run(load)
        costs = self._costs.but(idle_cores=idle / IDLE_SECONDS)
        simulated, _ = self._simulate(costs, load)
        measured = [outcome.ended - outcome.due for outcome in record.outcomes]
        return costs.but(front_seconds=max(0.0, statistics.median(measured) - statistics.median(simulated)))

    def _check(self, server: ServedModel, costs: Costs, rate: float, seed: int) -> Check:
        load = self._load(server, rate, seed)
        before = sum(_cpu(server))
        record = run(load)
        measured = sorted(outcome.ended - outcome.due for outcome in record.outcomes)
        failed = [outcome.code for outcome in record.outcomes if outcome.code != "OK"]
        if failed:
            raise RuntimeError(f"at {rate:.1f} requests/s {len(failed)} failed: {failed[0]}")
        used = (sum(_cpu(server)) - before) / record.wall_seconds
        simulated, cores = self._simulate(costs, load)
        return Check(
            rate,
            Figures(percentile(measured, 50), percentile(measured, 95), used),
            Figures(percentile(simulated, 50), percentile(simulated, 95), cores),
        )

    def _load(self, server: ServedModel, rate: float, seed: int) -> Load:
        return Load(server.address, self._texts, self._costs.num_rows, self._seconds, rate=rate, seed=seed)

    def _simulate(self, costs: Costs, load: Load) -> tuple[list[float], float]:
        """Return the latencies, rising, and the cores used for the very requests that a load sends."""
        assert load.rate is not None
        latencies: list[float] = []
        replica = SimulatedReplica(costs, lambda due, ended: latencies.append(ended - due))
        texts = list(load.texts)
        random.Random(load.seed).shuffle(texts)
        for number, at in enumerate(arrivals(load.rate, load.seconds, load.seed)):
            replica.offer(at, self._jobs[texts[number % len(texts)]])
        replica.advance(float("inf"))
        used = replica.cpu_seconds / max(load.seconds, replica.now) + costs.idle_cores
        return sorted(latencies), min(used, costs.cores)


@contextlib.contextmanager
def server_exit(server: ServedModel) -> Iterator[None]:
    """Stop a server that was started elsewhere."""
    try:
        yield
    except BaseException as error:
        server.__exit__(type(error), error, error.__traceback__)
        raise
    server.__exit__(None, None, None)


def _cpu(server: ServedModel) -> tuple[float, float]:
    return cpu_seconds(server.front_pid), cpu_seconds(server.engine_pid)
