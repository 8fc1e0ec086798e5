"""Runs that learn: each variant's validation loss after so many steps and seconds, and how well it translates at the end."""

import csv
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures.variants import Variant, recipe
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.model.evaluate import translate
from dragoman.model.quality import score
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.preparation import prepare
from dragoman.model.training.trainer import Trainer

BOUNDS = (10, 15, 20)
"""Words of a source up to which it belongs to a class of lengths; the last class has those that are longer."""

TEST = ("test_2016_flickr.en.gz", "test_2016_flickr.de.gz")
Run = dict[str, Any]


def run_once(variant: Variant, seed: int, num_steps: int, data: Path, folder: Path, num_threads: int) -> Run:
    """Train one variant, or go on where an earlier call was stopped, and score it; return every figure.

    Args:
        variant: Of the comparison.
        seed: Of weights, batches and dropout.
        num_steps: Of the optimiser.
        data: The corpus.
        folder: Where runs are kept.
        num_threads: Of PyTorch.
    """
    torch.set_num_threads(num_threads)
    output = folder / f"{variant.name.replace(', ', '-').replace(' ', '-')}-{num_steps}-{seed}"
    trainer = Trainer(prepare(TrainingFile(recipe(variant, seed, num_steps, 1), "compared"), data, output), torch.device("cpu"))
    trainer.run()
    steps, validations = _rows(output / "training" / "steps.csv"), _rows(output / "training" / "validation.csv")
    checkpoint = Checkpoint.load(output)
    started = time.process_time()
    sources, references = read_parallel(*(data / name for name in TEST))
    answers = translate(checkpoint.model, checkpoint.tokenizers, sources)
    found = {
        "variant": variant.name,
        "seed": seed,
        "steps": num_steps,
        "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        "target tokens": sum(int(row["target_tokens"]) for row in steps),
        "training seconds": sum(float(row["seconds"]) for row in steps),
        "translation CPU seconds": time.process_time() - started,
        "load": os.getloadavg()[0],
        "curve": _curve(steps, validations),
        "BLEU": score(answers, references).bleu,
        "BLEU by length": [score(*pair).bleu for pair in by_length(sources, answers, references)],
    }
    shutil.rmtree(output / "training")
    return found


def by_length(sources: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Part answers and references by how many words their sources have."""
    classes: list[tuple[list[str], list[str]]] = [([], []) for _ in range(len(BOUNDS) + 1)]
    for source, answer, reference in zip(sources, answers, references, strict=True):
        place = sum(len(source.split()) > bound for bound in BOUNDS)
        classes[place][0].append(answer)
        classes[place][1].append(reference)
    return classes


def length_names() -> list[str]:
    """Name the classes of lengths, in words of a source."""
    starts = [1, *(bound + 1 for bound in BOUNDS)]
    ends = [*map(str, BOUNDS), ""]
    return [f"{start}–{end}" if end else f"{start} and more" for start, end in zip(starts, ends, strict=True)]


def table(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each variant: medians over its seeds."""
    rows = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == name]

        def median(of: str, own: Sequence[Mapping[str, Any]] = own) -> float:
            return float(statistics.median(run[of] for run in own))

        losses = [run["curve"][-1]["loss"] for run in own]
        classes = zip(*(run["BLEU by length"] for run in own), strict=True)
        rows.append(
            {
                "model": name,
                "parameters": f"{own[0]['parameters']:,}",
                "seeds": len(own),
                "validation loss": f"{statistics.median(losses):.3f}",
                "tokens/s": f"{median('target tokens') / median('training seconds'):,.0f}",
                "minutes": f"{median('training seconds') / 60:.1f}",
                "BLEU": f"{median('BLEU'):.2f}",
                **{f"BLEU, {length}": f"{statistics.median(of):.2f}" for length, of in zip(length_names(), classes, strict=True)},
            }
        )
    return rows


def _curve(steps: Sequence[Mapping[str, str]], validations: Sequence[Mapping[str, str]]) -> list[dict[str, float]]:
    """Return each validation with the seconds of training before it; those of validating do not count."""
    seconds = 0.0
    after = {}
    for row in steps:
        seconds += float(row["seconds"])
        after[row["step"]] = seconds
    return [
        {"step": int(row["step"]), "seconds": round(after[row["step"]], 2), "loss": float(row["loss"]), "BLEU": float(row["bleu"])}
        for row in validations
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
