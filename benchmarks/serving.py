"""Goodput of Dragoman and of servers built around CTranslate2.

    python -m benchmarks.serving [--precision int8] [--servers dragoman triton mosec litserve] [--objective-factor 4] [--quick]

`benchmarks/peers/setup.sh .cache/peers` makes the environments of the peers. Captions, and several joined, arrive as a Poisson
process, regardless of answers; all servers have the same weights, cores, arrivals and latency objective. Each peer's settings are
searched for first; then, in rounds, the highest rate at which a server meets the objective. docs/benchmarks.md has the rules.
"""

import argparse
import math
import random
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.load import GRPC, SHARES, Load, Record, mixed_texts, send
from benchmarks.harness.models import bundle_of
from benchmarks.harness.page import Page, output, parser
from benchmarks.harness.processes import dragoman
from benchmarks.harness.widened import widened_checkpoint
from benchmarks.peers.rate_search import (
    GOAL_PERCENT,
    STEP,
    Point,
    RateSearch,
    first_settings,
    latency_settings,
    level_below,
    rate_of,
    summarise,
    tune,
)
from benchmarks.peers.server import KINDS, Kind, PeerServer, Settings
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.model.networks.transformer import transformer_of
from dragoman.model.quality import score
from dragoman.server.system import available_cores

DRAGOMAN = "dragoman"
NAMES = (DRAGOMAN, *(kind.name for kind in KINDS))
NUM_TEXTS, SEED, STRIDE = 2000, 1, 4
OBJECTIVE_FACTOR, MIN_RATIO = 4.0, 2.0
MIN_REQUESTS = 20
"""Minimum requests of a measurement; the lowest rate of a search follows from it."""
CHECK_CONCURRENCY, WARM_CONCURRENCY = 16, 8
CURVE = (-16, -8, 6)
"""Levels relative to the knee that are measured once for the picture."""
MIN_SAME = 0.95
"""Minimum share of equal answers in fp32; ties of two tokens may differ."""


@dataclass(frozen=True, slots=True)
class Size:
    """Durations and counts of the measurement."""

    seconds: float  # of a rate, in a round
    tuning_seconds: float  # of a rate, while settings are searched for; 0 for no search
    warm_seconds: float  # of the load before a measurement
    num_rounds: int  # how often each server is started for its final figures
    num_checked: int  # captions whose translations are compared


FULL, QUICK = Size(10.0, 5.0, 2.0, 3, 200), Size(2.0, 0.0, 0.5, 1, 20)


@dataclass(frozen=True, slots=True)
class Models:
    """The same weights for every server."""

    name: str  # name of the model
    bundle: Path  # dragoman's bundle
    ctranslate2: Path  # folder with the peers' model and the tokeniser
    precision: str  # `fp32` or `int8`


@dataclass(slots=True)
class Contender:
    """A server and its figures so far."""

    kind: Kind | None  # of peer; None for Dragoman
    models: Models  # see there
    environments: Path  # folder of the peers' environments
    flags: Sequence[str] = ()  # of `dragoman serve`
    settings: Settings | None = None  # of a peer
    unloaded_seconds: float = 0.0  # median latency without other requests
    answers: list[str] = field(default_factory=list)  # to the captions that are compared
    start: int = 0  # first level of the search for its knee
    stride: int = STRIDE  # stride of that search
    knees: list[Point | None] = field(default_factory=list)  # knee of each round; None where no rate met the objective
    points: list[Point] = field(default_factory=list)  # points of all rates and rounds

    @property
    def name(self) -> str:
        """Its name, one of `NAMES`."""
        return self.kind.name if self.kind else DRAGOMAN

    @property
    def goodput(self) -> float:
        """Median of the rounds' goodput at the knee; 0 for a round without one."""
        return median(knee.goodput if knee else 0.0 for knee in self.knees)

    @contextmanager
    def started(self, settings: Settings | None, sample: str) -> Iterator[str]:
        """Run the server and return its address; a peer needs settings, and has to translate the sample."""
        if self.kind:
            assert settings is not None
            models = self.models
            with PeerServer(self.kind, self.environments, models.ctranslate2, models.precision, settings, sample) as peer:
                yield peer.address
        else:
            with dragoman(self.models.bundle, *self.flags) as server:
                yield server.address()

    def send(self, address: str, load: Load) -> Record:
        """Send a load to the started server."""
        return send(self.kind.protocol if self.kind else GRPC, address, load)

    def describe(self, settings: Settings | None) -> str:
        """Return the settings as text."""
        return str(settings) if settings else " ".join(self.flags) or "defaults"


