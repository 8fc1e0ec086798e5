"""What the server costs around the model: requests a second beside those of a server that does nothing.

    python -m benchmarks.overhead --data data/multi30k [--source ../older] [--quick]

`dragoman serve` with a small model, and a bare grpc.aio server with the same protocol that answers with a message of the same size
(see `benchmarks.harness.noop`); the same sender, in a process of its own on the same cores, keeps 1, 16 and 64 calls under way, and
then 64 requests in messages of 16 on one `GenerateBulk` stream, which the no-op server answers message by message. The sides take
turns; medians of the rounds count. Which process is the busiest says what bounds the requests a second.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import msgspec

from benchmarks.engine_share import Share, measure_share
from benchmarks.engines.table import commit, uniform
from benchmarks.harness.load import Load, Record, run
from benchmarks.harness.models import SHIPPED, bundle_by
from benchmarks.harness.noop import NoopServer
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel, cpu_seconds
from benchmarks.harness.setting import Setting
from benchmarks.overload import percentile
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_lines
from dragoman.v1 import generation_pb2, generation_pb2_grpc

CONCURRENCIES = (1, 16, 64)
BATCH_SIZE, BATCH_CONCURRENCY = 16, 64
MIN_SHARE, MIN_BATCH_SHARE = 0.35, 0.8
SERVED, NOOP, BEFORE = "dragoman", "no-op", "before"
UNARY, BATCH = "a call each", f"{BATCH_SIZE} in a message"
SAMPLE_TEXTS = 50
SHARE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Round:
    """What one side did in one turn.

    Attributes:
        rate: Answers a second.
        seconds: Latencies, rising.
        cpu_seconds: Processor time of each process, by its name.
        wall_seconds: How long the turn was.
    """

    rate: float
    seconds: list[float]
    cpu_seconds: Mapping[str, float]
    wall_seconds: float

    @property
    def num_answers(self) -> int:
        """Calls of the turn."""
        return len(self.seconds)


def summarise(record: Record, cpu: Mapping[str, float]) -> Round:
    """Count what came of one turn.

    Raises:
        RuntimeError: If a call was not answered, or there was none.
    """
    codes = Counter(outcome.code for outcome in record.outcomes)
    if set(codes) != {"OK"}:
        raise RuntimeError(f"every call should be answered: {dict(codes)}")
    seconds = sorted(outcome.ended - outcome.sent for outcome in record.outcomes)
    wall = max(outcome.ended for outcome in record.outcomes) - min(outcome.sent for outcome in record.outcomes)
    return Round(len(seconds) / wall, seconds, {"sender": record.cpu_seconds, **cpu}, wall)


def turn(address: str, pids: Mapping[str, Sequence[int]], load: Load) -> Round:
    """Put one closed load on a side."""
    before = {name: cpu_seconds(*own) for name, own in pids.items()}
    record = run(msgspec.structs.replace(load, address=address))
    return summarise(record, {name: cpu_seconds(*own) - before[name] for name, own in pids.items()})


def row(load: Load, found: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Return the figures of one load for the table; of each process its time a request, and its share of a core."""
    served, noop = found[SERVED], found[NOOP]
    rate, noop_rate = (median(each.rate for each in rounds) for rounds in (served, noop))
    line: dict[str, Any] = {
        "requests": BATCH if load.batch_size else UNARY,
        "concurrency": load.concurrency,
        f"{SERVED}/s": round(rate, 1),
        f"{NOOP}/s": round(noop_rate, 1),
        "share": round(rate / noop_rate, 3),
    }
    for side, rounds in ((SERVED, served), (NOOP, noop)):
        for percent in (50, 99):
            line[f"{side} p{percent} ms"] = round(median(percentile(each.seconds, percent) for each in rounds) * 1000, 2)
    for side, rounds in ((SERVED, served), (NOOP, noop)):
        for name in rounds[0].cpu_seconds:
            line[f"{side}: {name} µs"] = round(median(each.cpu_seconds[name] / each.num_answers for each in rounds) * 1e6)
    line["busiest"] = busiest(served)
    if BEFORE in found:
        before = median(each.rate for each in found[BEFORE])
        line |= {f"{BEFORE}/s": round(before, 1), f"{BEFORE}: share": round(before / noop_rate, 3)}
    return line


def busiest(rounds: Sequence[Round]) -> str:
    """Return the process that used the most of a core, and how much."""
    shares = {name: median(each.cpu_seconds[name] / each.wall_seconds for each in rounds) for name in rounds[0].cpu_seconds}
    name = max(shares, key=lambda name: shares[name])
    return f"{name} {shares[name]:.2f}"


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say whether the targets were met: with calls at the concurrency with the most requests a second, and in batches."""
    found = []
    for kind, least in ((UNARY, MIN_SHARE), (BATCH, MIN_BATCH_SHARE)):
        own = [line for line in rows if line["requests"] == kind]
        if own:
            best = max(own, key=lambda line: float(line[f"{SERVED}/s"]))
            word = "kept" if best["share"] >= least else "MISSED"
            where = f"{kind}, concurrency {best['concurrency']}"
            found.append(f"- {word}: {best['share']:.1%} of the no-op server's requests a second, {where} (at least {least:.0%})")
    return found


def front_end_share(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of each way what the no-op server's processor time for a request is of the front end's: what is left of Python."""
    found = {line["requests"]: line[f"{NOOP}: server µs"] / line[f"{SERVED}: front end µs"] for line in rows}
    told = "the no-op server's processor time for a request is"
    return [f"- {kind}: {told} {share:.1%} of the front end's" for kind, share in found.items()]


