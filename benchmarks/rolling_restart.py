"""What callers with retries notice when three servers are restarted one after another, and when one is killed: nothing.

    python -m benchmarks.rolling_restart --data data/multi30k [--quick]

Three servers behind a client that balances call by call, and behind HAProxy, under an open-loop load of unary calls and streams
from `dragoman load`, whose report the figures are from. Each server in turn gets SIGTERM and is started again; then one gets
SIGKILL.
The exit code is 1 if a promise was not kept.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.haproxy import HAProxy, find_haproxy
from benchmarks.harness.load_command import LoadCommand
from benchmarks.harness.replica import Replica
from benchmarks.harness.report import environment, write
from dragoman.load.result import Result
from dragoman.load.scrape import parse, read_url
from dragoman.model.corpus import read_lines

NUM_REPLICAS = 3
ROLLING, KILLED = "rolling restart", "kill -9"
# A stream that has begun to come is not asked for again. A proxy ends it without a status, which gRPC's client calls UNKNOWN.
CUT = ("UNAVAILABLE", "UNKNOWN")


@dataclass(frozen=True, slots=True)
class Phase:
    """What came of one event.

    Attributes:
        path: How callers reach the servers.
        event: What happened to them.
        result: The load generator's report.
        start_seconds: How long each start took, until the server served.
        exit_codes: Of the servers that were told to end.
    """

    path: str
    event: str
    result: Result
    start_seconds: list[float]
    exit_codes: list[int]

    def failures(self, kind: str) -> dict[str, int]:
        """Return the failures of unary calls, or of streams, by status."""
        group = self.result.groups.get(kind)
        return dict(group.counts.failures) if group is not None else {}

    def row(self) -> dict[str, Any]:
        """Return the figures for the table."""
        total, unary, stream = self.result.total, self.result.groups["unary"], self.result.groups["stream"]
        times = total.times["e2e"].percentiles
        return {
            "path": self.path,
            "event": self.event,
            "seconds": f"{self.result.counted_seconds:.0f}",
            "unary": unary.counts.num,
            "failed": _listed(self.failures("unary")),
            "streams": stream.counts.num,
            "streams failed": _listed(self.failures("stream")),
            "retries": total.counts.num_retries,
            "p50 ms": _milliseconds(times["p50"]),
            "p99 ms": _milliseconds(times["p99"]),
            "max ms": _milliseconds(times["max"]),
        }


def verdicts(phases: Sequence[Phase]) -> list[tuple[bool, str]]:
    """Say of each promise whether it was kept."""
    found = []
    for phase in phases:
        unary, streams = phase.failures("unary"), phase.failures("stream")
        where = f"{phase.path}, {phase.event}"
        found.append((not unary and phase.result.groups["unary"].counts.num > 0, f"{where}: unary calls failed: {_listed(unary)}"))
        if phase.event == ROLLING:
            found.append((not streams, f"{where}: streams failed: {_listed(streams)}"))
            codes = f"exit codes {', '.join(map(str, phase.exit_codes))}"
            found.append((phase.exit_codes == [0] * NUM_REPLICAS, f"{where}: {codes}"))
        else:
            text = f"{where}: streams that ended otherwise than cut off after they had begun"
            others = {code: count for code, count in streams.items() if code not in CUT}
            found.append((not others, f"{text}: {_listed(others)} (cut off: {sum(streams.get(code, 0) for code in CUT)})"))
    return found


class Drill:
    """Three servers, and what is done to them under load.

    Args:
        replicas: The servers, running.
        flags: Of `dragoman load`, but for the server.
        pause_seconds: Between two events, and before the first and after the last.
    """

    def __init__(self, replicas: Sequence[Replica], flags: Sequence[str], pause_seconds: float) -> None:
        self._replicas, self._flags, self._pause_seconds = replicas, flags, pause_seconds

    def run(self, path: str, target: str) -> list[Phase]:
        """Go through both events; every server runs again afterwards."""
        return [self._phase(path, target, ROLLING, self._restart_all), self._phase(path, target, KILLED, self._kill_one)]

    def _phase(self, path: str, target: str, event: str, happen: Callable[[list[float], list[int]], None]) -> Phase:
        starts: list[float] = []
        codes: list[int] = []
        before = self._num_answered()
        with LoadCommand(f"--server={target}", *self._flags) as load:
            while load.is_running and self._num_answered() <= before:  # its processes take a while to start
                time.sleep(0.1)
            time.sleep(self._pause_seconds)
            happen(starts, codes)
            time.sleep(self._pause_seconds)
            if not load.is_running:
                raise RuntimeError("the load ended before its time; give it a longer --seconds")
            result = load.stop()
        return Phase(path, event, result, starts, codes)

    def _num_answered(self) -> float:
        """Return the answers that all servers together have given since they were started."""
        texts = [read_url(f"http://{replica.metrics_address}/metrics") for replica in self._replicas]
        return sum(parse(text).get("dragoman_request_success_total", 0.0) for text in texts)

    def _restart_all(self, starts: list[float], codes: list[int]) -> None:
        for replica in self._replicas:
            codes.append(replica.terminate())
            starts.append(replica.start())
            time.sleep(self._pause_seconds)

    def _kill_one(self, starts: list[float], codes: list[int]) -> None:
        self._replicas[0].kill()
        time.sleep(2 * self._pause_seconds)
        starts.append(self._replicas[0].start())


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(counts.items())) or "0"


def _milliseconds(seconds: float | None) -> str:
    return "—" if seconds is None else f"{seconds * 1000:.0f}"


def load_flags(texts: Path, rate: float, stream_share: float, seconds: float) -> list[str]:
    """Return the options of the load: retries are those that the client makes by default."""
    mix = f"unary={1 - stream_share:g},stream={stream_share:g}"
    lengths = ["--join=3", "--min-new-tokens=40"]  # streams long enough to be met in the middle
    return [f"--rate={rate:g}", f"--in={texts}", f"--mix={mix}", *lengths, "--retries=4", f"--duration={seconds:g}", "--warmup=1"]


def main() -> None:
    """Drill and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--rate", type=float, default=30.0, help="Calls a second.")
    parser.add_argument("--stream-share", type=float, default=0.4)
    parser.add_argument("--pause", type=float, default=5.0, help="Seconds between two events.")
    parser.add_argument("--seconds", type=float, default=600.0, help="A load may last at the most.")
    parser.add_argument("--quick", action="store_true", help="Short pauses; figures mean nothing.")
    arguments = parser.parse_args()
    pause = 1.5 if arguments.quick else arguments.pause
    phases: list[Phase] = []
    notes = []
    about = environment("onnxruntime", "grpcio") | {"rate": arguments.rate, "stream_share": arguments.stream_share}
    with ExitStack() as stack:
        texts = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "texts"
        texts.write_text("\n".join(read_lines(arguments.data / "test_2016_flickr.en.gz")) + "\n", encoding="utf-8")
        replicas = [stack.enter_context(Replica(arguments.bundle, "--num-threads=1")) for _ in range(NUM_REPLICAS)]
        for replica in replicas:
            replica.start()
        drill = Drill(replicas, load_flags(texts, arguments.rate, arguments.stream_share, arguments.seconds), pause)
        phases += drill.run("round_robin", ",".join(replica.address for replica in replicas))
        program = find_haproxy()
        with nullcontext() if program is None else HAProxy(program, replicas) as proxy:
            if proxy is None:
                notes += ["HAProxy is not installed: not tried.", ""]
            else:
                about["haproxy"] = proxy.version()
                phases += drill.run("haproxy", proxy.address)
    promises = verdicts(phases)
    starts = [seconds for phase in phases for seconds in phase.start_seconds]
    about["reports"] = [{"path": p.path, "event": p.event, "start_seconds": p.start_seconds} | _report(p.result) for p in phases]
    notes += [
        f"`{arguments.bundle.name}` on {NUM_REPLICAS} servers of one thread, {arguments.rate:g} calls/s as a Poisson process, "
        f"{arguments.stream_share:.0%} of them streams, at most 4 retries a call; servers and sender on the same cores. A start "
        f"took {min(starts):.1f} to {max(starts):.1f} s. Latency counts from when a call was due and has waits and retries in it.",
        "",
        *(f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises),
    ]
    write("rolling_restart", "Rolling restart and sudden death", about, [phase.row() for phase in phases], notes)
    sys.exit(not all(is_kept for is_kept, _ in promises))


def _report(result: Result) -> dict[str, Any]:
    """Return of a report what stands for its figures, without time lines and histograms."""
    groups = {
        name: {
            "num": group.counts.num,
            "num_ok": group.counts.num_ok,
            "num_retries": group.counts.num_retries,
            "failures": group.counts.failures,
            "e2e": group.times["e2e"].percentiles if "e2e" in group.times else {},
        }
        for name, group in result.groups.items()
    }
    return {"settings": result.settings, "seconds": result.seconds, "groups": groups, "warnings": result.warnings}


if __name__ == "__main__":
    main()
