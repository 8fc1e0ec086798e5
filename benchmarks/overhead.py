"""What the server costs around the model: requests a second beside those of a server that does nothing.

    python -m benchmarks.overhead --data data/multi30k [--quick]

`dragoman serve` with a small model, and a bare grpc.aio server with the same protocol that answers with a message of the same size
(see `benchmarks.harness.noop`); the same sender, in a process of its own on the same cores, keeps 1, 16 and 64 calls under way. The
sides take turns; medians of the rounds count. Which process is the busiest says what bounds the requests a second.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from benchmarks.engine_share import Share, measure_share
from benchmarks.harness.load import Load, Record, run
from benchmarks.harness.noop import NoopServer
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel, cpu_seconds
from benchmarks.overload import percentile
from dragoman.model.corpus import read_lines
from dragoman.v1 import generation_pb2, generation_pb2_grpc

CONCURRENCIES = (1, 16, 64)
MIN_SHARE = 0.5
SERVED, NOOP = "dragoman", "no-op"
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


def turn(address: str, pids: Mapping[str, int], texts: list[str], seconds: float, concurrency: int) -> Round:
    """Put one closed load on a side."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    record = run(Load(address, texts, 1, seconds, concurrency=concurrency))
    return summarise(record, {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()})


def row(concurrency: int, served: Sequence[Round], noop: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of one concurrency for the table; of each process its time a request, and its share of a core."""
    rate, noop_rate = (median(each.rate for each in rounds) for rounds in (served, noop))
    line: dict[str, Any] = {
        "concurrency": concurrency,
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
    return line


def busiest(rounds: Sequence[Round]) -> str:
    """Return the process that used the most of a core, and how much."""
    shares = {name: median(each.cpu_seconds[name] / each.wall_seconds for each in rounds) for name in rounds[0].cpu_seconds}
    name = max(shares, key=lambda name: shares[name])
    return f"{name} {shares[name]:.2f}"


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say whether the target was met: at the concurrency with the most requests a second, where throughput is what counts."""
    best = max(rows, key=lambda line: float(line[f"{SERVED}/s"]))
    word = "kept" if best["share"] >= MIN_SHARE else "MISSED"
    where = f"at concurrency {best['concurrency']}"
    return f"- {word}: {best['share']:.1%} of the no-op server's requests a second {where} (at least {MIN_SHARE:.0%})"


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


def measure(
    bundle: Path, texts: list[str], flags: Sequence[str], concurrencies: Sequence[int], num_rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each concurrency; both servers run all the time, and one of them works at a time."""
    with ServedModel(bundle, *flags) as server, NoopServer(typical_answer(server.address, texts)) as noop:
        sides = {
            SERVED: (server.address, {"front end": server.front_pid, "engine": server.engine_pid}),
            NOOP: (noop.address, {"server": noop.pid}),
        }
        rows = []
        for concurrency in concurrencies:
            rounds: dict[str, list[Round]] = {side: [] for side in sides}
            for number in range(num_rounds + 1):
                for side, (address, pids) in sides.items():
                    done = turn(address, pids, texts, seconds, concurrency)
                    if number:  # the first round warms up
                        rounds[side].append(done)
            rows.append(row(concurrency, rounds[SERVED], rounds[NOOP]))
        return rows


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--threads", type=int, default=1, help="Of the engine; 0 leaves it to the server.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="Of each side's turn.")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--quick", action="store_true", help="One round of a second each, and nothing is written.")
    arguments = parser.parse_args()
    num_rounds, seconds = (1, 1.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    flags = [f"--num-threads={arguments.threads}"]
    rows = measure(arguments.bundle, texts, flags, arguments.concurrency, num_rounds, seconds)
    about = environment("onnxruntime", "grpcio", "pyzmq") | {
        "bundle": arguments.bundle.name,
        "threads": arguments.threads,
        "rounds": num_rounds,
        "seconds": seconds,
    }
    share = measure_share(arguments.bundle, SHARE_ROWS, arguments.threads, 2 if arguments.quick else num_rounds)
    if arguments.quick:
        print(*rows, describe(share), verdict(rows), sep="\n")
        return
    notes = [
        f"`{arguments.bundle.name}`, greedy, real captions, closed loop; medians of {num_rounds} rounds of {seconds:g} s a side, "
        "in turns, sender and servers on the same cores. µs are processor time a request, of all threads of a process; `busiest` "
        "is the process that used the most of a core while dragoman worked. The no-op server runs no model.",
        "",
        verdict(rows),
        describe(share),
    ]
    write(
        "overhead", "Requests a second beside a server that does nothing", about | {"share_inside": share.share_inside}, rows, notes
    )


if __name__ == "__main__":
    main()