class Comparison:
    """The servers one after the other, each with the machine to itself."""

    def __init__(self, contenders: Sequence[Contender], captions: Sequence[str], size: Size) -> None:
        self.contenders, self.objective = contenders, 0.0
        self._captions, self._size, self._num_cores = captions, size, available_cores()
        self._texts = mixed_texts(captions, NUM_TEXTS, SEED)

    def check_answers(self, objective_factor: float) -> None:
        """Compare the answers of all servers, measure unloaded latency, and set the objective.

        Raises:
            RuntimeError: If a server's answers in fp32 differ from the first server's.
        """
        for contender in self.contenders:
            ways = (latency_settings(self._num_cores), first_settings(self._num_cores)) if contender.kind else (None,)
            contender.unloaded_seconds = min(self._unloaded(contender, settings) for settings in ways)
            contender.start, contender.settings = level_below(0.5 / contender.unloaded_seconds), ways[-1]
            same = self.share_of_same(contender)
            if contender.models.precision == "fp32" and same < MIN_SAME:
                raise RuntimeError(f"{contender.name} gives {same:.0%} of {self.contenders[0].name}'s answers")
            print(f"{contender.name}: unloaded {contender.unloaded_seconds * 1000:.0f} ms, {same:.0%} the same answers", flush=True)
        peers = [contender for contender in self.contenders if contender.kind] or self.contenders
        self.objective = objective_factor * min(contender.unloaded_seconds for contender in peers)

    def share_of_same(self, contender: Contender) -> float:
        """Return the share of a server's answers that equal the first server's."""
        return sum(map(str.__eq__, contender.answers, self.contenders[0].answers)) / len(contender.answers)

    def _unloaded(self, contender: Contender, settings: Settings | None) -> float:
        checked = Load(self._captions[: self._size.num_checked], concurrency=CHECK_CONCURRENCY, keeps_answers=True)
        with contender.started(settings, self._texts[0]) as address:
            contender.answers = [outcome.answer[0] for outcome in contender.send(address, checked).check().outcomes]
            return median(contender.send(address, Load(self._texts, 2 * self._size.warm_seconds)).check().latencies())

    def tune(self) -> None:
        """Find each peer's best settings, and an approximate knee of each server."""
        seconds = self._size.tuning_seconds
        lowest = level_below(MIN_REQUESTS / seconds)
        for contender in self.contenders:

            def trial(
                settings: Settings | None, start: int, lowest: int, stride: int, contender: Contender = contender
            ) -> tuple[Point | None, dict[int, Point]]:
                found, points = self._measure(contender, settings, seconds, 0, (start, lowest, stride))
                rate = f"keeps up with {found.offered:.1f}/s" if found else "not better"
                print(f"{contender.name}, {contender.describe(settings)}: {rate}", flush=True)
                return found, points

            if contender.kind:
                contender.settings, contender.start = tune(trial, self._num_cores, contender.start, lowest, STRIDE)
            elif found := trial(None, contender.start, lowest, STRIDE)[0]:
                contender.start = found.level
            contender.stride = 1

    def run_round(self, number: int) -> None:
        """Find the knee of each server, in random order; the first round after tuning also measures other rates."""
        lowest = level_below(MIN_REQUESTS / self._size.seconds)
        for contender in random.Random(number).sample(self.contenders, len(self.contenders)):
            search = contender.start, lowest, contender.stride
            has_curve = number == 1 and self._size.tuning_seconds > 0
            others = [level for offset in CURVE if (level := contender.start + offset) >= lowest] if has_curve else []
            found, points = self._measure(contender, contender.settings, self._size.seconds, number, search, others)
            contender.knees.append(found)
            contender.points += points.values()
            figure = f"{found.goodput:.1f} answers/s in time at {found.offered:.1f}/s" if found else "no rate meets the objective"
            print(f"round {number}, {contender.name}: {figure}", flush=True)

    def _measure(
        self,
        contender: Contender,
        settings: Settings | None,
        seconds: float,
        number: int,
        search: tuple[int, int, int],
        others: Sequence[int] = (),
    ) -> tuple[Point | None, dict[int, Point]]:
        """Start a server, find its knee, and measure other levels; arrivals depend on rate and round only."""
        with contender.started(settings, self._texts[0]) as address:
            contender.send(address, Load(self._texts, self._size.warm_seconds, concurrency=WARM_CONCURRENCY))

            def point(level: int) -> Point:
                load = Load(self._texts, seconds, rate_of(level), seed=1000 * number + level)
                return summarise(level, seconds, self.objective, contender.send(address, load))

            rate_search = RateSearch(point, self.objective)
            found = rate_search.find_knee(*search)
            for level in others:
                rate_search.meets(level)
            return found, rate_search.points


