"""A server under overload: arrivals at 1, 2 and 5 times its capacity.

    python -m benchmarks.overload [--model en-de-base --precision int8] [--replicas 2 --frontends 2] [--seconds 60]

A real server with one model and a short queue, and the load from a process of its own on the same machine. Capacity is measured
first, with callers that wait for their answers; then requests arrive as a Poisson process, regardless of answers. Latency counts
from when a request was due, so that a late sender hides nothing. There are no retries and no deadlines.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.load import REJECTED, Load, Record, percentile
from benchmarks.harness.models import add_model_options, chosen_bundle
from benchmarks.harness.page import Page, output, parser
from benchmarks.harness.processes import ENGINE, FRONTEND, Dragoman, Setting, dragoman
from dragoman.model.corpus import read_lines

LOADS = (1, 2, 5)
MIN_COMPLETED, MAX_REJECTION_SECONDS = 0.9, 0.05


@dataclass(frozen=True, slots=True)
class Overload:
    """One load and its outcomes."""

    factor: float  # arrivals by capacity
    seconds: float  # how long requests arrived
    record: Record  # of the sender
    cores: Mapping[str, float]  # processor time over wall time by process

    @property
    def completed(self) -> float:
        """Answers a second while requests arrived."""
        return sum(outcome.code == "OK" and outcome.ended <= self.seconds for outcome in self.record.outcomes) / self.seconds

    @property
    def num_lost(self) -> int:
        """Requests neither answered nor refused."""
        return len(self.record.outcomes) - self.record.codes["OK"] - self.record.codes[REJECTED]

    def row(self, first: "Overload") -> dict[str, Any]:
        """Return the row of the table."""
        codes, outcomes = self.record.codes, self.record.outcomes
        accepted, refused = self.record.latencies(), self.record.latencies(REJECTED)
        late = sorted(outcome.sent - outcome.due for outcome in outcomes)
        return {
            "load": f"{self.factor:g}×",
            "offered/s": f"{len(outcomes) / self.seconds:.1f}",
            "completed/s": f"{self.completed:.1f}",
            "of 1×": f"{self.completed / first.completed:.1%}",
            "rejected/s": f"{codes[REJECTED] / self.seconds:.1f}",
            "lost": self.num_lost,
            "accepted p50 ms": _ms(accepted, 50),
            "p95 ms": _ms(accepted, 95),
            "p99 ms": _ms(accepted, 99),
            "rejection p50 ms": _ms(refused, 50),
            "rejection p99 ms": _ms(refused, 99),
            "sent late p99 ms": _ms(late, 99),
            "cores: sender": f"{self.cores['sender']:.2f}",
            FRONTEND: f"{self.cores[FRONTEND]:.2f}",
            ENGINE: f"{self.cores[ENGINE]:.2f}",
        }


def verdicts(found: Sequence[Overload], bound_seconds: float) -> list[str]:
    """Return a line for each promise, kept or not; `bound_seconds` is the longest time of an accepted request."""
    first, last = found[0], found[-1]
    share = last.completed / first.completed
    accepted, rejection = (
        max((percentile(seconds, 99) for each in found if (seconds := each.record.latencies(code))), default=0.0)
        for code in ("OK", REJECTED)
    )
    num_lost = sum(each.num_lost for each in found)
    most = f"p99 {rejection * 1000:.1f} ms at the worst load (at most {MAX_REJECTION_SECONDS * 1000:.0f} ms)"
    bound = f"at most {bound_seconds * 1000:.0f} ms, twice what a full queue and full slots take at capacity"
    promises = [
        (share >= MIN_COMPLETED, f"completed at {last.factor:g}×: {share:.1%} of 1× (at least {MIN_COMPLETED:.0%})"),
        (rejection <= MAX_REJECTION_SECONDS, f"rejections: {most}"),
        (not num_lost, f"requests neither answered nor refused: {num_lost} (none)"),
        (accepted <= bound_seconds, f"accepted: p99 {accepted * 1000:.0f} ms at the worst load ({bound})"),
    ]
    return [f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises]


def capacity(server: Dragoman, load: Load) -> float:
    """Return answers a second in a closed loop, without the first fifth of the time."""
    outcomes = server.run(load)[0].check().outcomes
    return sum(load.seconds / 5 <= outcome.ended <= load.seconds for outcome in outcomes) / (load.seconds * 4 / 5)


def measure(server: Dragoman, load: Load, factor: float) -> Overload:
    """Send one load."""
    record, cpu = server.run(load)
    return Overload(factor, load.seconds, record, {name: used / record.wall_seconds for name, used in cpu.items()})


def _ms(rising: Sequence[float], percent: int) -> str:
    return f"{percentile(rising, percent) * 1000:.1f}" if rising else "—"


def main() -> None:
    """Measure and write the part of this bundle and setting."""
    found = parser(__doc__)
    add_model_options(found)
    found.add_argument("--num-beams", type=int, default=4)
    found.add_argument("--seconds", type=float, default=60.0, help="Of each load.")
    found.add_argument("--max-slots", type=int, default=64, help="Of all engines.")
    found.add_argument("--max-waiting-requests", type=int, default=64)
    found.add_argument("--threads", type=int, default=1, help="Of each engine.")
    found.add_argument("--replicas", type=int, default=1, help="Engines.")
    found.add_argument("--frontends", type=int, default=1)
    arguments = found.parse_args()
    seconds = 2.0 if arguments.quick else arguments.seconds
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    num_beams, num_waiting = arguments.num_beams, arguments.max_waiting_requests
    num_running = arguments.max_slots // num_beams
    setting = Setting(arguments.replicas, arguments.threads, arguments.max_slots // arguments.replicas, arguments.frontends)
    bundle = chosen_bundle(arguments)
    callers = num_running + num_waiting // 2
    with dragoman(bundle, *setting.flags(), f"--max-waiting-requests={num_waiting}") as server:
        waiting = Load(texts, max(2.0, seconds / 3), concurrency=callers, num_beams=num_beams)
        most = capacity(server, waiting)
        loads = {factor: Load(texts, seconds, factor * most, seed=factor, num_beams=num_beams) for factor in LOADS}
        results = [measure(server, load, factor) for factor, load in loads.items()]
    codes = sum((result.record.codes for result in results), Counter[str]())
    notes = [
        f"`{bundle.name}`, beam {num_beams}, {setting}, a queue of {num_waiting} requests; capacity {most:.1f} requests/s, with "
        f"{callers} callers. {seconds:g} s of each load, sender and server on the same cores. Latency counts from when a request "
        "was due; `lost` are requests neither answered nor refused; `cores` is processor time over wall time. Statuses: "
        f"{', '.join(f'{code} {count}' for code, count in sorted(codes.items()))}.",
        "\n".join(verdicts(results, 2 * (num_waiting + num_running) / most)),
    ]
    part = f"{bundle.name}, {setting}"
    page = Page("overload", "Arrivals beyond capacity", output(arguments), ("onnxruntime", "grpcio"))
    page.write(part, [result.row(results[0]) for result in results], notes)


if __name__ == "__main__":
    main()
