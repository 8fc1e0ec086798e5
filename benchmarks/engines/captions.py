"""The part `captions` of the benchmark `engines`: real sentences, answers that end by themselves, BLEU beside the speed."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.engines.requests import check_sameness
from benchmarks.engines.sides import Run, Workload
from benchmarks.engines.stage import BEFORE, BULK, CT2, ENGINE, SERVED, Stage
from benchmarks.engines.sweep import Best, about_tries, best, ways_of_ctranslate2, ways_of_dragoman
from benchmarks.engines.table import Table
from benchmarks.harness.contest import in_rounds, median_ratio, share_of_same_answers
from benchmarks.harness.setting import Setting
from dragoman.model.quality import score

CONCURRENCY = (64, 128)
"""Requests under way that unary calls are tried with; the older server gets the first."""
MAX_NEW_TOKENS = 128
TRIED_ROWS = 256
"""Hypotheses of the sentences that settings are tried on."""
MIN_TRIED = 128
WARM_UP = 16
BATCH_TOKENS = (512, 2048)
MIN_SENTENCES = 200
LABELS = {ENGINE: "engine", SERVED: "gRPC", BULK: "gRPC in bulk", CT2: "CTranslate2"}
CASE = ("model", "precision", "search")


@dataclass(slots=True)
class Results:
    """What was measured of captions.

    Attributes:
        sources: English.
        references: German.
        engines: Settings of our engines alone.
        table: See there.
    """

    sources: list[str]
    references: list[str]
    engines: list[Setting]
    table: Table = field(default_factory=Table)

    def measure(
        self, stage: Stage, search: str, num_beams: int, batch_rows: Sequence[int], num_rounds: int, seconds: float
    ) -> None:
        """Measure one search on one model: every side in its best setting.

        Args:
            stage: The sides.
            search: Its name.
            num_beams: Of it.
            batch_rows: What CTranslate2 may choose its batch size from, in hypotheses.
            num_rounds: How often every side runs.
            seconds: How long a run may take about; it has fewer sentences where a side is slow.

        Raises:
            RuntimeError: If our sides do not answer alike.
        """
        tokenizers = stage.checkpoint.tokenizers
        texts = Workload(self.sources, tokenizers.source.encode_batch(self.sources), num_beams, MAX_NEW_TOKENS)
        part = texts.first(min(max(TRIED_ROWS // num_beams, MIN_TRIED), len(self.sources)))
        ways = ways_of_dragoman(stage, self.engines, num_beams, CONCURRENCY)
        if stage.workers:
            sizes = [(rows // num_beams, "examples") for rows in batch_rows]
            ways[CT2] = ways_of_ctranslate2(stage, sizes + [(tokens // num_beams, "tokens") for tokens in BATCH_TOKENS])
        chosen = {side: best(own, part, WARM_UP) for side, own in ways.items()}
        work = texts.first(self._num_sentences(chosen, seconds))
        contenders: dict[str, Callable[[], Run]] = {side: partial(each.work, work) for side, each in chosen.items()}
        if stage.plan.source:
            stage.serve_before(part.first(WARM_UP), CONCURRENCY[0])
            contenders[BEFORE] = partial(stage.serve_before, work, CONCURRENCY[0])
        found = in_rounds(contenders, num_rounds)
        for side in (SERVED, BULK):
            check_sameness(found[side][0], found[ENGINE][0])
        case = {"model": stage.checkpoint.name, "precision": stage.precision, "search": search}
        self.table.add(case, self._figures(stage, found, chosen), found)
        self.table.runs += [case | tries for tries in about_tries(chosen)]

    def _num_sentences(self, chosen: Mapping[str, Best], seconds: float) -> int:
        """Return how many sentences the slowest side translates in that time, at least a few hundred, at most all."""
        slowest = min(each.run.sentences_per_second for each in chosen.values())
        return min(len(self.sources), max(MIN_SENTENCES, round(slowest * seconds)))

    def _figures(self, stage: Stage, found: Mapping[str, list[Run]], chosen: Mapping[str, Best]) -> dict[str, Any]:
        """Return speeds in sentences a second, ratios, and BLEU of every side that may have one of its own."""
        figures: dict[str, Any] = {"sentences": len(found[ENGINE][0].answers)}
        for side, each in chosen.items():
            figures[LABELS[side]] = f"{_median_sentences(found[side]):,.1f}"
            figures[f"{LABELS[side]}: setting"] = each.label
        if BEFORE in found:
            figures["before, gRPC"] = f"{_median_sentences(found[BEFORE]):,.1f}"
        if CT2 in found:
            for side in (ENGINE, SERVED, BULK, BEFORE):
                if side in found:
                    figures[f"{LABELS.get(side, side)} ÷ CTranslate2"] = f"{median_ratio(found[side], found[CT2]):.2f}"
            figures["same answers"] = f"{share_of_same_answers(found[ENGINE][0], found[CT2][0]):.1%}"
        for side, name in ((ENGINE, "Dragoman"), (BEFORE, "before"), (CT2, "CTranslate2")):
            if side in found:
                answers = [stage.checkpoint.tokenizers.target.decode(ids) for ids in found[side][0].answers]
                figures[f"BLEU, {name}"] = f"{score(answers, self.references[: len(answers)]).bleu:.2f}"
        return figures

    def write(self, about: dict[str, Any]) -> None:
        """Write the table."""
        notes = [
            "Sentences a second on the first sentences of test_2016: medians of rounds in which all sides ran "
            f"in turns, each with {about['threads']} threads; ratios are medians of the rounds' ratios. Answers end by themselves; "
            "beam search ends, on all sides, once as many hypotheses are finished as it has beams. Every side runs in the best of "
            "the settings that were tried on some of the sentences; all tries are in engines_captions.json. `engine`: ids, in "
            "process, everything at once, `2 × 1` being two engines of one thread, each on a core of its own and with half of the "
            "sentences; `gRPC`: texts by a call each, so many at a time; `gRPC in bulk`: texts by the client's `generate_many`; "
            "`CTranslate2`: ids, all sentences at once, which it sorts by length and cuts into batches. Our three sides give the "
            "same answers, token by token, so one BLEU is for all of them. `en-de-base` is the shipped model widened to the size "
            "of Transformer-base without changing what it computes, see benchmarks/widened.py.",
        ]
        if "before" in about:
            notes += [
                "",
                f"`before` is the server of commit {about['before']} with its own bundle, {CONCURRENCY[0]} calls at a time.",
            ]
        self.table.write("engines_captions", "Engines on real sentences", about, CASE, notes)


def _median_sentences(runs: Sequence[Run]) -> float:
    return statistics.median(run.sentences_per_second for run in runs)