def row(contender: Contender, bleu: float, same: float, reference: float) -> dict[str, Any]:
    """Return a server's figures; `reference` is Dragoman's goodput."""
    knees = [knee for knee in contender.knees if knee]
    values = sorted(knee.goodput if knee else 0.0 for knee in contender.knees)
    failures = sum((point.failures for point in knees), Counter[str]())

    def middle(figure: str, scale: float, digits: int) -> str:
        return f"{median(getattr(knee, figure) * scale for knee in knees):.{digits}f}" if knees else "—"

    return {
        "server": contender.name,
        "goodput/s": f"{contender.goodput:.1f}",
        "rounds": f"{values[0]:.1f} to {values[-1]:.1f}",
        f"of {DRAGOMAN}'s": f"{contender.goodput / reference:.2f}" if reference else "—",
        "offered/s": middle("offered", 1, 1),
        "p50 ms": middle("median_seconds", 1000, 0),
        f"p{GOAL_PERCENT} ms": middle("goal_seconds", 1000, 0),
        "not answered": ", ".join(f"{code} {count}" for code, count in sorted(failures.items())) or "none",
        "unloaded p50 ms": f"{contender.unloaded_seconds * 1000:.0f}",
        "sent late p99 ms": middle("late_seconds", 1000, 1),
        "sender's cores": middle("sender_cores", 1, 2),
        "BLEU": f"{bleu:.1f}",
        "same answers": f"{same:.1%}",
        "settings": contender.describe(contender.settings),
    }


def verdict(contenders: Sequence[Contender]) -> str:
    """Return the ratio of Dragoman's goodput to the best peer's, as a line."""
    ours = [contender for contender in contenders if not contender.kind]
    best = max((contender for contender in contenders if contender.kind), key=lambda peer: peer.goodput, default=None)
    if not ours or not best or not best.goodput:
        return "No peer to compare with met the objective."
    ratio = ours[0].goodput / best.goodput
    return f"- {'kept' if ratio >= MIN_RATIO else 'MISSED'}: {ratio:.2f} times {best.name}'s goodput (at least {MIN_RATIO:g})"


