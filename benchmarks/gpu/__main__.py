"""Check and measure serving on a GPU with one command.

    python -m benchmarks.gpu [--output results] [--device cuda:0] [--quick]

Checks: answers against eager PyTorch in single and half precision, captured steps against others, mixed searches. Speed: a step of
Transformer-base and -big at 1 to 512 rows, peers on the same GPU and weights, gRPC end to end. A part whose requirements are
missing is skipped and named, and the other parts go on; the exit code is 1 if a part failed or a check did not hold.

It needs PyTorch with CUDA, onnx, onnxscript, safetensors, tokenizers and onnxruntime-gpu; engine and gRPC parts need the server's
libraries, peers Transformers and CTranslate2. Graphs can be made beforehand on any machine (`prepare`) and be given with --graphs.
`--device cpu --quick` runs all of it on small models without a GPU, which shows that it works, not how fast it is.
"""

import argparse
import contextlib
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parity, speed
from benchmarks.gpu.models import SHIPPED, graphs_of, open_device, random_model, random_sources
from benchmarks.harness.page import Page, output, parser
from dragoman.export.half import DTYPES
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import transformer_of
from dragoman.server.runtime.device.model import DeviceModel

ROWS, QUICK_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1, 3, 8)
# Answers to random tokens are long and have many near ties, at which roundings differ.
MIN_SAME_TEXTS, MIN_SAME_RANDOM, MAX_DIFFERENCE = 0.99, 0.8, 0.1
CONCURRENCY = 256
TEXTS = (
    "Two children are building a sandcastle on the beach.",
    "The train to the coast leaves at 7:45 from platform 3.",
    "A man in a red jacket is repairing the roof of a small wooden house while his neighbour holds the ladder.",
    "Why does the kettle whistle?",
    "A dog runs through the snow.",
)
Rows = list[dict[str, Any]]


class Run:
    """One run: its device, and the parts so far.

    Attributes:
        found: Rows by part.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Open the device.

        Raises:
            DeviceError: If it cannot be used.
        """
        self.arguments, self.folder, self._started = arguments, Path(arguments.graphs), time.perf_counter()
        # PyTorch comes first, so that ONNX Runtime finds the CUDA libraries that it has loaded.
        self.torch_device = str(arguments.device)
        if self.torch_device != "cpu":
            torch.zeros(1, device=self.torch_device)
        self.device = open_device(arguments.device)
        packages = ("torch", "onnxruntime-gpu", "onnxruntime", "transformers", "ctranslate2")
        self._page = Page("gpu", "On a GPU", output(arguments), packages, self.device.name)
        self.found: dict[str, Rows] = {}

    def part(self, name: str, measure: Callable[[], Rows]) -> None:
        """Run one part, unless the time is over, and write it; an error becomes its row."""
        started = time.perf_counter()
        if started - self._started > self.arguments.max_seconds:
            self.found[name] = [{"skipped": f"the {self.arguments.max_seconds} seconds are over"}]
        else:
            try:
                self.found[name] = measure()
            except ImportError as error:
                self.found[name] = [{"skipped": f"{error.name or error} is not installed"}]
            except Exception as error:  # the other parts go on; main returns 1
                traceback.print_exc()
                self.found[name] = [{"failed": f"{type(error).__name__}: {error}"}]
        self._page.write(name, self.found[name], [f"{time.perf_counter() - started:.1f} s to make."])

    def answers(self, precision: str) -> Rows:
        """Compare answers of the trained model with eager PyTorch's; with texts and references, BLEU too."""
        checkpoint = Checkpoint.load(SHIPPED)
        graphs = graphs_of("en-de", transformer_of(checkpoint.model), precision, self.folder)
        count = 12 if self.arguments.quick else 1000
        if self.arguments.texts:
            lines = Path(self.arguments.texts).read_text(encoding="utf-8").splitlines()[:count]
            sources = [[*ids, graphs.eos_id] for ids in checkpoint.tokenizers.source.encode_batch(lines)]
        else:
            sources = random_sources(graphs, count, 1, 40)
        models = parity.eager_models(transformer_of(checkpoint.model), DTYPES[precision], precision)
        found, tokens = parity.answers_against_eager(self.device, graphs, models, sources, self.torch_device)
        if self.arguments.texts and self.arguments.references:
            from dragoman.model.quality import score

            references = Path(self.arguments.references).read_text(encoding="utf-8").splitlines()[:count]
            answers = [checkpoint.tokenizers.target.decode(ids) for ids in tokens]
            found["BLEU"] = score(answers, references, is_lowercase=True).bleu
        return [found | {"sources": self.arguments.texts or "random tokens"}]

    def graphs(self, size: str) -> DeviceModel:
        """Return the graphs of a random model in fp16."""
        return graphs_of(size, random_model(size), "fp16", self.folder)

    def peers(self, size: str) -> Rows:
        """Compare tokens a second with peers'."""
        batches, num_tokens = ((1, 4), 6) if self.arguments.quick else ((1, 32, 128, 256), 64)
        model, graphs = random_model(size), self.graphs(size)
        return speed.against_peers(self.device, size, model, graphs, batches, num_tokens, self.torch_device)

    def served(self) -> Rows:
        """Serve the trained model in fp16 over gRPC and measure one client's throughput."""
        from benchmarks.harness.load import CLIENT, Load
        from benchmarks.harness.models import bundle_of
        from benchmarks.harness.processes import dragoman

        count = 40 if self.arguments.quick else 20_000
        texts = list(itertools.islice(itertools.cycle(TEXTS), count))
        bundle = bundle_of(Checkpoint.load(SHIPPED), self.arguments.cache, "fp16")
        with dragoman(bundle, f"--device={self.arguments.device}", f"--max-slots={CONCURRENCY}") as server:
            server.run(Load(texts[: 2 * CONCURRENCY], concurrency=CONCURRENCY), CLIENT)
            record, used = server.run(Load(texts, concurrency=CONCURRENCY, keeps_answers=True), CLIENT)
        tokens = sum(len(outcome.answer[1]) for outcome in record.outcomes)
        row = {"requests": count, "concurrency": CONCURRENCY, "requests/s": round(record.rate, 1)}
        row |= {"tokens/s": round(tokens / record.wall_seconds)}
        return [row | {f"cores: {name}": round(seconds / record.wall_seconds, 2) for name, seconds in used.items()}]


