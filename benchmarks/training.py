"""Training: target tokens a second by precision and allocator, and the architectures of the field on the same batches.

    python -m benchmarks.training [--parts speed lengths architectures] [--steps 20] [--rounds 3] [--quick]

`speed`: the shipped en-de's recipe in several settings on the first captions of the corpus, each in a process of its own, in turns;
with TCMalloc installed (Debian: `libtcmalloc-minimal4`) there are sides that use it in place of glibc's allocator. `lengths`:
forward and backward pass of each architecture by the length of sequences. `architectures`, which takes hours: models with about as
many parameters are trained on the same batches and scored on test_2016, whole and by the length of the source; a run is kept in the
cache folder and goes on where it was cut off.
"""

import argparse
import csv
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.page import ROOT, Page, output, parser
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.corpus import read_lines, read_parallel
from dragoman.model.evaluate import translate
from dragoman.model.networks.architectures import network
from dragoman.model.networks.layers import Dropout
from dragoman.model.networks.network import Network
from dragoman.model.quality import score
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.loss import projected_cross_entropy
from dragoman.model.training.preparation import prepare
from dragoman.model.training.trainer import Trainer

PARTS = {
    "speed": "Speed by precision and allocator",
    "lengths": "Speed of architectures by length",
    "architectures": "Architectures on the same batches",
}
NUM_PAIRS, NUM_VALIDATION_PAIRS, NUM_WARM_UP_STEPS = 4000, 8, 3
VOCABULARY, LENGTHS, BATCH_TOKENS = 5000, (8, 16, 32, 64, 128, 256), 2048
BOUNDS = (10, 15, 20)
"""Upper bounds of the classes of lengths, in words of a source; the last class has longer ones."""


@dataclass(frozen=True, slots=True)
class Side:
    """Variant of the training loop."""

    name: str  # name in the table
    schedule: dict[str, Any] = field(default_factory=dict)  # changes in the recipe's `[training]` table
    is_dropout_pytorchs: bool = False  # whether `torch.nn.Dropout` replaces ours
    is_tcmalloc: bool = False  # whether memory comes from TCMalloc