def draw(path: Path, contenders: Sequence[Contender], objective: float) -> None:
    """Draw latency over rate, a line for each server, and the objective."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for contender, marker in zip(contenders, "os^d", strict=False):
        levels = sorted({point.level for point in contender.points})
        goals = [median(point.goal_seconds for point in contender.points if point.level == level) for level in levels]
        drawn = {rate_of(level): 1000 * goal for level, goal in zip(levels, goals, strict=True) if math.isfinite(goal)}
        axes.plot(list(drawn), list(drawn.values()), marker=marker, markersize=4, label=contender.name)
    axes.axhline(objective * 1000, color="black", linestyle="--", linewidth=1, label=f"objective, {objective * 1000:.0f} ms")
    axes.set(yscale="log", xlabel="requests a second, offered", ylabel=f"latency at {GOAL_PERCENT} %, ms")
    axes.set_xlim(left=0)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def notes(comparison: Comparison, size: Size, factor: float, skipped: Mapping[str, str], versions: str) -> list[str]:
    """Return the notes below the table."""
    first = comparison.contenders[0]
    shares = ", ".join(f"{share:.0%} of {count}" for count, share in SHARES.items())
    tuned = "was searched for" if size.tuning_seconds else "was NOT searched for (quick run)"
    return [
        f"`{first.models.name}`, {first.models.precision}, greedy, sender and server on the same cores. Texts are captions of "
        f"test_2016, single and joined ({shares}), that arrive as a Poisson process. The objective is the same for all: "
        f"{GOAL_PERCENT} % of requests answered within {comparison.objective * 1000:.0f} ms of when they were due, {factor:g} "
        "times the lowest unloaded median of a server around CTranslate2. Goodput counts what was answered in time at the highest "
        f"rate that met the objective, rates in steps of {STEP - 1:.0%}; medians of {size.num_rounds} rounds of "
        f"{size.seconds:g} s for each rate. A request that was refused, failed or got lost counts as never answered.",
        f"Each peer's best setting {tuned}; Dragoman runs with the settings named. BLEU, 13a, and sameness are of single captions. "
        f"Versions: {versions or 'no peers'}.",
        *(f"- {name} was not installed; `{command}` does that." for name, command in skipped.items()),
        verdict(comparison.contenders),
    ]


def missing(name: str, environments: Path) -> str:
    """Return the command that installs what a server lacks here; empty if it can take part."""
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind and not kind.python(environments).exists():
        return f"benchmarks/peers/setup.sh {environments} {name}"
    return "pip install '.[cpu,dev,benchmark]'" if kind and not find_spec("ctranslate2") else ""


def prepare(arguments: argparse.Namespace, *, has_peers: bool) -> Models:
    """Convert the checkpoint for all servers, or for Dragoman only."""
    checkpoint = Checkpoint.load(arguments.checkpoint) if arguments.checkpoint else widened_checkpoint()
    folder = arguments.cache / f"{checkpoint.name}-ctranslate2-{arguments.precision}"
    if has_peers:
        from benchmarks.engines.ctranslate2_model import write_model

        write_model(transformer_of(checkpoint.model), folder, {"fp32": "float32"}.get(arguments.precision, arguments.precision))
        checkpoint.tokenizers.save(folder)
    return Models(checkpoint.name, bundle_of(checkpoint, arguments.cache, arguments.precision), folder, arguments.precision)


def main() -> None:
    """Compare and write the part of this precision, objective and setting."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are stopped
    found = parser(__doc__)
    found.add_argument("--checkpoint", type=Path, help="Model to serve; by default en-de, widened to Transformer-base's size.")
    found.add_argument("--precision", choices=("int8", "fp32"), default="int8")
    found.add_argument("--servers", nargs="+", choices=NAMES, default=list(NAMES))
    found.add_argument("--environments", type=Path, default=Path(".cache/peers"), help="Folder that setup.sh was given.")
    found.add_argument("--dragoman-flags", default="", help="Of `dragoman serve`, as one argument; its defaults otherwise.")
    found.add_argument("--objective-factor", type=float, default=OBJECTIVE_FACTOR, help="Of the lowest unloaded latency.")
    arguments = found.parse_args()
    skipped = {name: command for name in arguments.servers if (command := missing(name, arguments.environments))}
    names = [name for name in NAMES if name in arguments.servers and name not in skipped]
    if not names:
        found.error("no server is left to measure")
    sources, references = read_parallel(*(arguments.data / f"test_2016_flickr.{language}.gz" for language in ("en", "de")))
    models, flags = prepare(arguments, has_peers=names != [DRAGOMAN]), shlex.split(arguments.dragoman_flags)
    kinds = {kind.name: kind for kind in KINDS}
    contenders = [Contender(kinds.get(name), models, arguments.environments, () if name in kinds else flags) for name in names]
    size = QUICK if arguments.quick else FULL
    comparison = Comparison(contenders, sources, size)
    comparison.check_answers(arguments.objective_factor)
    if size.tuning_seconds:
        comparison.tune()
    for number in range(1, size.num_rounds + 1):
        comparison.run_round(number)
    reference = next((contender.goodput for contender in contenders if not contender.kind), 0.0)
    rows, versions = [], dict[str, str]()
    for contender in contenders:
        bleu = score(contender.answers, references[: len(contender.answers)]).bleu
        rows.append(row(contender, bleu, comparison.share_of_same(contender), reference))
        versions |= contender.kind.versions(arguments.environments) if contender.kind else {}
    told = ", ".join(f"{package} {number}" for package, number in versions.items())
    page = Page("serving", "Goodput beside servers built around CTranslate2", output(arguments), ("onnxruntime", "grpcio"))
    part = (
        f"{models.precision}, {arguments.objective_factor:g} times the unloaded latency{f', {shlex.join(flags)}' if flags else ''}"
    )
    lines = notes(comparison, size, arguments.objective_factor, skipped, told)
    is_usual = (arguments.precision, arguments.objective_factor, flags) == ("int8", OBJECTIVE_FACTOR, [])
    if is_usual and (picture := page.picture()):
        draw(picture, contenders, comparison.objective)
        lines.append(f"![Latency over rate]({picture.name})")
    page.write(part, rows, lines)


if __name__ == "__main__":
    main()
