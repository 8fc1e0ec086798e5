"""The part `captions` of the benchmark `engines`: real sentences, answers that end by themselves, BLEU beside the speed."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.engines.requests import describe, uniform
from benchmarks.engines.sides import Run, Workload
from benchmarks.engines.stage import CT2, SERVED, Stage
from benchmarks.harness.contest import in_rounds, median_ratio, share_of_same_answers
from benchmarks.harness.report import write
from dragoman.model.quality import score

CONCURRENCY = 64
MAX_NEW_TOKENS = 128
SWEPT_ROWS = 256
"""Hypotheses of the sentences that CTranslate2's settings are tried on."""
BATCH_TOKENS = (512, 2048)


@dataclass(slots=True)
class Results:
    """Rows of the table, and every single run behind them."""

    sources: list[str]
    references: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, stage: Stage, search: str, num_beams: int, batch_rows: Sequence[int], num_rounds: int) -> None:
        """Measure one search on one model: our server, and CTranslate2 in its best setting."""
        tokenizers = stage.checkpoint.tokenizers
        texts = Workload(self.sources, tokenizers.source.encode_batch(self.sources), num_beams, MAX_NEW_TOKENS)
        sweep = self._sweep(stage, texts, batch_rows)
        contenders: dict[str, Callable[[], Run]] = {SERVED: partial(stage.serve, texts, CONCURRENCY)}
        if sweep:
            _, num_workers, batch_size, batch_type = max(sweep)
            contenders[CT2] = partial(stage.ctranslate2, texts, num_workers, batch_size, batch_type)
        stage.serve(texts.first(CONCURRENCY), CONCURRENCY)
        found = in_rounds(contenders, num_rounds)
        about = {"model": stage.checkpoint.name, "precision": stage.precision, "search": search}
        row: dict[str, Any] = dict(about)
        for name, label in ((SERVED, "Dragoman gRPC"), (CT2, "CTranslate2")):
            if name in found:
                row[label] = f"{_median_sentences(found[name]):,.1f}"
        if CT2 in found:
            row["its setting"] = f"{stage.worker_threads(num_workers)}, {batch_size:,} {batch_type}"
            row["gRPC ÷ CTranslate2"] = f"{median_ratio(found[SERVED], found[CT2]):.2f}"
            row["same answers"] = f"{share_of_same_answers(found[SERVED][0], found[CT2][0]):.1%}"
        for name, label in ((SERVED, "BLEU, Dragoman"), (CT2, "BLEU, CTranslate2")):
            if name in found:
                answers = [tokenizers.target.decode(ids) for ids in found[name][0].answers]
                row[label] = f"{score(answers, self.references).bleu:.2f}"
        self.rows.append(row)
        self.runs += [about | describe(name, runs) for name, runs in found.items()]
        settings = [{"workers": w, "batch": b, "of": kind, "tokens a second": round(rate)} for rate, w, b, kind in sweep]
        self.runs.append(about | {"side": f"{CT2}, every setting", "sweep": settings})
        print(row, flush=True)

    def _sweep(self, stage: Stage, texts: Workload, batch_rows: Sequence[int]) -> list[tuple[float, int, int, str]]:
        """Try CTranslate2's settings; return tokens a second, workers, batch size and what it counts, of each."""
        part = texts.first(min(SWEPT_ROWS // texts.num_beams, len(texts.sources)))
        settings = [(rows // texts.num_beams, "examples") for rows in batch_rows]
        settings += [(tokens // texts.num_beams, "tokens") for tokens in BATCH_TOKENS]
        found = []
        for num_workers in stage.workers:
            stage.ctranslate2(texts.first(num_workers), num_workers, 1)
            for batch_size, batch_type in settings:
                rate = stage.ctranslate2(part, num_workers, batch_size, batch_type).tokens_per_second
                found.append((rate, num_workers, batch_size, batch_type))
        return found

    def write(self, about: dict[str, Any]) -> None:
        """Write the table."""
        notes = [
            f"Sentences a second on {len(self.sources):,} sentences of test_2016: medians of {about['rounds']} rounds in which all "
            f"sides ran in turns, each with {about['threads']} threads. Answers end by themselves; beam search ends, on "
            f"both sides, once as many hypotheses are finished as it has beams. Dragoman gets texts over gRPC, {CONCURRENCY} at a "
            "time; CTranslate2 gets the ids of all sentences at once, sorts them by length and cuts them into batches, in the best "
            "of the settings that were tried on some of them. `en-de-base` is the shipped model widened to the size of "
            "Transformer-base without changing what it computes, see benchmarks/widened.py.",
        ]
        write("engines_captions", "Engines on real sentences", about | {"runs": self.runs}, uniform(self.rows), notes)


def _median_sentences(runs: Sequence[Run]) -> float:
    return statistics.median(run.sentences_per_second for run in runs)
