"""What a server of many cores needs: the cost of a sentence in an engine measured here, and how many of each process fill them.

    python -m benchmarks.capacity bundles/en-de [BUNDLE ...] --data data/multi30k [--plan 2 8 16 32 64] [--quick]

An engine answers captions, 64 at a time: one thread on a core of its own; two threads; two processes of one thread on a core each,
at once, which share their weights. The three take turns. What a request costs in a front end is read from `overhead`'s results,
memory from `replica_memory`'s; what it costs to pass a request and its answer on, as the desk does, is measured here, over sockets,
without the desk's bookkeeping. `benchmarks.capacity_plan` makes plans of these.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.capacity_plan import Costs, Plan, plan
from benchmarks.harness.apart import Apart
from benchmarks.harness.report import environment, read, write
from dragoman.export.bundle import Bundle
from dragoman.export.processor import processor_kind
from dragoman.model.corpus import read_lines
from dragoman.server.allocator import keep_blocks
from dragoman.server.engine.messages import Answer, Command, Event, Finished, Report, Request, Statistics, Submit
from dragoman.server.offline import OfflineTranslator

NUM_SLOTS = 64
NUM_SENTENCES, NUM_ROUNDS = 300, 3
NUM_PASSED = 2000
NUM_STEPS, POSITION, FIRST_ID = 12, 8, 10
CORES = (2, 8, 16, 32, 64)
FRONT_MIB = 90.0
ONE, BOTH, PAIR = "1 thread", "2 threads", "2 x 1 thread"
ALONE_US, BESIDE_US = "\u00b5s a sentence, 1 thread", "\u00b5s, 2 x 1 thread"


class Worker:
    """An engine in a process of its own, kept to some cores."""

    def __init__(self, bundle: Path, num_threads: int, cores: Sequence[int], folder: str, texts: Sequence[str]) -> None:
        """Load it, and have it answer once."""
        os.sched_setaffinity(0, cores)
        keep_blocks()
        self._translator = OfflineTranslator(bundle, NUM_SLOTS, num_threads, weights_cache=folder, is_warmed_up=True)
        encoded = self._translator.tokenizers.source.encode_batch(list(texts))
        self._sources = [[*ids, self._translator.manifest.eos_id] for ids in encoded]
        self.answer()

    def answer(self) -> dict[str, float]:
        """Answer all sentences; return how long that took, in processor time too, and what the steps were."""
        started, cpu = time.perf_counter(), time.process_time()
        self._translator.run(self._sources)
        seconds = time.perf_counter() - started
        return {"rate": len(self._sources) / seconds, "cpu_us": (time.process_time() - cpu) * 1e6 / len(self._sources)}

    def step_seconds(self) -> float:
        """Return the processor time of a full step, the weights as fresh in the caches as the step before has left them."""
        runner = self._translator.engine.runner
        tokens, positions = np.full(NUM_SLOTS, FIRST_ID, np.int64), np.full(NUM_SLOTS, POSITION, np.int64)
        sources = [self._sources[i % len(self._sources)] for i in range(NUM_SLOTS)]
        runner.prefill(sources, list(range(NUM_SLOTS)))
        found = []
        for _ in range(NUM_STEPS):
            started = time.process_time()
            runner.step(tokens, positions, 1)
            found.append(time.process_time() - started)
        return min(found)


def measure(bundle: Path, texts: Sequence[str], num_rounds: int) -> dict[str, float]:
    """Return sentences a second of one thread, of two, and of two processes, medians of rounds in turns; and processor times."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="capacity."))

        def worker(num_threads: int, kept_to: Sequence[int]) -> Apart:
            return stack.enter_context(Apart(Worker, bundle, num_threads, kept_to, folder, texts))

        first, second = (worker(1, cores[-1 - i :][:1]) for i in range(2))
        both = worker(2, cores)
        threads = stack.enter_context(ThreadPoolExecutor(2))
        found: dict[str, list[float]] = {ONE: [], BOTH: [], PAIR: [], ALONE_US: [], BESIDE_US: []}
        for _ in range(num_rounds):
            alone = first.call("answer")
            found[ONE].append(alone["rate"])
            found[ALONE_US].append(alone["cpu_us"])
            found[BOTH].append(both.call("answer")["rate"])
            pair = list(threads.map(lambda side: side.call("answer"), (first, second)))
            found[PAIR].append(sum(each["rate"] for each in pair))
            found[BESIDE_US].append(statistics.mean(each["cpu_us"] for each in pair))
        step_seconds = first.call("step_seconds")
    return {name: statistics.median(values) for name, values in found.items()} | {"step_seconds": step_seconds}


