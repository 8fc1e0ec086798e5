"""How many target tokens a second training takes in: float32 and bfloat16, one pass and R-Drop's two, our dropout, the allocator.

    python -m benchmarks.training --data data/multi30k [--steps 20] [--rounds 3] [--threads 2] [--quick]

Each side is a real training run of the shipped en-de's recipe on the first captions of the corpus, in a process of its own. They
take turns; figures are medians over the steps of all rounds but the first three of each run, when memory is still being taken.
With TCMalloc installed (Debian: `libtcmalloc-minimal4`) there are sides that take their memory from it instead of from glibc.
"""

import argparse
import csv
import multiprocessing
import os
import statistics
import tempfile
import tomllib
from concurrent.futures import ProcessPoolExecutor
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.report import environment, write
from dragoman.model.corpus import read_lines
from dragoman.model.networks.dropout import Dropout
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.preparation import prepare
from dragoman.model.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
NUM_PAIRS = 4000
NUM_VALIDATION_PAIRS = 8
NUM_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train.

    Attributes:
        name: Heads its row.
        schedule: What it changes in the recipe's `[training]` table.
        is_dropout_pytorchs: Whether `torch.nn.Dropout` takes the place of ours.
        is_tcmalloc: Whether memory comes from TCMalloc.
    """

    name: str
    schedule: dict[str, Any] = field(default_factory=dict)
    is_dropout_pytorchs: bool = False
    is_tcmalloc: bool = False


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


def shorten(data: Path, into: Path) -> dict[str, str]:
    """Write the first pairs of the corpus and return the configuration's `[data]` table for them."""
    table = {}
    for side, language in (("source", "en"), ("target", "de")):
        for part, name, count in (("", "train", NUM_PAIRS), ("validation_", "val", NUM_VALIDATION_PAIRS)):
            table[part + side] = f"{name}.{language}"
            lines = read_lines(data / f"{name}.{language}.gz")[:count]
            (into / table[part + side]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def tcmalloc() -> dict[str, str]:
    """Return the environment of a process that takes its memory from TCMalloc; empty where that is not installed."""
    library = find_library("tcmalloc_minimal")
    return {"LD_PRELOAD": library} if library else {}


def train_apart(side: Side, recipe: dict[str, Any], data: Path, num_steps: int, num_threads: int) -> list[float]:
    """Return the target tokens a second of each step that counts, from a run in a new process."""
    before = dict(os.environ)
    os.environ.update(tcmalloc() if side.is_tcmalloc else {})
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            return processes.submit(train, side, recipe, data, num_steps, num_threads).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def train(side: Side, recipe: dict[str, Any], data: Path, num_steps: int, num_threads: int) -> list[float]:
    """Do the same in this process."""
    torch.set_num_threads(num_threads)
    changes = {"max_steps": num_steps + NUM_WARM_UP_STEPS, "cooldown_steps": 0, "average_last": 1}
    file = TrainingFile(recipe | {"training": recipe["training"] | changes | side.schedule}, side.name)
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(prepare(file, data, Path(output)), torch.device("cpu"))
        if side.is_dropout_pytorchs:
            for module in list(trainer.checkpoint.model.modules()):
                for name, child in module.named_children():
                    if isinstance(child, Dropout):
                        setattr(module, name, nn.Dropout(child.p))
        trainer.run()
        with (trainer.folder / "steps.csv").open(encoding="utf-8", newline="") as log:
            rows = list(csv.DictReader(log))[NUM_WARM_UP_STEPS:]
    return [int(row["target_tokens"]) / float(row["seconds"]) for row in rows]


def main() -> None:
    """Train in all ways, in turns, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="A few steps, to see that it works; nothing is written.")
    arguments = parser.parse_args()
    num_steps, num_rounds = (2, 1) if arguments.quick else (arguments.steps, arguments.rounds)
    about = environment("torch") | {"threads": arguments.threads, "steps": num_steps, "rounds": num_rounds}
    recipe = tomllib.loads((ROOT / "model/recipes/en-de.toml").read_text(encoding="utf-8"))
    sides = [side for side in SIDES if tcmalloc() or not side.is_tcmalloc]
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        recipe["data"] = shorten(arguments.data, Path(folder))
        for _ in range(num_rounds):
            for side in sides:
                speeds[side.name] += train_apart(side, recipe, Path(folder), num_steps, arguments.threads)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    rows = [
        {
            "training": name,
            "target tokens/s": f"{median:,.0f}",
            "against float32": f"{median / medians[SIDES[0].name]:.2f}",
            "slowest and fastest step, tokens/s": f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}",
        }
        for name, median in medians.items()
    ]
    if arguments.quick:
        print(rows)
    else:
        write("training", f"Training steps, threads: {arguments.threads}", about, rows)


if __name__ == "__main__":
    main()
