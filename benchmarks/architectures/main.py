"""The architectures of the field side by side: what they learn of the same text, how fast, and what they take when they serve.

    python -m benchmarks.architectures learn --data data/multi30k --runs runs/architectures [--steps 1440] [--seeds 1 2 3]
    python -m benchmarks.architectures training [--rounds 5] [--threads 1]
    python -m benchmarks.architectures serving [--rounds 5] [--threads 1]

`learn` trains models with about as many parameters on the same batches and scores them on test_2016, whole and by the length of
the source. It takes hours: each run is written down when it ends, and a run that is written down is not done again; one that was
cut off goes on where it was. `training` times steps on made-up batches by the length of sequences, `serving` the graphs of models
with random weights, behind the server's own runner.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.architectures import learning, serving_speed, training_speed
from benchmarks.architectures.plot import draw_learning, draw_speeds
from benchmarks.architectures.variants import VARIANTS
from benchmarks.harness import report
from benchmarks.harness.report import environment, figure_name, read, write

LEARNING, TRAINING, SERVING = "architectures_learning", "architectures_training", "architectures_serving"


def learn(arguments: argparse.Namespace) -> None:
    """Do the runs that are not written down yet, and write each down."""
    before = read(LEARNING)
    runs: list[dict[str, Any]] = [] if before is None else before.environment["runs"]
    chosen = VARIANTS if arguments.only is None else [VARIANTS[place] for place in arguments.only]
    for seed in arguments.seeds:
        for variant in chosen:
            if any((run["variant"], run["seed"], run["steps"]) == (variant.name, seed, arguments.steps) for run in runs):
                continue
            runs.append(learning.run_once(variant, seed, arguments.steps, arguments.data, arguments.runs, arguments.threads))
            _write_learning(runs, arguments)


def _write_learning(runs: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write all runs of this number of steps, in the order of the variants."""
    order = [variant.name for variant in VARIANTS]
    runs = sorted(runs, key=lambda run: (order.index(run["variant"]), run["seed"]))
    shown = [run for run in runs if run["steps"] == arguments.steps]
    about = environment("torch") | {"threads": arguments.threads, "steps": arguments.steps, "runs": runs}
    hours = sum(run["training seconds"] for run in shown) / 3600
    tokens = {f"{run['target tokens']:,}" for run in shown if run["seed"] == shown[0]["seed"]}
    notes = [
        f"Each run: {arguments.steps:,} steps, {' or '.join(sorted(tokens))} target tokens, the same batches for the same seed; "
        "BLEU of test_2016, greedy, cased; medians of the seeds. Lengths are words of the source.",
        f"All runs shown took {hours:.1f} hours of steps on one thread each, beside other work on the machine: minutes and "
        "tokens/s compare sides only roughly; `architectures_training` compares them in turns.",
    ]
    write(LEARNING, "Architectures: what they learn of the same batches", about, learning.table(shown), notes)
    draw_learning(report.RESULTS / figure_name(LEARNING), shown)


def train(arguments: argparse.Namespace) -> None:
    """Time training steps."""
    started = time.monotonic()
    speeds = training_speed.measure(arguments.rounds, arguments.threads)
    rows = [
        {"model": name, **{f"{length} tokens": f"{speed:,.0f}" for length, speed in of_lengths.items()}}
        for name, of_lengths in speeds.items()
    ]
    first, *_, last = training_speed.LENGTHS
    notes = [
        f"Target tokens a second, {training_speed.NUM_TOKENS:,} in a batch; forward and backward pass, medians of "
        f"{arguments.rounds} rounds in which sides take turns, {arguments.threads} thread(s). "
        f"{time.monotonic() - started:.0f} s to make.",
        *(f"{name}: {of[last] / of[first]:.2f} of its speed at {first} tokens is left at {last}." for name, of in speeds.items()),
    ]
    about = environment("torch") | {"threads": arguments.threads, "speeds": speeds}
    write(TRAINING, "Architectures: training speed by the length of sequences", about, rows, notes)
    draw_speeds(report.RESULTS / figure_name(TRAINING), speeds, "target tokens/s in training")


def serve(arguments: argparse.Namespace) -> None:
    """Time steps and reading."""
    started = time.monotonic()
    rows = serving_speed.measure(arguments.rounds, arguments.threads)
    notes = [
        f"Milliseconds, medians of {arguments.rounds} rounds in which sides take turns, {arguments.threads} thread(s), fp32, "
        f"random weights; {time.monotonic() - started:.0f} s to make. Steps are those around token {serving_speed.ANSWER_TOKENS} "
        f"of answers to sources (or prompts) of {serving_speed.STEP_SOURCE} tokens; reading is of one source."
    ]
    about = environment("torch", "onnxruntime") | {"threads": arguments.threads}
    write(SERVING, "Architectures: a step, and reading a source", about, rows, notes)


def main() -> None:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    learner = commands.add_parser("learn")
    learner.add_argument("--data", type=Path, default=Path("data/multi30k"))
    learner.add_argument("--runs", type=Path, default=Path("runs/architectures"))
    learner.add_argument("--steps", type=int, default=1440)
    learner.add_argument("--seeds", type=int, nargs="+", default=[1])
    learner.add_argument("--only", type=int, nargs="+", choices=range(len(VARIANTS)), help="Places of the variants to run.")
    learner.add_argument("--threads", type=int, default=1)
    learner.set_defaults(do=learn)
    for name, do in (("training", train), ("serving", serve)):
        timer = commands.add_parser(name)
        timer.add_argument("--rounds", type=int, default=5)
        timer.add_argument("--threads", type=int, default=1)
        timer.set_defaults(do=do)
    arguments = parser.parse_args()
    arguments.do(arguments)