SIDES = (
    Side("float32"),
    Side("bfloat16", {"is_bf16": True}),
    Side("bfloat16, PyTorch's dropout", {"is_bf16": True}, is_dropout_pytorchs=True),
    Side("float32, R-Drop", {"r_drop": 4.0}),
    Side("bfloat16, R-Drop", {"r_drop": 4.0, "is_bf16": True}),
    Side("float32, TCMalloc", is_tcmalloc=True),
    Side("bfloat16, TCMalloc", {"is_bf16": True}, is_tcmalloc=True),
    Side("bfloat16, R-Drop, TCMalloc", {"r_drop": 4.0, "is_bf16": True}, is_tcmalloc=True),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """An architecture: its name, fields of the configuration, and the peak of its learning rate."""

    name: str
    model: Mapping[str, Any]
    learning_rate: float


_TRANSFORMER = {"d_model": 128, "num_encoder_layers": 4, "num_decoder_layers": 4, "norm": "pre"}
_TRANSFORMER |= {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
_RNN = {"architecture": "rnn", "num_encoder_layers": 1, "num_decoder_layers": 1}
_DECODER = {
    "architecture": "decoder",
    "d_model": 128,
    "num_heads": 8,
    "num_decoder_layers": 8,
    "decoder_ffn_dim": 340,
    "norm": "pre",
}
VARIANTS = (
    Variant("Transformer, 8 heads", _TRANSFORMER | {"num_heads": 8}, 3e-3),
    Variant("Transformer, 1 head", _TRANSFORMER | {"num_heads": 1}, 3e-3),
    Variant("RNN, additive attention", _RNN | {"attention": "additive", "d_model": 224}, 2e-3),
    Variant("RNN, dot product", _RNN | {"attention": "dot", "d_model": 224}, 2e-3),
    Variant("RNN, scaled dot product", _RNN | {"attention": "scaled_dot", "d_model": 224}, 2e-3),
    Variant("RNN, no attention", _RNN | {"attention": "none", "d_model": 232}, 2e-3),
)
TIMED = (VARIANTS[0], VARIANTS[2], VARIANTS[5], Variant("decoder alone", _DECODER, 3e-3))


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all variants in turns; return medians over the steps of all rounds, without the first steps, which allocate memory."""
    recipe = tomllib.loads((ROOT / "model/recipes/en-de.toml").read_text(encoding="utf-8"))
    sides = [side for side in SIDES if not side.is_tcmalloc or find_library("tcmalloc_minimal")]
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        recipe["data"] = shorten(arguments.data, Path(folder))
        for _ in range(arguments.rounds):
            for side in sides:
                speeds[side.name] += train_apart(side, recipe, Path(folder), arguments.steps, arguments.threads)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    return [
        {
            "training": name,
            "target tokens/s": f"{median:,.0f}",
            "against float32": f"{median / medians[SIDES[0].name]:.2f}",
            "slowest and fastest step, tokens/s": f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}",
        }
        for name, median in medians.items()
    ]


def shorten(data: Path, into: Path) -> dict[str, str]:
    """Write the first pairs of the corpus and return the configuration's `[data]` table for them."""
    table = {}
    for side, language in (("source", "en"), ("target", "de")):
        for part, name, count in (("", "train", NUM_PAIRS), ("validation_", "val", NUM_VALIDATION_PAIRS)):
            table[part + side] = f"{name}.{language}"
            lines = read_lines(data / f"{name}.{language}.gz")[:count]
            (into / table[part + side]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def train_apart(side: Side, recipe: dict[str, Any], data: Path, num_steps: int, num_threads: int) -> list[float]:
    """Return target tokens a second of each measured step, from a run in a new process."""
    library = find_library("tcmalloc_minimal") if side.is_tcmalloc else None
    before = dict(os.environ)
    os.environ.update({"LD_PRELOAD": library} if library else {})
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            return processes.submit(train, side, recipe, data, num_steps, num_threads).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def train(side: Side, recipe: dict[str, Any], data: Path, num_steps: int, num_threads: int) -> list[float]:
    """Return the same from a run in this process."""
    torch.set_num_threads(num_threads)
    changes = {"max_steps": num_steps + NUM_WARM_UP_STEPS, "cooldown_steps": 0, "average_last": 1}
    file = TrainingFile(recipe | {"training": recipe["training"] | changes | side.schedule}, side.name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(prepare(file, data, Path(folder)), torch.device("cpu"))
        if side.is_dropout_pytorchs:
            for module in list(trainer.checkpoint.model.modules()):
                for name, child in module.named_children():
                    if isinstance(child, Dropout):
                        setattr(module, name, nn.Dropout(child.p))
        trainer.run()
        rows = _rows(trainer.folder / "steps.csv")[NUM_WARM_UP_STEPS:]
    return [int(row["target_tokens"]) / float(row["seconds"]) for row in rows]


def lengths(num_rounds: int, num_threads: int) -> list[dict[str, Any]]:
    """Time forward and backward passes of random batches by sequence length."""
    torch.set_num_threads(num_threads)
    models = {variant.name: random_model(variant) for variant in TIMED}
    seconds: dict[tuple[str, int], list[float]] = {}
    for number in range(num_rounds + 1):
        for length in LENGTHS:
            for name, model in models.items():
                taken = pass_seconds(model, length)
                if number:  # the first round allocates memory
                    seconds.setdefault((name, length), []).append(taken)
    rows = []
    for name in models:
        speeds = {length: BATCH_TOKENS / statistics.median(seconds[name, length]) for length in LENGTHS}
        row = {"model": name} | {f"{length} tokens": f"{value:,.0f}" for length, value in speeds.items()}
        rows.append(row | {"last ÷ first": f"{speeds[LENGTHS[-1]] / speeds[LENGTHS[0]]:.2f}"})
    return rows


def random_model(variant: Variant) -> Network:
    """Return a variant with random weights."""
    torch.manual_seed(1)
    fields = {"dropout": 0.2, "max_source_positions": 768, "max_target_positions": 768} | dict(variant.model)
    return network(ModelConfig.from_dict({"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY} | fields))


def pass_seconds(model: Network, length: int) -> float:
    """Return the time of the forward and backward pass of one batch."""
    rows, generator = BATCH_TOKENS // length, torch.Generator().manual_seed(length)
    target = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    sizes = torch.full((rows,), length if model.config.has_source else 0)
    source = target if model.config.has_source else target[:, :0]
    model.train()
    started = time.perf_counter()
    hidden = model.decode(target, *model.encode(source, sizes))
    decoder = model.decoder
    loss = projected_cross_entropy(hidden, decoder.output_weight, decoder.output_bias, target, model.config.pad_id, 0.1)
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return time.perf_counter() - started


def learn(variant: Variant, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one variant, or resume its training, and score it; a finished run is read."""
    torch.set_num_threads(arguments.threads)
    steps = arguments.learning_steps
    folder = arguments.cache / "runs" / f"{variant.name.replace(', ', '-').replace(' ', '-')}-{steps}-{seed}"
    note = folder.with_suffix(".json")
    if note.is_file():
        found: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        return found
    files = {f"{part}{side}": f"{name}.{language}.gz" for side, language in (("source", "en"), ("target", "de")) for part, name in
             (("", "train"), ("validation_", "val"))}  # fmt: skip
    recipe = {
        "name": "compared",
        "data": files,
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": dict(variant.model) | {"dropout": 0.2},
        "training": {
            "max_steps": steps,
            "warmup_steps": max(1, steps // 10),
            "cooldown_steps": steps // 2,
            "learning_rate": variant.learning_rate,
            "validate_every": 1,
            "average_last": 1,
            "is_bf16": False,
            "seed": seed,
        },
    }
    Trainer(prepare(TrainingFile(recipe, "compared"), arguments.data, folder), torch.device("cpu")).run()
    trained, validated = _rows(folder / "training/steps.csv"), _rows(folder / "training/validation.csv")
    checkpoint = Checkpoint.load(folder)
    sources, references = read_parallel(*(arguments.data / f"test_2016_flickr.{language}.gz" for language in ("en", "de")))
    answers = translate(checkpoint.model, checkpoint.tokenizers, sources)
    seconds, after = 0.0, {}
    for row in trained:
        seconds += float(row["seconds"])
        after[row["step"]] = seconds
    found = {
        "variant": variant.name,
        "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        "tokens": sum(int(row["target_tokens"]) for row in trained),
        "seconds": seconds,
        "curve": [(int(row["step"]), after[row["step"]], float(row["loss"])) for row in validated],
        "BLEU": score(answers, references).bleu,
        "BLEU by length": [score(*pair).bleu if pair[0] else 0.0 for pair in by_length(sources, answers, references)],
    }
    note.write_text(json.dumps(found), encoding="utf-8")
    shutil.rmtree(folder)
    return found


def by_length(sources: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Group answers and references by the number of words of their sources."""
    classes: list[tuple[list[str], list[str]]] = [([], []) for _ in range(len(BOUNDS) + 1)]
    for source, answer, reference in zip(sources, answers, references, strict=True):
        place = sum(len(source.split()) > bound for bound in BOUNDS)
        classes[place][0].append(answer)
        classes[place][1].append(reference)
    return classes


def length_names() -> list[str]:
    """Return the names of the classes of lengths, in words of a source."""
    starts = [1, *(bound + 1 for bound in BOUNDS)]
    return [f"{start}–{end}" for start, end in zip(starts, BOUNDS, strict=False)] + [f"{starts[-1]} and more"]


def learned(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each variant: medians over its seeds."""
    rows = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == name]
        tokens, seconds = (statistics.median(run[key] for run in own) for key in ("tokens", "seconds"))
        row = {"model": name, "parameters": f"{own[0]['parameters']:,}", "seeds": len(own)}
        row |= {"validation loss": f"{statistics.median(run['curve'][-1][2] for run in own):.3f}"}
        row |= {"tokens/s": f"{tokens / seconds:,.0f}", "minutes": f"{seconds / 60:.1f}"}
        row |= {"BLEU": f"{statistics.median(run['BLEU'] for run in own):.2f}"}
        classes = zip(*(run["BLEU by length"] for run in own), strict=True)
        rows.append(row | {f"BLEU, {n}": f"{statistics.median(of):.2f}" for n, of in zip(length_names(), classes, strict=True)})
    return rows


def draw(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw validation loss over steps and over time, and BLEU by the length of the source; each run is a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    over_steps, over_time, lengths_axes = figure.subplots(1, 3)
    for place, name in enumerate(dict.fromkeys(run["variant"] for run in runs)):
        for number, run in enumerate(run for run in runs if run["variant"] == name):
            steps, seconds, losses = zip(*run["curve"], strict=True)
            style: dict[str, Any] = {"color": f"C{place}", "label": name if not number else None, "linewidth": 1.2}
            over_steps.plot(steps, losses, **style)
            over_time.plot([each / 60 for each in seconds], losses, **style)
            lengths_axes.plot(length_names(), run["BLEU by length"], marker="o", markersize=3, **style)
    over_steps.set(xlabel="steps", ylabel="validation loss, nats a token")
    over_time.set(xlabel="minutes of training", ylabel="validation loss, nats a token")
    lengths_axes.set(xlabel="words of the source", ylabel="BLEU of test_2016, greedy")
    for axes in (over_steps, over_time, lengths_axes):
        axes.grid(visible=True, alpha=0.25)
    over_steps.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Measure the parts and write them."""
    found = parser(__doc__)
    found.add_argument("--parts", nargs="+", choices=PARTS, default=["speed", "lengths"])
    found.add_argument("--steps", type=int, default=20, help="Of a run of `speed`.")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--threads", type=int, default=torch.get_num_threads())
    found.add_argument("--learning-steps", type=int, default=720, help="Of a run of `architectures`.")
    found.add_argument("--seeds", type=int, nargs="+", default=[1], help="Of `architectures`.")
    arguments = found.parse_args()
    if arguments.quick:
        arguments.steps, arguments.rounds, arguments.learning_steps = 1, 1, 2
    page = Page("training", "Training", output(arguments), ("torch",))
    threads = f"{arguments.threads} thread(s)"
    if "speed" in arguments.parts:
        note = f"The recipe of en-de, {threads}; medians over {arguments.rounds} rounds of {arguments.steps} steps, sides in turns."
        page.write(PARTS["speed"], speed(arguments), [note])
    if "lengths" in arguments.parts:
        note = (
            f"Target tokens a second, {BATCH_TOKENS:,} in a batch, {threads}; medians of {arguments.rounds} rounds, sides in turns."
        )
        page.write(PARTS["lengths"], lengths(arguments.rounds, arguments.threads), [note])
    if "architectures" in arguments.parts:
        runs = [learn(variant, seed, arguments) for variant in VARIANTS for seed in arguments.seeds]
        notes = [
            f"Each run: {arguments.learning_steps:,} steps, {runs[0]['tokens']:,} target tokens, the same batches for the same "
            f"seed, {threads}; BLEU of test_2016, greedy, cased; medians of the seeds. Lengths are words of the source."
        ]
        if picture := page.picture():
            draw(picture, runs)
            notes.append(f"![Validation loss over steps and over minutes; BLEU by the length of the source]({picture.name})")
        page.write(PARTS["architectures"], learned(runs), notes)


if __name__ == "__main__":
    main()
