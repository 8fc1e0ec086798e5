"""The part `requests` of the benchmark `engines`: tokens a second with so many requests at a time, answers of a fixed length."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.engines.sides import Run, Workload
from benchmarks.engines.stage import BEFORE, ENGINE, SERVED, TRANSFORMERS, Stage, worker_name
from benchmarks.engines.table import Table
from benchmarks.harness.contest import Contender, in_rounds, median_rate, median_ratio, share_of_same_answers, size_for
from benchmarks.harness.random_text import random_texts
from benchmarks.harness.setting import Setting

NUM_NEW_TOKENS = 32
NUM_TEXTS = 512
MIN_BATCHES = 3
"""Of our own side, so that requests that come while others are decoded are part of the figure."""
CASE = ("precision", "search", "source tokens", "requests")
TRANSFORMERS_SOURCE_TOKENS = 16
"""Transformers is measured with these sources alone: it is far behind, and takes the time of all others together."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of a model.

    Attributes:
        search: Its name.
        num_beams: 1 for greedy.
        source_tokens: Of each source, end-of-sequence included.
    """

    search: str
    num_beams: int
    source_tokens: int

    def about(self, stage: Stage) -> dict[str, Any]:
        """Return what says in a table which case a row is of."""
        return {"precision": stage.precision, "search": self.search, "source tokens": self.source_tokens}


def workload(stage: Stage, case: Case) -> Workload:
    """Return requests, each of which is answered with `NUM_NEW_TOKENS` tokens."""
    texts = random_texts(stage.checkpoint.tokenizers.byte_level(), case.source_tokens, NUM_TEXTS)
    sources = stage.checkpoint.tokenizers.source.encode_batch(texts)
    assert all(len(source) + 1 == case.source_tokens for source in sources)
    return Workload(texts, sources, case.num_beams, NUM_NEW_TOKENS)


@dataclass(slots=True)
class Results:
    """What was measured of requests; `table` is the rows and every single run behind them."""

    table: Table = field(default_factory=Table)

    def measure(self, stage: Stage, case: Case, concurrency: int, num_rounds: int, seconds: float) -> None:
        """Measure every side on one case.

        Raises:
            RuntimeError: If an answer has another length, or the server answers otherwise than the engine.
        """
        contenders: dict[str, Callable[[], Run]] = {}
        for name, (side, min_batches) in sides(stage, case, concurrency).items():
            contenders[name] = partial(side, size_for(side, concurrency, seconds, min_batches))
        found = in_rounds(contenders, num_rounds)
        check_lengths(found)
        for setting in stage.plan.settings:
            if served_name(setting) in found:
                check_sameness(found[served_name(setting)][0], found[ENGINE][0])
        self.table.add(case.about(stage) | {"requests": concurrency}, _figures(stage, found), found)

    def write(self, about: Mapping[str, Any]) -> None:
        """Write the table."""
        notes = [
            "Tokens a second, encoder included: medians of rounds in which all sides ran in turns, each with "
            f"{about['threads']} threads; ratios are medians of the rounds' ratios. A random Transformer-base (6+6 layers, d_model "
            "512, feed-forward 2,048, 8 heads, 32,000 tokens, post-norm) whose output bias rules end-of-sequence out: every "
            f"answer has {NUM_NEW_TOKENS} tokens, and no side spends anything on forcing them.",
            "",
            "`requests` is how many are under way at any time. Dragoman gets each as text, over gRPC, from a process on the same "
            "cores that sends the next when it has its answer (`engine`: as ids, in process; `2 × 1` is two replicas of a thread "
            "each). CTranslate2 and Transformers get ids, all at once, in batches of that size: `2 × 1` is two batches of half the "
            "size, a thread each. `gRPC ÷ better` is the better of our settings by the better of CTranslate2's. `same answers` is "
            "the share on which CTranslate2 and Dragoman agree token by token.",
        ]
        if "before" in about:
            notes += ["", f"`before` is the server of commit {about['before']}, with its own bundle and settings."]
        self.table.write("engines", "Engines beside each other", about, CASE, notes)


def sides(stage: Stage, case: Case, concurrency: int) -> dict[str, tuple[Contender, int]]:
    """Return who takes part in a case, and how many batches' worth of requests it has at least; those who can use so many."""
    requests = workload(stage, case)
    single = Setting(1, stage.plan.num_threads, stage.plan.settings[0].total_slots)
    found: dict[str, tuple[Contender, int]] = {
        ENGINE: (lambda count: stage.decode(single, requests.first(count), concurrency), MIN_BATCHES)
    }
    for setting in stage.plan.settings:
        if concurrency >= setting.replicas:
            found[served_name(setting)] = partial(_serve, stage, setting, requests, concurrency), MIN_BATCHES
    if stage.plan.source:
        found[BEFORE] = (lambda count: stage.serve_before(requests.first(count), concurrency)), MIN_BATCHES
    for num_workers in stage.workers:
        if concurrency >= num_workers:
            found[worker_name(num_workers)] = partial(_ctranslate2, stage, requests, num_workers, concurrency), 1
    if stage.has_transformers and case.source_tokens == TRANSFORMERS_SOURCE_TOKENS:
        found[TRANSFORMERS] = (lambda count: stage.transformers(requests.first(count), concurrency)), 1
    return found