def passing_us(num_passed: int = NUM_PASSED) -> float:
    """Return the processor time of passing one request and its answer on: both read, and sent over a socket each."""
    commands, events = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(Event)
    encoder = msgspec.msgpack.Encoder()
    now, ids = time.monotonic(), list(range(1000, 1020))
    submit = encoder.encode(Submit([Request(1, ids, 64, now)]))
    answer = Answer(ids, [-0.1] * 21, -1.5, "eos")
    report = encoder.encode(Report([], [Finished(1, "eos", [answer], 20, now, 0.001, now, now)], Statistics()))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        context = stack.enter_context(zmq.Context())
        ours, theirs = (stack.enter_context(context.socket(zmq.PAIR)) for _ in range(2))
        ours.bind(f"ipc://{folder}/socket")
        theirs.connect(f"ipc://{folder}/socket")
        started = time.process_time()  # ZeroMQ's own thread is at work, too
        for _ in range(num_passed):
            ours.send(encoder.encode(commands.decode(submit)))
            theirs.recv()
            ours.send(encoder.encode(events.decode(report)))
            theirs.recv()
        return (time.process_time() - started) * 1e6 / num_passed


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of another benchmark's results on this kind of processor; none where there are none."""
    section = read(name)
    return [] if section is None else section.rows


