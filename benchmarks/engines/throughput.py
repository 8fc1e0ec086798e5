"""The part `throughput` of the benchmark `engines`: tokens a second where nothing limits how many requests are decoded at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.engines.requests import NUM_NEW_TOKENS, Case, check_lengths, check_sameness, workload
from benchmarks.engines.sides import Run
from benchmarks.engines.stage import BEFORE, BULK, CT2, ENGINE, SERVED, Stage
from benchmarks.engines.sweep import Best, about_tries, best, ways_of_ctranslate2, ways_of_dragoman
from benchmarks.engines.table import Table
from benchmarks.harness.contest import in_rounds, median_rate, median_ratio
from benchmarks.harness.setting import Setting

CONCURRENCY = (64, 128)
"""Requests under way that unary calls are tried with, and the older server is measured with."""
TRIED_ROWS = 256
WARM_UP = 8
BATCHES_A_WORKER = 2
LABELS = {ENGINE: "engine", SERVED: "gRPC", BULK: "gRPC in bulk", CT2: "CTranslate2"}
CASE = ("precision", "search", "source tokens")


@dataclass(slots=True)
class Results:
    """What was measured.

    Attributes:
        engines: Settings of our engines alone.
        table: See there.
    """

    engines: list[Setting]
    table: Table = field(default_factory=Table)

    def measure(self, stage: Stage, case: Case, batch_rows: Sequence[int], num_rounds: int, seconds: float) -> None:
        """Find everyone's best setting, then measure those in turns.

        Raises:
            RuntimeError: See `requests.check_lengths` and `check_sameness`.
        """
        requests = workload(stage, case)
        # Whole batches for each worker of CTranslate2, whatever their size: powers of two.
        part = requests.first(max(TRIED_ROWS // case.num_beams, BATCHES_A_WORKER * max(stage.workers, default=1)))
        ways = ways_of_dragoman(stage, self.engines, case.num_beams, CONCURRENCY)
        if stage.workers:
            sizes = [rows // case.num_beams for rows in batch_rows]
            fitting = [size for size in sizes if BATCHES_A_WORKER * size <= len(part.sources)] or [min(sizes)]
            ways[CT2] = ways_of_ctranslate2(stage, [(size, "examples") for size in fitting])
        chosen = {side: best(own, part, WARM_UP) for side, own in ways.items()}
        slowest = min(each.run.sentences_per_second for each in chosen.values())
        times = max(1, round(slowest * seconds / len(part.sources)))
        work = requests.first(times * len(part.sources))
        contenders: dict[str, Callable[[], Run]] = {side: partial(each.work, work) for side, each in chosen.items()}
        if stage.plan.source:
            for count in CONCURRENCY:
                stage.serve_before(part.first(WARM_UP), count)
                contenders[f"{BEFORE}, {count}"] = partial(stage.serve_before, work, count)
        found = in_rounds(contenders, num_rounds)
        check_lengths(found)
        for side in (SERVED, BULK):
            check_sameness(found[side][0], found[ENGINE][0])
        about = case.about(stage)
        self.table.add(about, _figures(found, chosen), found)
        self.table.runs += [about | tries for tries in about_tries(chosen)]

    def write(self, about: dict[str, Any]) -> None:
        """Write the table."""
        notes = [
            f"Tokens a second, encoder included, answers of {NUM_NEW_TOKENS} tokens; model, rounds and threads as in engines.md. "
            "Every side runs in the best of the settings that were tried, which are in engines_throughput.json, and is given the "
            "same requests, many times what it can decode at once; what the sides are is told in engines_captions.md.",
        ]
        if "before" in about:
            notes += [
                "",
                f"`before` is the better of {' and '.join(map(str, CONCURRENCY))} calls at a time on commit {about['before']}.",
            ]
        self.table.write("engines_throughput", "Engines at their best throughput", about, CASE, notes)


def _figures(found: Mapping[str, list[Run]], chosen: Mapping[str, Best]) -> dict[str, Any]:
    """Return speeds and ratios."""
    figures: dict[str, Any] = {}
    for side, each in chosen.items():
        figures[LABELS[side]] = f"{median_rate(found[side]):,.0f}"
        figures[f"{LABELS[side]}: setting"] = each.label
    before = max((runs for side, runs in found.items() if side.startswith(BEFORE)), key=median_rate, default=None)
    if before:
        figures["before, gRPC"] = f"{median_rate(before):,.0f}"
    if CT2 in found:
        for side in (ENGINE, SERVED, BULK):
            figures[f"{LABELS[side]} ÷ CTranslate2"] = f"{median_ratio(found[side], found[CT2]):.2f}"
        if before:
            figures["before ÷ CTranslate2"] = f"{median_ratio(before, found[CT2]):.2f}"
    return figures
