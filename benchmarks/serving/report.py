"""What the benchmark `serving` writes: a row for each server, every measured rate in the JSON file, and a figure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.mixture import SHARES
from benchmarks.harness.report import environment, figure_name, write
from benchmarks.serving.comparison import MIN_SAME, OBJECTIVE_FACTOR, Comparison, Standing
from benchmarks.serving.contender import DRAGOMAN
from benchmarks.serving.goodput import GOAL_PERCENT, STEP, Point
from benchmarks.serving.plot import draw

MIN_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What was compared.

    Attributes:
        model: Its name.
        precision: `fp32` or `int8`.
        seconds: Of each rate.
        num_rounds: How often each server was started for its figures.
        is_tuned: Whether the peers' settings were searched for.
        skipped: Commands that install the servers which did not take part.
        versions: Of the peers.
        objective_factor: See `Size`.
        has_flags: Whether Dragoman ran with other settings than its defaults.
    """

    model: str
    precision: str
    seconds: float
    num_rounds: int
    is_tuned: bool
    skipped: Mapping[str, str]
    versions: Mapping[str, str]
    objective_factor: float = OBJECTIVE_FACTOR
    has_flags: bool = False

    @property
    def result_name(self) -> str:
        """Name of the result: other objectives than the usual one and other settings than the defaults have their own."""
        objective = "" if self.objective_factor == OBJECTIVE_FACTOR else f"-{self.objective_factor:g}x"
        return f"serving-{self.precision}{objective}{'-set' if self.has_flags else ''}"


def goodput(standing: Standing) -> float:
    """Return the median of the rounds' goodput at the knee; 0 for a round without one."""
    return median(knee.goodput if knee else 0.0 for knee in standing.knees)


def row(standing: Standing, bleu: float, same: float, reference: float) -> dict[str, Any]:
    """Return a server's figures for the table.

    Args:
        standing: See there; it has had a round.
        bleu: Of its answers.
        same: Share of them that are the first server's.
        reference: Goodput that its own is divided by.
    """
    knees = [knee for knee in standing.knees if knee]
    values = sorted(knee.goodput if knee else 0.0 for knee in standing.knees)
    failures = sum((point.failures for point in knees), Counter[str]())

    def middle(figure: str, scale: float, digits: int) -> str:
        return f"{median(getattr(knee, figure) * scale for knee in knees):.{digits}f}" if knees else "—"

    return {
        "server": standing.contender.name,
        "goodput/s": f"{goodput(standing):.1f}",
        "rounds": f"{values[0]:.1f} to {values[-1]:.1f}",
        f"of {DRAGOMAN}'s": f"{goodput(standing) / reference:.2f}" if reference else "—",
        "offered/s": middle("offered", 1, 1),
        "p50 ms": middle("median_seconds", 1000, 0),
        f"p{GOAL_PERCENT} ms": middle("goal_seconds", 1000, 0),
        "not answered": ", ".join(f"{code} {count}" for code, count in sorted(failures.items())) or "none",
        "unloaded p50 ms": f"{standing.unloaded_seconds * 1000:.0f}",
        "sent late p99 ms": middle("late_seconds", 1000, 1),
        "sender's cores": middle("sender_cores", 1, 2),
        "BLEU": f"{bleu:.1f}",
        "same answers": f"{same:.1%}",
        "settings": standing.contender.describe(standing.settings),
    }


def verdict(standings: Sequence[Standing]) -> str:
    """Say whether Dragoman is as far ahead of the best peer as is promised."""
    ours = [standing for standing in standings if not standing.contender.kind]
    peers = [standing for standing in standings if standing.contender.kind]
    if not ours or not peers:
        return "There was nobody to compare with."
    best = max(peers, key=goodput)
    if not goodput(best):
        return "No peer met the objective at any rate."
    ratio = goodput(ours[0]) / goodput(best)
    kept = "kept" if ratio >= MIN_RATIO else "MISSED"
    return f"- {kept}: {ratio:.2f} times {best.contender.name}'s goodput (at least {MIN_RATIO:g})"


def curve(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return every measured rate, ready for JSON: a latency that is infinite, because too much failed, is null."""
    return [
        {
            "offered": point.offered,
            "goodput": point.goodput,
            f"p{GOAL_PERCENT}_seconds": point.goal_seconds if math.isfinite(point.goal_seconds) else None,
            "p50_seconds": point.median_seconds if math.isfinite(point.median_seconds) else None,
            "sent_late_p99_seconds": point.late_seconds,
            "sent": point.num_sent,
            "failures": dict(point.failures),
        }
        for point in points
    ]


def notes(setup: Setup, objective: float) -> list[str]:
    """Say how to read the table."""
    shares = ", ".join(f"{share:.0%} of {size}" for size, share in SHARES.items())
    rounds = f"{setup.num_rounds} round{'s' if setup.num_rounds > 1 else ''} of {setup.seconds:g} s for each rate"
    tuned = "was searched for" if setup.is_tuned else "was NOT searched for (quick run)"
    return [
        f"`{setup.model}`, {setup.precision}, greedy search, sender and server on the same cores. Texts are captions of test_2016, "
        f"single and joined ({shares}), that arrive as a Poisson process. The objective is the same for all: {GOAL_PERCENT} % of "
        f"requests answered within {objective * 1000:.0f} ms of when they were due, {setup.objective_factor:g} times the lowest "
        "unloaded median of a server around CTranslate2, with one core or all for a request. Goodput counts what was answered in "
        f"time at the highest rate that met the objective, one of a ladder with steps of {STEP - 1:.0%}; medians of {rounds}, by "
        "turns. A request that was refused, failed or got lost counts as one that is never answered.",
        "",
        f"Each peer's best setting {tuned}; Dragoman runs with what is named. BLEU, 13a, and sameness are of single captions; "
        f"answers in fp32 have to be the same but for ties ({MIN_SAME:.0%} at least).",
        *(f"\n- {name} was not installed; `{command}` does that." for name, command in setup.skipped.items()),
    ]


def write_report(comparison: Comparison, quality: Mapping[str, float], setup: Setup) -> None:
    """Write the JSON file, the table and the figure.

    Args:
        comparison: It has had all its rounds.
        quality: BLEU of each server's answers.
        setup: See there.
    """
    standings, objective = comparison.standings, comparison.objective
    name = setup.result_name
    reference = next((goodput(standing) for standing in standings if not standing.contender.kind), 0.0)
    rows = [
        row(standing, quality[standing.contender.name], comparison.share_of_same(standing), reference) for standing in standings
    ]
    about = environment("onnxruntime", "grpcio")
    about["versions"] |= setup.versions
    about |= {
        "device": "cpu",
        "model": setup.model,
        "precision": setup.precision,
        "objective_seconds": objective,
        "curves": {standing.contender.name: curve(standing.points) for standing in standings},
    }
    report.RESULTS.mkdir(exist_ok=True)
    figure = figure_name(name)
    draw(report.RESULTS / figure, {standing.contender.name: standing.points for standing in standings}, objective)
    lines = [*notes(setup, objective), "", verdict(standings), "", f"![Latency over rate]({figure})"]
    write(name, f"Serving, {setup.precision}: goodput beside servers built around CTranslate2", about, rows, lines)