def front_us(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return what a request costs a front end with many under way, from `overhead`'s results.

    Raises:
        SystemExit: If there are none.
    """
    if not rows:
        raise SystemExit("capacity: there are no results of benchmarks.overhead on this kind of processor; give --front-us")
    return float(max(rows, key=lambda row: int(row["concurrency"]))["dragoman: front end \u00b5s"])


def memory_mib(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[float, float]:
    """Return the memory of one engine that shares its weights, and of each further one, from `replica_memory`'s results; or 0."""
    of_model = sorted((row for row in rows if row["model"] == model), key=lambda row: int(row["engines"]))
    if len(of_model) < 2:
        return 0.0, 0.0
    first, last = float(of_model[0]["shared: MiB"]), float(of_model[-1]["shared: MiB"])
    return first, (last - first) / (int(of_model[-1]["engines"]) - int(of_model[0]["engines"]))


def costs_of(bundle: Path, found: Mapping[str, float], front: float, desk: float) -> Costs:
    """Return the costs of a model's requests."""
    files = Bundle.open(bundle, is_checked=False).manifest.files
    first, further = memory_mib(read_rows("replica_memory"), bundle.name)
    return Costs(
        engine_us=found[ALONE_US],
        front_us=front,
        desk_us=desk,
        sharing=min(found[ALONE_US] / found[BESIDE_US], 1.0),
        stream_gbs=files["decoder.weights"].size / found["step_seconds"] / 1e9,
        first_mib=first,
        further_mib=further,
        front_mib=FRONT_MIB,
    )


def measured_row(model: str, found: Mapping[str, float], costs: Costs) -> dict[str, Any]:
    """Return what was measured of a model, for a table."""
    return {
        "model": model,
        **{f"{name}: sentences/s": f"{found[name]:,.1f}" for name in (ONE, BOTH, PAIR)},
        "2 x 1 \u00f7 2": f"{found[PAIR] / found[BOTH]:.2f}",
        **{name: f"{found[name]:,.0f}" for name in (ALONE_US, BESIDE_US)},
        "full step ms": f"{found['step_seconds'] * 1000:.2f}",
        "weights read, GB/s": f"{costs.stream_gbs:.1f}",
    }


def planned_row(model: str, calls: str, made: Plan) -> dict[str, Any]:
    """Return a plan, for a table."""
    return {
        "model": model,
        "calls": calls,
        "cores": made.cores,
        "replicas": made.engines,
        "front_ends": made.front_ends,
        "sentences/s": f"{made.rate:,.0f}",
        "limit": made.limit,
        "desk, of a core": f"{made.desk_load:.2f}",
        "weights read, GB/s": f"{made.memory_gbs:.0f}",
        "MiB": f"{made.mib:,.0f}" if made.mib > made.front_ends * FRONT_MIB else "",
    }


def main() -> None:
    """Measure, plan, and write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--sentences", type=int, default=NUM_SENTENCES)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--plan", type=int, nargs="+", default=list(CORES), help="Numbers of cores.")
    parser.add_argument(
        "--front-us", type=float, help="Of a call of one text in a front end; by default what `overhead` has found."
    )
    parser.add_argument("--bulk-us", type=float, help="Of a text in a bulk call there; by default bulk calls are left out.")
    parser.add_argument("--desk-us", type=float, help="Of a request in the desk; by default that of passing it on.")
    parser.add_argument("--quick", action="store_true", help="Few sentences, and nothing is written.")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed")
    num_sentences, num_rounds = (64, 1) if arguments.quick else (arguments.sentences, arguments.rounds)
    about = environment("onnxruntime", "numpy", "pyzmq") | {"kind": processor_kind(), "rounds": num_rounds}
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")[:num_sentences]
    desk = arguments.desk_us or passing_us()
    fronts = {"one text": arguments.front_us or front_us(read_rows("overhead")), "bulk": arguments.bulk_us}
    about |= {"desk_us": round(desk, 1)} | {f"front_us, {calls}": cost for calls, cost in fronts.items()}
    measured, planned = [], []
    for bundle in arguments.bundles:
        found = measure(bundle, texts, num_rounds)
        for calls, cost in fronts.items():
            if cost is None:
                continue
            costs = costs_of(bundle, found, cost, desk)
            planned += [planned_row(bundle.name, calls, plan(cores, costs)) for cores in arguments.plan]
        measured.append(measured_row(bundle.name, found, costs_of(bundle, found, 0.0, desk)))
    if arguments.quick:
        print(*measured, *planned, sep="\n")
        return
    write("capacity", "What a sentence costs an engine, alone and beside another", about, measured, _measured_notes(about))
    write("capacity_plan", "Engines and front ends for a number of cores", about, planned, _planned_notes(about))


def _measured_notes(about: Mapping[str, Any]) -> list[str]:
    return [
        f"Captions of test_2016, greedy, {NUM_SLOTS} at a time, in engines without a server; medians of {about['rounds']} rounds "
        f"in turns on {about['kind']}. Sentences a second are by the clock, and need a machine that does nothing else; \u00b5s are "
        "processor time, which plans are made of: of an engine alone, and of each of two beside each other. Weights read are those "
        "of the decoder by the time of a full step: what an engine would read from memory if nothing stayed in a cache."
    ]


def _planned_notes(about: Mapping[str, Any]) -> list[str]:
    return [
        f"Arithmetic, not a measurement, on the figures of {about['kind']} in `capacity`: docs/scaling-up.md has the formula, and "
        f"what is not in it. A request costs the desk {about['desk_us']} \u00b5s, and a front end {about['front_us, one text']} "
        "\u00b5s as a call of its own."
    ]


if __name__ == "__main__":
    main()
