"""Cost of the frontend: throughput, latency and processor time by protocol, beside a server with a fixed answer, and in process.

    python -m benchmarks.frontend [--parts noop protocols latency] [--source ../older] [--quick]

`noop`: unary calls and `GenerateBulk` beside a bare grpc.aio server that returns one message made beforehand. `protocols`: the same
requests by every protocol, and by gRPC to a server without HTTP. `latency`: one request at a time, in process and through gRPC.
One sender, in a process of its own on the same cores, keeps 1, 16 and 64 requests in flight; sides take turns, in another order
each round. With `--source` the server of another checkout takes part in `noop`.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from benchmarks.harness.actor import Actor
from benchmarks.harness.load import BATCH, BULK, GRPC, HTTP, OIP_GRPC, OIP_REST, Load, Record, Sender, percentile
from benchmarks.harness.models import add_model_options, bundle_by, checkpoint_of, chosen_bundle
from benchmarks.harness.noop import NoopServer
from benchmarks.harness.page import Page, commit, output, parser
from benchmarks.harness.processes import ENGINE, FRONTEND, Dragoman, Setting, dragoman
from dragoman.model.corpus import read_lines
from dragoman.v1.generation_pb2 import GenerateRequest, GenerateResponse
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.loop import Loop
from tests.system.harness.server import cpu_seconds

PARTS = {
    "noop": "Beside a server that does nothing",
    "protocols": "By protocol",
    "latency": "One request, in process and through the frontend",
}
CONCURRENCIES, BATCH_SIZE = (1, 16, 64), 16
SAMPLE_TEXTS, REQUESTS_A_ROUND, MAX_NEW_TOKENS = 50, 10, 64
TEXT = "A man in a blue shirt is standing on a ladder cleaning a window."
Cpu = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Side:
    """A protocol of a running server."""

    name: str  # name in the table
    protocol: str  # protocol of `load`
    run: Callable[[Load], tuple[Record, Cpu]]  # sends a load; returns its record and the processor seconds of each process

    def supports(self, load: Load) -> bool:
        """Return whether the protocol supports the load: only streams have several requests in a message."""
        return self.protocol != BULK or load.concurrency >= load.batch_size


def side(name: str, server: Dragoman, protocol: str) -> Side:
    """Return the side of a protocol of the server under test."""
    return Side(name, protocol, lambda load: server.run(load, protocol))


def noop_side(name: str, server: NoopServer, protocol: str, stack: ExitStack) -> Side:
    """Return the side of a protocol of the server with a fixed answer."""
    sender = stack.enter_context(Actor(Sender, protocol, server.address))

    def run(load: Load) -> tuple[Record, Cpu]:
        before = cpu_seconds(server.pid)
        record: Record = sender.call("run", load)
        return record, {"sender": record.cpu_seconds, FRONTEND: cpu_seconds(server.pid) - before}

    return Side(name, protocol, run)


def measure(sides: Sequence[Side], loads: Sequence[Load], num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each load and side: medians of rounds, ratios to the first side in the same round."""
    rows = []
    for load in loads:
        own = [each for each in sides if each.supports(load)]
        found: dict[str, list[tuple[Record, Cpu]]] = {each.name: [] for each in own}
        for number in range(num_rounds + 1):
            start = number % len(own)
            for each in own[start:] + own[:start]:
                record, cpu = each.run(load)
                if number:  # the first round warms up
                    found[each.name].append((record.check(), cpu))
        base = [record.rate for record, _ in found[own[0].name]]
        rows += [{"callers": load.concurrency, "side": name} | figures(runs, base, own[0].name) for name, runs in found.items()]
        print(*rows[-len(own) :], sep="\n", flush=True)
    return rows


def figures(runs: Sequence[tuple[Record, Cpu]], base: Sequence[float], base_name: str) -> dict[str, Any]:
    """Return the figures of one side: rate, ratio, latencies, and µs of processor time a request by process."""
    rates = [record.rate for record, _ in runs]
    row: dict[str, Any] = {"requests/s": f"{median(rates):.1f}"}
    row[f"÷ {base_name}"] = f"{median(rate / other for rate, other in zip(rates, base, strict=True)):.3f}"
    for percent in (50, 99):
        row[f"p{percent} ms"] = f"{1000 * median(percentile(record.latencies(), percent) for record, _ in runs):.2f}"
    for process in ("sender", FRONTEND, ENGINE):
        used = [1e6 * cpu[process] / len(record.outcomes) for record, cpu in runs if process in cpu]
        row[f"{process} µs"] = f"{median(used):.0f}" if used else ""
    return row


