"""The part `throughput` of the benchmark `engines`: tokens a second where nothing limits how many requests are decoded at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.engines.requests import NUM_NEW_TOKENS, Case, check_lengths, check_sameness, describe, uniform, workload
from benchmarks.engines.stage import CT2, ENGINE, SERVED, Stage
from benchmarks.harness.contest import in_rounds, median_rate, median_ratio, size_for
from benchmarks.harness.report import write

CONCURRENCY = (64, 128)
"""Requests under way in our server; hypotheses are as many times more as a search has beams."""
BATCHES_A_WORKER = 2


@dataclass(slots=True)
class Results:
    """Rows of the table, and every single run behind them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, stage: Stage, case: Case, batch_rows: Sequence[int], num_rounds: int, seconds: float) -> None:
        """Find CTranslate2's best setting, then measure that beside ours.

        Raises:
            RuntimeError: See `engine_requests.check_lengths` and `check_sameness`.
        """
        requests = workload(stage, case)
        about = case.about(stage)
        contenders = {}
        names = {count: f"{SERVED}, {count} requests" for count in CONCURRENCY}
        for count, name in names.items():
            served = partial(lambda concurrency, total: stage.serve(requests.first(total), concurrency), count)
            contenders[name] = partial(served, size_for(served, count, seconds, 2))
        decoded = partial(lambda concurrency, total: stage.decode(requests.first(total), concurrency), CONCURRENCY[0])
        contenders[ENGINE] = partial(decoded, size_for(decoded, CONCURRENCY[0], seconds, 2))
        found_settings = self._sweep(stage, case, batch_rows) if stage.workers else []
        if found_settings:
            _, num_workers, batch_size = max(found_settings)
            total = _num_requests(num_workers, batch_size)
            contenders[CT2] = partial(stage.ctranslate2, requests.first(total), num_workers, batch_size)
        found = in_rounds(contenders, num_rounds)
        check_lengths(found)
        check_sameness(found[names[CONCURRENCY[0]]][0], found[ENGINE][0])
        row = about | {f"Dragoman gRPC, {count}": f"{median_rate(found[name]):,.0f}" for count, name in names.items()}
        row[f"engine, {CONCURRENCY[0]}"] = f"{median_rate(found[ENGINE]):,.0f}"
        if found_settings:
            row["CTranslate2, best"] = f"{median_rate(found[CT2]):,.0f}"
            row["its setting"] = f"{stage.worker_threads(num_workers)}, batches of {batch_size}"
            row |= {f"gRPC {count} ÷ best": f"{median_ratio(found[name], found[CT2]):.2f}" for count, name in names.items()}
        self.rows.append(row)
        self.runs += [about | describe(name, runs) for name, runs in found.items()]
        sweep = [{"workers": workers, "batch": batch, "tokens a second": round(rate)} for rate, workers, batch in found_settings]
        self.runs.append(about | {"side": f"{CT2}, every setting", "sweep": sweep})
        print(row, flush=True)

    def _sweep(self, stage: Stage, case: Case, batch_rows: Sequence[int]) -> list[tuple[float, int, int]]:
        """Try CTranslate2's settings once each, after a warm-up; return tokens a second, workers and batch size of each."""
        requests = workload(stage, case)
        found = []
        for num_workers in stage.workers:
            stage.ctranslate2(requests.first(num_workers), num_workers, 1)
            for rows in batch_rows:
                batch_size = rows // case.num_beams
                run = stage.ctranslate2(requests.first(_num_requests(num_workers, batch_size)), num_workers, batch_size)
                found.append((run.tokens_per_second, num_workers, batch_size))
        return found

    def write(self, about: dict[str, Any]) -> None:
        """Write the table."""
        notes = [
            f"Tokens a second, encoder included, answers of {NUM_NEW_TOKENS} tokens; model, rounds and threads as in engines.md. "
            f"Dragoman has {' or '.join(map(str, CONCURRENCY))} requests under way. CTranslate2 is given {BATCHES_A_WORKER} "
            "batches a worker at once, in the best of all settings that were tried: workers × threads of each, and batch size; "
            "the others' figures are in engines_throughput.json.",
        ]
        write("engines_throughput", "Engines at their best throughput", about | {"runs": self.runs}, uniform(self.rows), notes)


def _num_requests(num_workers: int, batch_size: int) -> int:
    """Return how many requests keep every worker busy for its batches."""
    return BATCHES_A_WORKER * num_workers * batch_size
