"""One trained model by everybody: imported and exported with the commands that users have, then answered with and scored."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trained.answers import WAYS, Answer, Answers, Original, Way, ctranslate2_answers, served_answers
from benchmarks.trained.differences import Difference, differences
from benchmarks.trained.families import FAMILIES
from dragoman.model.corpus import read_parallel
from dragoman.model.quality import score

TRANSFORMERS = "Transformers, fp32"
PRECISIONS = ("fp32", "int8")
QUANTIZATIONS = {"fp32": "float32", "int8": "int8"}
MAX_NOTED = 20


def dragoman(*arguments: str | Path) -> None:
    """Run a command as users do.

    Raises:
        RuntimeError: If it fails, with what it said.
    """
    done = subprocess.run([sys.executable, "-m", "dragoman", *map(str, arguments)], capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(f"dragoman {arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}")


def compare(name: str, folder: Path, data: Path, num_sources: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table for one family, and what there is to say of differences.

    Args:
        name: Of the family.
        folder: What was trained.
        data: The corpus.
        num_sources: Of test_2016; None for all.
    """
    test, validation = (read_parallel(data / f"{part}.en.gz", data / f"{part}.de.gz") for part in ("test_2016_flickr", "val"))
    texts, references = (side[:num_sources] for side in test)
    task = FAMILIES[name].task
    original = Original(FAMILIES[name], folder)
    sources = original.sources(texts)
    theirs = {way: original.answers(texts, way) for way in WAYS}
    by: dict[str, Answers] = {TRANSFORMERS: theirs}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        calibration = Path(scratch) / "val.en"
        calibration.write_text("".join(f"{text}\n" for text in validation[0]), encoding="utf-8")
        dragoman("import", folder, checkpoint, "--name", name, *(["--task", task] if task else []))
        for precision in PRECISIONS:
            bundle = Path(scratch) / precision / name
            flags: list[str | Path] = ["--calibration", calibration] if precision == "int8" else []
            dragoman("export", checkpoint, bundle, "--precision", precision, *flags)
            by[f"Dragoman, {precision}"] = served_answers(bundle, texts)
        for precision, quantization in QUANTIZATIONS.items():
            by[f"CTranslate2, {precision}"] = ctranslate2_answers(original, folder, Path(scratch), texts, quantization)
    rows, notes = [], []
    for way in WAYS:
        for who, answers in by.items():
            if way in answers:
                found = differences(original, sources, answers[way], theirs[way], way)
                rows.append(row(name, way, who, answers[way], references, found))
                notes += [note(name, way, who, difference) for difference in found[:MAX_NOTED] if is_noted(who, difference)]
    return rows, notes


def row(
    name: str, way: Way, who: str, answers: Sequence[Answer], references: Sequence[str], found: Sequence[Difference]
) -> dict[str, Any]:
    """Return one row; why answers differ is only asked of fp32."""
    scores = score([answer.text for answer in answers], references)
    is_explained = who.endswith("fp32") and who != TRANSFORMERS
    kinds = {
        "of them ties": [difference.is_tie for difference in found],
        "as long as any may be": [difference.is_cut and not difference.is_tie for difference in found],
        "the same tokens with other text": [difference.is_text for difference in found],
    }
    kinds["others"] = [not any(these) for these in zip(*kinds.values(), strict=True)]
    return {
        "model": name,
        "decoding": way.name,
        "by": who,
        "BLEU": f"{scores.bleu:.2f}",
        "chrF": f"{scores.chrf:.2f}",
        "lines unlike Transformers'": "–" if who == TRANSFORMERS else len(found),
        **{kind: sum(these) if is_explained else "–" for kind, these in kinds.items()},
    }


def is_noted(who: str, difference: Difference) -> bool:
    """Whether the reader is told of a difference by itself: each of ours in single precision that is no tie."""
    return who == "Dragoman, fp32" and not difference.is_tie


def note(name: str, way: Way, who: str, difference: Difference) -> str:
    """Return what is told of it."""
    ours, theirs = difference.ours.text, difference.theirs.text
    line = f"- {name}, {way.name}, {who}, line {difference.index + 1}"
    if difference.is_text and ours.strip() == theirs.strip():
        amount = "less" if len(theirs) < len(ours) else "more"
        return f"{line}: white space at an end of the text, of which Transformers' tokeniser has {amount}."
    return f"{line}: `{ours}` for `{theirs}`, which the model in double precision finds better by {difference.margin:.2e}."
