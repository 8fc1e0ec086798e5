"""Files: `dragoman bulk` beside a server that `dragoman translate` sends the file, and CTranslate2's `translate_iterable`.

    python -m benchmarks.bulk [--models en-de-base en-de] [--precisions int8] [--lines 100000] [--quick]

Every side reads a file of lines and writes a file of translations. The lines are Multi30k's with a number put into each round of
them, so that none is repeated. CTranslate2 works with our bundle's tokenizers, in the fastest of several settings.
"""

import argparse
import gzip
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.engines.sides import COMPUTE_TYPES, CT2
from benchmarks.harness.actor import Actor
from benchmarks.harness.models import MODELS, PRECISIONS, bundle_of, checkpoint_of
from benchmarks.harness.page import Page, output, parser
from benchmarks.harness.processes import dragoman
from dragoman.export.bundle import Bundle
from dragoman.model.networks.transformer import transformer_of
from dragoman.server.system import available_cores

BULK, SERVED = "dragoman bulk", "dragoman translate, server"
# Settings of CTranslate2 are tried on this part of the lines.
MAX_NEW_TOKENS, TRIED_PART = 128, 1 / 20
BATCHES = ((32, "examples"), (64, "examples"), (128, "examples"), (1024, "tokens"), (4096, "tokens"))


class CTranslate2Files:
    """CTranslate2 on a converted model, from file to file."""

    def __init__(self, folder: Path, bundle: Path, compute_type: str, inter_threads: int, intra_threads: int) -> None:
        ctranslate2: Any = import_module("ctranslate2")
        self._tokenizers = Bundle.open(bundle).tokenizers()
        threads = {"inter_threads": inter_threads, "intra_threads": intra_threads}
        self._translator = ctranslate2.Translator(str(folder), compute_type=compute_type, **threads)

    def run(self, source: Path, target: Path, max_batch_size: int, batch_type: str) -> float:
        """Return the seconds of a translation."""
        started = time.perf_counter()
        with open(source, encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as out:
            results = self._translator.translate_iterable(
                ([str(token) for token in self._tokenizers.source.encode(line.rstrip("\n"))] for line in lines),
                max_batch_size=max_batch_size,
                batch_type=batch_type,
                beam_size=1,
                max_input_length=0,
                max_decoding_length=MAX_NEW_TOKENS,
            )
            for result in results:
                print(self._tokenizers.target.decode([int(token) for token in result.hypotheses[0]]), file=out)
        return time.perf_counter() - started


def lines(data: Path) -> Iterator[str]:
    """Yield lines that differ, without end."""
    with gzip.open(data / "train.en.gz", "rt", encoding="utf-8") as file:
        captions = [line.strip() for line in file]
    for number in itertools.count():
        yield from (f"{caption.rstrip('.')} {number}." if number else caption for caption in captions)


def command(*arguments: object) -> float:
    """Run a command of ours and return its seconds."""
    started = time.perf_counter()
    given = [sys.executable, "-m", "dragoman", *map(str, arguments), "--max-new-tokens", str(MAX_NEW_TOKENS)]
    subprocess.run(given, check=True, capture_output=True)
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace, model: str, precision: str, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the rates of all sides on one model."""
    checkpoint = checkpoint_of(model)
    bundle, cache = bundle_of(checkpoint, arguments.cache, precision), arguments.cache
    source, tried = folder / "lines.txt", folder / "tried.txt"
    num_lines = arguments.lines if model != "en-de-base" else arguments.lines // arguments.base_part
    texts = list(itertools.islice(lines(arguments.data), num_lines))
    for path, count in ((source, num_lines), (tried, int(TRIED_PART * num_lines))):
        path.write_text("".join(f"{text}\n" for text in texts[:count]), encoding="utf-8")
    server = stack.enter_context(dragoman(bundle, "--result-cache-mib=0"))
    runs = itertools.count()

    def bulk() -> float:
        return command("bulk", source, "--output", folder / f"bulk-{next(runs)}", "--model", bundle)

    def serve() -> float:
        sent = ("--in", source, "--out", folder / "served.txt", "--concurrency", 256)
        return command("translate", "--server", server.address(), *sent)

    sides: dict[str, Callable[[], float]] = {BULK: bulk, SERVED: serve}
    setting = ""
    if arguments.has_ctranslate2:
        from benchmarks.engines.ctranslate2_model import write_model

        converted, kind = cache / f"{checkpoint.name}-{precision}-ctranslate2", COMPUTE_TYPES[precision]
        write_model(transformer_of(checkpoint.model), converted, kind)
        ways: dict[str, Callable[[Path], float]] = {}
        for workers in sorted({1, available_cores()}):
            threads = workers, available_cores() // workers
            actor = stack.enter_context(Actor(CTranslate2Files, converted, bundle, kind, *threads))
            for size, batch_type in BATCHES:
                run = partial(_call, actor, folder / "ctranslate2.txt", size, batch_type)
                ways[f"{threads[0]} × {threads[1]}, {size:,} {batch_type}"] = run
        setting = min(ways, key=lambda label: min(ways[label](tried) for _ in range(2)))
        sides[CT2] = lambda: ways[setting](source)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side in [*list(sides)[number % len(sides) :], *list(sides)[: number % len(sides)]]:
            rates[side].append(num_lines / sides[side]())
            print(model, side, round(rates[side][-1], 1), flush=True)
    row: dict[str, Any] = {"model": model, "precision": precision, "lines": f"{num_lines:,}"}
    row |= {side: f"{statistics.median(own):,.1f}" for side, own in rates.items()}
    others = {SERVED: "server", CT2: CT2} if setting else {SERVED: "server"}
    for other, name in others.items():
        ratios = [ours / theirs for ours, theirs in zip(rates[BULK], rates[other], strict=True)]
        row[f"÷ {name}"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return row | {f"{CT2}: setting": setting}


def _call(actor: Actor, target: Path, size: int, batch_type: str, source: Path) -> float:
    seconds: float = actor.call("run", source, target, size, batch_type)
    return seconds


def main() -> None:
    """Measure every model and precision, and write the page."""
    found = parser(__doc__)
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(reversed(MODELS)))
    found.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["int8"])
    found.add_argument("--lines", type=int, default=100_000)
    found.add_argument("--base-part", type=int, default=1, help="Divisor of the lines for the model of Transformer-base's size.")
    found.add_argument("--rounds", type=int, default=3)
    arguments = found.parse_args()
    if arguments.quick:
        arguments.lines, arguments.rounds = 200, 1
    try:
        arguments.has_ctranslate2 = bool(import_module("ctranslate2"))
    except ModuleNotFoundError:
        arguments.has_ctranslate2 = False
    page = Page("bulk", "Files", output(arguments), ("onnxruntime", "ctranslate2"))
    notes = [
        f"Lines a second from file to file on {available_cores()} cores, medians of {arguments.rounds} rounds in turns; loading "
        "the model is in the time of `dragoman bulk` alone. Engines and threads of ours are measured, those of CTranslate2 are "
        f"the fastest of the settings tried on {TRIED_PART:.0%} of the lines. Greedy search."
    ]
    for model, precision in itertools.product(arguments.models, arguments.precisions):
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            row = measure(arguments, model, precision, Path(folder), stack)
        page.write(f"{model}, {precision}", [row], notes)


if __name__ == "__main__":
    main()