def measure(arguments: argparse.Namespace) -> int:
    """Run every part; return 1 if one failed or a check did not hold."""
    run = Run(arguments)
    sizes = ("toy",) if arguments.quick else ("base", "big")
    rows, num_steps = (QUICK_ROWS, 6) if arguments.quick else (ROWS, speed.NUM_STEPS)
    run.part("Answers, fp16", lambda: run.answers("fp16"))
    run.part("Captured steps", lambda: [parity.replay_against_plain(run.device, run.graphs(sizes[0]), max(rows))])
    run.part("Steps begun ahead", lambda: [parity.ahead_against_asked(run.device, run.graphs(sizes[0]), 5)])
    for size in sizes:
        run.part(f"Steps, {size}", partial(_steps, run, size, rows, num_steps))
    run.part("Peers", lambda: run.peers(sizes[0]))
    if run.device.kind == "cuda":
        run.part("Answers, bf16", lambda: run.answers("bf16"))
    count = 10 if arguments.quick else 60
    run.part("Mixed searches", lambda: [parity.mixed_searches(run.device, run.graphs(sizes[0]), count)])
    run.part("Through gRPC", run.served)
    return int(not is_right(run.found, bool(arguments.texts)))


def _steps(run: Run, size: str, rows: tuple[int, ...], num_steps: int) -> Rows:
    return speed.steps_by_rows(run.device, size, run.graphs(size), rows, num_steps)


def is_right(found: dict[str, Rows], has_texts: bool) -> bool:
    """Return whether no part failed and every check held."""
    answers = found["Answers, fp16"][0]
    return (
        not any("failed" in row and row["failed"] for rows in found.values() for row in rows)
        and found["Captured steps"][0].get("different", 0) == 0
        and found["Steps begun ahead"][0].get("same", True)
        and answers.get("same as eager fp16", 1.0) >= (MIN_SAME_TEXTS if has_texts else MIN_SAME_RANDOM)
        and answers.get("log-probability off eager fp32", 0.0) <= MAX_DIFFERENCE
    )


def prepare(arguments: argparse.Namespace) -> int:
    """Write all graphs, for a machine that cannot make them."""
    folder = Path(arguments.graphs)
    for precision in DTYPES:
        graphs_of("en-de", transformer_of(Checkpoint.load(SHIPPED).model), precision, folder)
    for size in ("toy",) if arguments.quick else ("base", "big"):
        graphs_of(size, random_model(size), "fp16", folder)
    return 0


def main() -> int:
    """Run the command line."""
    found = parser(__doc__)
    found.add_argument("command", nargs="?", choices=("measure", "prepare"), default="measure")
    found.add_argument("--device", default="cuda:0", help="cpu, cuda or cuda:N")
    found.add_argument("--graphs", default="bundles/gpu", help="Folder of graphs; missing ones are made there.")
    found.add_argument("--texts", default="", help="English text, one sentence a line.")
    found.add_argument("--references", default="", help="Its German translation, for BLEU.")
    found.add_argument("--max-seconds", type=float, default=420, help="No part begins after so long.")
    arguments = found.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        return prepare(arguments) if arguments.command == "prepare" else measure(arguments)
    return 130


if __name__ == "__main__":
    sys.exit(main())
