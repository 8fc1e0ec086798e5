"""The best setting of a side: every one is tried on a part of the work, and the best counts, for us as for others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.engines.sides import Run, Workload
from benchmarks.engines.stage import BULK, ENGINE, SERVED, Stage
from benchmarks.harness.setting import Setting

NUM_TRIES = 2
"""Of each setting; the faster counts, because what disturbs a run can only slow it."""
BULK_REQUESTS_A_SLOT = 2
"""Requests under way in bulk for each that can be decoded, so that there is always one to go on with."""

Work = Callable[[Workload], Run]


@dataclass(frozen=True, slots=True)
class Best:
    """What came of the tries of one side.

    Attributes:
        label: Of the setting that had the most tokens a second.
        work: Runs a workload in it.
        run: The faster of its tries.
        tries: Tokens a second of every setting, of the faster of its tries, for the record.
    """

    label: str
    work: Work
    run: Run
    tries: list[dict[str, Any]]


def best(ways: Mapping[str, Work], part: Workload, warm_up: int) -> Best:
    """Try every setting on a part of the work, after the first few requests of it; all of them once, then all of them again."""
    runs: dict[str, Run] = {}
    for number in range(NUM_TRIES):
        for label, work in ways.items():
            if not number:
                work(part.first(warm_up))
            run = work(part)
            if label not in runs or run.tokens_per_second > runs[label].tokens_per_second:
                runs[label] = run
    label = max(runs, key=lambda label: runs[label].tokens_per_second)
    tries = [{"setting": name, "tokens a second": round(run.tokens_per_second)} for name, run in runs.items()]
    return Best(label, ways[label], runs[label], tries)


def ways_of_dragoman(
    stage: Stage, engines: list[Setting], num_beams: int, under_way: tuple[int, ...]
) -> dict[str, dict[str, Work]]:
    """Return the settings of our three sides.

    Args:
        stage: With the servers.
        engines: Settings of engines alone, which are given everything at once.
        num_beams: Slots that a request takes.
        under_way: Requests at once that gRPC's unary calls are tried with.
    """
    ways: dict[str, dict[str, Work]] = {ENGINE: {}, SERVED: {}, BULK: {}}
    for setting in engines:
        ways[ENGINE][str(setting)] = partial(stage.decode, setting)
    for setting in stage.plan.settings:
        for count in under_way:
            label = f"{setting}, {count} at a time"
            ways[SERVED][label] = partial(stage.serve, setting, concurrency=count)
        most = BULK_REQUESTS_A_SLOT * setting.total_slots // num_beams
        label = f"{setting}, {most} at a time"
        ways[BULK][label] = partial(stage.serve, setting, concurrency=most, is_bulk=True)
    return ways


def ways_of_ctranslate2(stage: Stage, batches: list[tuple[int, str]]) -> dict[str, Work]:
    """Return CTranslate2's settings: workers, each with batches of any of these sizes, counted in examples or in tokens."""
    ways: dict[str, Work] = {}
    for num_workers in stage.workers:
        for size, kind in batches:
            label = f"{stage.worker_threads(num_workers)}, {size:,} {kind}"
            ways[label] = partial(stage.ctranslate2, num_workers=num_workers, batch_size=size, batch_type=kind)
    return ways


def about_tries(found: Mapping[str, Best]) -> list[dict[str, Any]]:
    """Return what was tried of every side, ready for JSON."""
    return [{"side": f"{side}, every setting", "sweep": each.tries} for side, each in found.items()]
