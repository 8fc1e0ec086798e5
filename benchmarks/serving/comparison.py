"""The course of the benchmark `serving`: every server looked at, tuned, and then measured in rounds."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness.mixture import mix
from benchmarks.peers.sender import translate
from benchmarks.peers.server import Settings
from benchmarks.peers.tuning import first_settings, latency_settings, tune
from benchmarks.serving.contender import Contender, Gauge
from benchmarks.serving.goodput import Ladder, Point, rung_below

OBJECTIVE_FACTOR = 4
"""Unloaded latencies that make the objective, unless told otherwise."""
NUM_TEXTS, SEED = 2000, 1
STRIDE = 4
MIN_REQUESTS = 20
"""Of a measurement; a server that cannot keep up with so few meets the objective at no rate."""
CHECK_CONCURRENCY = 16
CURVE = (-16, -8, 6)
"""Rungs from the knee that are measured once: how latency grows before it, and what comes after."""
MIN_SAME = 0.95
"""Of the answers in fp32, which only ties of two tokens may turn round."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        seconds: Of a rate, in a round.
        tuning_seconds: Of a rate, while settings are searched for; 0 for no search.
        warm_seconds: Of the load before a measurement.
        num_rounds: How often each server is started for its final figures.
        num_checked: Captions whose translations are compared.
        objective_factor: The objective in units of the lowest unloaded latency.
    """

    seconds: float
    tuning_seconds: float
    warm_seconds: float
    num_rounds: int
    num_checked: int
    objective_factor: float = OBJECTIVE_FACTOR


@dataclass(slots=True)
class Standing:
    """What is known of one server.

    Attributes:
        contender: See there.
        settings: Of a peer.
        unloaded_seconds: Median latency without other requests.
        answers: To the captions that are compared.
        start: Rung at which its knee is looked for.
        stride: Of that search.
        knees: Of every round; None where no rate met the objective.
        points: Of every rate of every round.
    """

    contender: Contender
    settings: Settings | None = None
    unloaded_seconds: float = 0.0
    answers: list[str] = field(default_factory=list)
    start: int = 0
    stride: int = STRIDE
    knees: list[Point | None] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)


class Comparison:
    """The servers one after the other, each with the machine to itself."""

    def __init__(self, contenders: Sequence[Contender], captions: Sequence[str], size: Size, num_cores: int) -> None:
        """Begin with nothing measured; the captions are what texts are made of."""
        self.standings = [Standing(contender) for contender in contenders]
        self.objective = 0.0
        self._captions, self._size, self._num_cores = captions, size, num_cores
        self._texts = mix(captions, NUM_TEXTS, SEED)

    def look(self) -> None:
        """Take everyone's answers and unloaded latency, and set the objective.

        Raises:
            RuntimeError: If a server's answers in fp32 are not the first's.
        """
        for standing in self.standings:
            contender = standing.contender
            ways = (latency_settings(self._num_cores), first_settings(self._num_cores)) if contender.kind else (None,)
            standing.unloaded_seconds = min(self._look_at(standing, settings) for settings in ways)
            standing.start = rung_below(0.5 / standing.unloaded_seconds)
            standing.settings = ways[-1]
            same = self.share_of_same(standing)
            if contender.models.precision == "fp32" and same < MIN_SAME:
                raise RuntimeError(f"{contender.name} gives {same:.0%} of {self.standings[0].contender.name}'s answers")
            print(f"{contender.name}: unloaded {standing.unloaded_seconds * 1000:.0f} ms, {same:.0%} the same answers", flush=True)
        peers = [standing for standing in self.standings if standing.contender.kind] or self.standings
        self.objective = self._size.objective_factor * min(standing.unloaded_seconds for standing in peers)

    def share_of_same(self, standing: Standing) -> float:
        """Return how many of a server's answers are the first server's."""
        return sum(map(str.__eq__, standing.answers, self.standings[0].answers)) / len(standing.answers)

    def _look_at(self, standing: Standing, settings: Settings | None) -> float:
        """Start a server, keep its answers and return its unloaded latency."""
        contender, checked = standing.contender, [*self._captions[: self._size.num_checked]]
        with contender.start(settings, self._texts[0]) as server:
            standing.answers = asyncio.run(translate(contender.face, server.address, checked, CHECK_CONCURRENCY))
            return self._gauge(self._size.seconds).unloaded_seconds(contender.face, server.address)

    def tune(self) -> None:
        """Find every peer's best settings, and where about everyone's knee is."""
        gauge, lowest = self._gauge(self._size.tuning_seconds), rung_below(MIN_REQUESTS / self._size.tuning_seconds)
        for standing in self.standings:

            def trial(
                settings: Settings | None, start: int, lowest: int, stride: int, standing: Standing = standing
            ) -> tuple[Point | None, dict[int, Point]]:
                found, points = self._measure(standing.contender, settings, gauge, 0, (start, lowest, stride))
                rate = f"keeps up with {found.offered:.1f}/s" if found else "not better"
                print(f"{standing.contender.name}, {standing.contender.describe(settings)}: {rate}", flush=True)
                return found, points

            if standing.contender.kind:
                standing.settings, standing.start = tune(trial, self._num_cores, standing.start, lowest, STRIDE)
            elif found := trial(None, standing.start, lowest, STRIDE)[0]:
                standing.start = found.rung
            standing.stride = 1

    def run_round(self, number: int) -> None:
        """Find everyone's knee, in an order of its own."""
        gauge, lowest = self._gauge(self._size.seconds), rung_below(MIN_REQUESTS / self._size.seconds)
        for standing in random.Random(number).sample(self.standings, len(self.standings)):
            search = standing.start, lowest, standing.stride
            others = [rung for offset in CURVE if (rung := standing.start + offset) >= lowest] if self._is_curve_due(number) else []
            found, points = self._measure(standing.contender, standing.settings, gauge, number, search, others)
            standing.knees.append(found)
            standing.points += points.values()
            figure = f"{found.goodput:.1f} answers/s in time at {found.offered:.1f}/s" if found else "no rate meets the objective"
            print(f"round {number}, {standing.contender.name}: {figure}", flush=True)

    def _is_curve_due(self, number: int) -> bool:
        """Whether a round also measures rates away from the knee: the first does, once it is known where the knee is."""
        return number == 1 and self._size.tuning_seconds > 0

    def _gauge(self, seconds: float) -> Gauge:
        return Gauge(self._texts, seconds, self._size.warm_seconds)

    def _measure(
        self,
        contender: Contender,
        settings: Settings | None,
        gauge: Gauge,
        number: int,
        search: tuple[int, int, int],
        others: Sequence[int] = (),
    ) -> tuple[Point | None, dict[int, Point]]:
        """Start a server, look for its knee, and measure other rungs too."""
        with contender.start(settings, self._texts[0]) as server:
            gauge.warm_up(contender.face, server.address)
            ladder = Ladder(lambda rung: gauge.point(contender.face, server.address, rung, self.objective, number), self.objective)
            found = ladder.find_knee(*search)
            for rung in others:
                ladder.keeps(rung)
            return found, ladder.points