def served_name(setting: Setting) -> str:
    """Name our server in a setting."""
    fronts = f", {setting.front_ends} front ends" if setting.front_ends > 1 else ""
    return f"{SERVED} {setting.replicas} × {setting.threads}{fronts}"


def _serve(stage: Stage, setting: Setting, requests: Workload, concurrency: int, count: int) -> Run:
    return stage.serve(setting, requests.first(count), concurrency)


def _ctranslate2(stage: Stage, requests: Workload, num_workers: int, concurrency: int, count: int) -> Run:
    return stage.ctranslate2(requests.first(count), num_workers, concurrency // num_workers)


def check_lengths(found: Mapping[str, list[Run]]) -> None:
    """Refuse figures of sides that did not do all of the work.

    Raises:
        RuntimeError: Naming the side.
    """
    for name, runs in found.items():
        if any(len(answer) != NUM_NEW_TOKENS for run in runs for answer in run.answers):
            raise RuntimeError(f"{name}: not every answer has {NUM_NEW_TOKENS} tokens")


def check_sameness(served: Run, engine: Run) -> None:
    """Refuse figures of a server that does not answer as its engine does.

    Raises:
        RuntimeError: If an answer differs.
    """
    if share_of_same_answers(served, engine) < 1:
        raise RuntimeError("the server's answers are not the engine's")


def _figures(stage: Stage, found: Mapping[str, list[Run]]) -> dict[str, Any]:
    """Return the figures of one case, those of CTranslate2 and Transformers where they are here."""
    served = {name: runs for name, runs in found.items() if name.startswith(SERVED)}
    ours = max(served.values(), key=median_rate)
    figures: dict[str, Any] = {name.replace(",", ""): f"{median_rate(runs):,.0f}" for name, runs in served.items()}
    figures["engine"] = f"{median_rate(found[ENGINE]):,.0f}"
    if BEFORE in found:
        figures["before, gRPC"] = f"{median_rate(found[BEFORE]):,.0f}"
    theirs = {count: found[worker_name(count)] for count in stage.workers if worker_name(count) in found}
    for count in stage.workers:
        name = f"CTranslate2 {stage.worker_threads(count)}"
        figures[name] = f"{median_rate(theirs[count]):,.0f}" if count in theirs else ""
    if TRANSFORMERS in found:
        figures["Transformers"] = f"{median_rate(found[TRANSFORMERS]):,.0f}"
    if theirs:
        first, best = theirs[min(theirs)], max(theirs.values(), key=median_rate)
        figures[f"gRPC ÷ {stage.worker_threads(min(theirs))}"] = f"{median_ratio(ours, first):.2f}"
        figures["gRPC ÷ better"] = f"{median_ratio(ours, best):.2f}"
        if BEFORE in found:
            figures["before ÷ better"] = f"{median_ratio(found[BEFORE], best):.2f}"
        figures["same answers"] = f"{share_of_same_answers(found[ENGINE][0], first[0]):.0%}"
    figures["gRPC ÷ engine"] = f"{median_ratio(ours, found[ENGINE]):.2f}"
    return figures