def describe(share: Share) -> str:
    """Say where a full step's time goes."""
    outside = 1 - share.share_inside
    return (
        f"- of a step with {share.num_rows} rows ({share.step_seconds * 1000:.2f} ms), {outside:.1%} is spent outside ONNX Runtime"
    )


def typical_answer(address: str, texts: Sequence[str]) -> generation_pb2.GenerateResponse:
    """Return the answer of median size to the first texts."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        answers = [stub.Generate(generation_pb2.GenerateRequest(text=text, num_beams=1)) for text in texts[:SAMPLE_TEXTS]]
    answers.sort(key=lambda answer: answer.ByteSize())
    answer: generation_pb2.GenerateResponse = answers[len(answers) // 2]
    return answer


def measure(servers: Mapping[str, ServedModel], noop: NoopServer, loads: Sequence[Load], num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each load; all servers run all the time, and one of them works at a time."""
    sides = {name: (server.address, server.processes()) for name, server in servers.items()}
    sides[NOOP] = noop.address, {"server": [noop.pid]}
    rows = []
    for load in loads:
        # A checkout without GenerateBulk takes part in calls only.
        taking_part = {name: side for name, side in sides.items() if not (load.batch_size and name == BEFORE)}
        rounds: dict[str, list[Round]] = {side: [] for side in taking_part}
        for number in range(num_rounds + 1):
            for side, (address, pids) in taking_part.items():
                done = turn(address, pids, load)
                if number:  # the first round warms up
                    rounds[side].append(done)
        rows.append(row(load, rounds))
        print(rows[-1], flush=True)
    return rows


def start(stack: ExitStack, arguments: argparse.Namespace, texts: Sequence[str]) -> tuple[dict[str, ServedModel], NoopServer]:
    """Start every server."""
    setting = Setting(arguments.replicas, arguments.threads, arguments.slots, arguments.front_ends)
    servers = {SERVED: stack.enter_context(ServedModel(arguments.bundle, *setting.flags()))}
    if arguments.source:
        source = arguments.source.resolve()
        bundle = arguments.source_bundle or bundle_by(source, Checkpoint.load(SHIPPED), arguments.cache)
        flags = Setting(1, arguments.threads, arguments.slots).flags(source)
        servers[BEFORE] = stack.enter_context(ServedModel(bundle, *flags, source=source))
    return servers, stack.enter_context(NoopServer(typical_answer(servers[SERVED].address, texts)))


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--threads", type=int, default=1, help="Of each engine.")
    parser.add_argument("--replicas", type=int, default=1, help="Engines.")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--slots", type=int, default=64, help="Of each engine.")
    parser.add_argument("--source", type=Path, help="Older checkout whose server takes part, with a bundle of the shipped en-de.")
    parser.add_argument("--source-bundle", type=Path, help="Its bundle, where there is one already.")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="Of each side's turn.")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--quick", action="store_true", help="One round of a second each, and nothing is written.")
    arguments = parser.parse_args()
    num_rounds, seconds = (1, 1.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    loads = [Load("", texts, 1, seconds, concurrency=count) for count in arguments.concurrency]
    loads.append(Load("", texts, 1, seconds, concurrency=BATCH_CONCURRENCY, batch_size=BATCH_SIZE))
    with ExitStack() as stack:
        rows = uniform(measure(*start(stack, arguments, texts), loads, num_rounds))
    about = environment("onnxruntime", "grpcio", "pyzmq") | {
        "bundle": arguments.bundle.name,
        "threads": arguments.threads,
        "replicas": arguments.replicas,
        "front_ends": arguments.front_ends,
        "commit": commit(),
        "rounds": num_rounds,
        "seconds": seconds,
    }
    share = measure_share(arguments.bundle, SHARE_ROWS, arguments.threads, 2 if arguments.quick else num_rounds)
    if arguments.quick:
        print(describe(share), *verdicts(rows), *front_end_share(rows), sep="\n")
        return
    notes = [
        f"`{arguments.bundle.name}`, {arguments.replicas} engines of {arguments.threads} threads, {arguments.front_ends} front "
        f"ends, greedy, real captions, closed loop; medians of {num_rounds} rounds of {seconds:g} s a side, "
        "in turns, sender and servers on the same cores. µs are processor time a request, of all threads of a process; `busiest` "
        "is the process that used the most of a core while dragoman worked. The no-op server runs no model.",
        "",
        *verdicts(rows),
        *front_end_share(rows),
        describe(share),
    ]
    if arguments.source:
        notes[0] += f" `{BEFORE}` is the server of commit {commit(arguments.source)} with one engine and one front end."
    write(
        "overhead", "Requests a second beside a server that does nothing", about | {"share_inside": share.share_inside}, rows, notes
    )


if __name__ == "__main__":
    main()