def typical_answer(address: str, texts: Sequence[str]) -> GenerateResponse:
    """Return the answer of median size to the first texts."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]
        answers = [stub.Generate(GenerateRequest(text=text, num_beams=1)) for text in texts[:SAMPLE_TEXTS]]
    found: GenerateResponse = sorted(answers, key=lambda answer: answer.ByteSize())[len(answers) // 2]
    return found


def noop(arguments: argparse.Namespace, bundle: Path, setting: Setting, loads: Sequence[Load]) -> list[dict[str, Any]]:
    """Measure the server beside the one with a fixed answer."""
    with ExitStack() as stack:
        server = stack.enter_context(dragoman(bundle, *setting.flags()))
        nothing = stack.enter_context(NoopServer(typical_answer(server.address(), loads[0].texts)))
        sides = [noop_side(f"no-op, {protocol}", nothing, protocol, stack) for protocol in (GRPC, BULK)]
        sides += [side(f"dragoman, {protocol}", server, protocol) for protocol in (GRPC, BULK)]
        if arguments.source:
            source = arguments.source.resolve()
            older = bundle_by(source, checkpoint_of(arguments.model), arguments.cache, arguments.precision)
            before = stack.enter_context(dragoman(older, *setting.flags(), source=source))
            sides += [side(f"{commit(source)}, {protocol}", before, protocol) for protocol in (GRPC, BULK)]
        return measure(sides, loads, arguments.rounds)


def protocols(arguments: argparse.Namespace, bundle: Path, setting: Setting, loads: Sequence[Load]) -> list[dict[str, Any]]:
    """Check that all protocols have equal answers, then measure them in turns."""
    with ExitStack() as stack:
        plain = stack.enter_context(dragoman(bundle, *setting.flags()))
        server = stack.enter_context(dragoman(bundle, *setting.flags(), has_http=True))
        check = Load(loads[0].texts[:20], keeps_answers=True)
        unary = (GRPC, OIP_GRPC, HTTP, OIP_REST)
        answers = [[outcome.answer[0] for outcome in server.run(check, protocol)[0].check().outcomes] for protocol in unary]
        if any(own != answers[0] for own in answers):
            raise RuntimeError("the protocols do not give the same answers")
        sides = [side("gRPC, HTTP off", plain, GRPC)]
        sides += [side(protocol, server, protocol) for protocol in (GRPC, BATCH, BULK, OIP_GRPC, HTTP, OIP_REST)]
        return measure(sides, loads, arguments.rounds)


def latency(arguments: argparse.Namespace, bundle: Path, setting: Setting) -> list[dict[str, Any]]:
    """Measure one request at a time, in process and through gRPC, in turns."""
    local = Loop(bundle, setting.slots, setting.threads)
    source = local.source(TEXT)
    load = Load([TEXT] * REQUESTS_A_ROUND, max_new_tokens=MAX_NEW_TOKENS, keeps_answers=True)
    direct, served, num_tokens = [], [], 0
    with dragoman(bundle, *setting.flags()) as server:
        for number in range(3 * arguments.rounds + 1):
            begun = [time.perf_counter()]
            for _ in range(REQUESTS_A_ROUND):
                local.decode([source], MAX_NEW_TOKENS)
                begun.append(time.perf_counter())
            record = server.run(load)[0].check()
            if number:
                direct += [end - start for start, end in pairwise(begun)]
                served += record.latencies()
            num_tokens = len(record.outcomes[0].answer[1])
    in_process, through = 1000 * median(direct), 1000 * median(served)
    row = {"in process, p50 ms": f"{in_process:.3f}", "gRPC, p50 ms": f"{through:.3f}"}
    return [row | {"added, ms": f"{through - in_process:.3f}", "tokens": num_tokens}]


def main() -> None:
    """Measure the parts and write them."""
    found = parser(__doc__)
    add_model_options(found)
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--threads", type=int, default=1, help="Of each engine.")
    found.add_argument("--replicas", type=int, default=1, help="Engines.")
    found.add_argument("--frontends", type=int, default=1)
    found.add_argument("--source", type=Path, help="Another checkout, whose server takes part with a bundle by its own exporter.")
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument("--seconds", type=float, default=4.0, help="Of each turn.")
    arguments = found.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.5
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    loads = [Load(texts, arguments.seconds, concurrency=count, batch_size=BATCH_SIZE) for count in CONCURRENCIES]
    setting = Setting(arguments.replicas, arguments.threads, 64, arguments.frontends)
    bundle = chosen_bundle(arguments)
    page = Page("frontend", "Cost of the frontend", output(arguments), ("onnxruntime", "grpcio", "aiohttp", "pyzmq"))
    note = (
        f"`{bundle.name}`, {setting}, greedy, captions of test_2016; medians of {arguments.rounds} rounds of "
        f"{arguments.seconds:g} s a side, in turns, sender and servers on the same cores. µs are processor time a request, of all "
        f"threads of a process. Messages of `GenerateBulk` have {BATCH_SIZE} requests."
    )
    for part in arguments.parts:
        if part == "latency":
            count = 3 * arguments.rounds * REQUESTS_A_ROUND
            note = f"`{bundle.name}`, {setting}, greedy; {count} requests on each side, one at a time, in turns."
            page.write(PARTS[part], latency(arguments, bundle, setting), [note])
        else:
            page.write(PARTS[part], (noop if part == "noop" else protocols)(arguments, bundle, setting, loads), [note])


if __name__ == "__main__":
    main()
