"""Check and measure serving on a GPU with one command: `python -m benchmarks.gpu`.

Right: answers against eager PyTorch in single and half precision, captured steps against others, mixed searches. Fast: a step of
Transformer-base and -big at 1 to 512 rows, peers on the same GPU and weights, gRPC end to end. What a part needs that is not there
is said in its place, and the other parts go on.

It needs PyTorch with CUDA, onnx, onnxscript, safetensors, tokenizers and onnxruntime-gpu; engine and gRPC parts need the server's
libraries, peers Transformers and CTranslate2. Graphs can be made beforehand on any machine (`prepare`) and be given with --graphs.
`--device cpu --quick` runs all of it on small models without a GPU, which shows that it works, not how fast it is.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parity, speed
from benchmarks.gpu.models import graphs_of, open_device, random_model, random_sources, shipped_checkpoint
from dragoman.export.half import DTYPES
from dragoman.model.networks.transformer import transformer_of

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 3, 8)
# Answers to random tokens are long and hesitant: two ways of rounding part at ties that real text seldom has.
MIN_SAME_TEXTS, MIN_SAME_RANDOM, MAX_DIFFERENCE = 0.99, 0.8, 0.1


class Run:
    """One run: its settings, and what it has found so far, which is written after every part."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Open the device.

        Raises:
            DeviceError: If it cannot be used.
        """
        self.arguments = arguments
        # PyTorch comes first, so that ONNX Runtime finds the CUDA libraries that it has loaded.
        self.torch_device = "cpu" if arguments.device == "cpu" else arguments.device
        if self.torch_device != "cpu":
            torch.zeros(1, device=self.torch_device)
        self.device = open_device(arguments.device)
        self.folder = Path(arguments.graphs)
        self.found: dict[str, Any] = {"environment": self._environment()}

    def _environment(self) -> dict[str, Any]:
        import onnxruntime

        return {
            "device": self.device.name,
            "is_quick": self.arguments.quick,
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "onnxruntime": onnxruntime.__version__,
        }

    def part(self, name: str, do: Callable[[], Any]) -> None:
        """Do one part, unless its time is over; what it raises is kept in its place, and so is how long it took."""
        started = time.perf_counter()
        if started - START > self.arguments.max_seconds:
            self.found[name] = {"skipped": f"the {self.arguments.max_seconds} seconds are over"}
        else:
            try:
                self.found[name] = do()
            except ImportError as error:
                self.found[name] = {"skipped": f"{error.name or error} is not installed"}
            except Exception as error:  # the other parts go on; main returns 1
                traceback.print_exc()
                self.found[name] = {"failed": f"{type(error).__name__}: {error}"}
        seconds = round(time.perf_counter() - started, 1)
        self.found.setdefault("seconds", {})[name] = seconds
        print(f"{name}: {seconds} s", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Write what was found as JSON and as tables."""
        output = Path(self.arguments.output)
        output.mkdir(parents=True, exist_ok=True)
        (output / "gpu.json").write_text(json.dumps(self.found, indent=2) + "\n", encoding="utf-8")
        (output / "gpu.md").write_text(tables(self.found), encoding="utf-8")

    def answers(self, precision: str) -> dict[str, Any]:
        """Compare answers of the trained model with eager PyTorch's; with texts and references, BLEU too."""
        checkpoint = shipped_checkpoint()
        graphs = graphs_of("en-de", transformer_of(checkpoint.model), precision, self.folder)
        count = 12 if self.arguments.quick else 1000
        if self.arguments.texts:
            lines = Path(self.arguments.texts).read_text(encoding="utf-8").splitlines()[:count]
            sources = [[*ids, graphs.eos_id] for ids in checkpoint.tokenizers.source.encode_batch(lines)]
        else:
            sources = random_sources(graphs, count, 1, 40)
        models = parity.eager_models(transformer_of(checkpoint.model), DTYPES[precision], precision)
        found, tokens = parity.answers_against_eager(self.device, graphs, models, sources, self.torch_device)
        found["sources"] = self.arguments.texts or "random tokens; give --texts for real ones"
        if self.arguments.texts and self.arguments.references:
            references = Path(self.arguments.references).read_text(encoding="utf-8").splitlines()[:count]
            found["BLEU"] = parity.bleu([checkpoint.tokenizers.target.decode(ids) for ids in tokens], references)
        return found

    def graphs(self, size: str) -> Any:
        """Return the graphs of a random model in fp16."""
        return graphs_of(size, random_model(size), "fp16", self.folder)

    def peers(self, size: str) -> dict[str, Any]:
        """Compare with peers."""
        batches, num_tokens = ((1, 4), 6) if self.arguments.quick else ((1, 32, 128, 256), 64)
        rows, missing = speed.against_peers(
            self.device, size, random_model(size), self.graphs(size), batches, num_tokens, self.torch_device
        )
        return {"rows": rows, "missing": missing}

    def served(self) -> dict[str, Any]:
        """Serve the trained model with gRPC and translate as fast as one client can send."""
        from benchmarks.gpu.served import tokens_per_second

        return tokens_per_second(self.arguments.device, 40 if self.arguments.quick else 20_000, self.folder)


def measure(arguments: argparse.Namespace) -> int:
    """Do every part; return 1 if one failed or something is not right."""
    run = Run(arguments)
    sizes = ("toy",) if arguments.quick else ("base", "big")
    rows, num_steps = (QUICK_ROWS, 6) if arguments.quick else (ROWS, speed.NUM_STEPS)
    run.part("answers fp16", lambda: run.answers("fp16"))
    run.part("replay", lambda: parity.replay_against_plain(run.device, run.graphs(sizes[0]), max(rows)))
    run.part("ahead", lambda: parity.ahead_against_asked(run.device, run.graphs(sizes[0]), 5))
    for size in sizes:
        run.part(f"steps {size}", lambda size=size: speed.steps_by_rows(run.device, size, run.graphs(size), rows, num_steps))  # type: ignore[misc]
        if arguments.greedy == "both":
            run.part(f"greedy {size}", lambda size=size: speed.greedy_ways(run.device, size, run.graphs(size), rows, num_steps))  # type: ignore[misc]
    run.part("peers", lambda: run.peers(sizes[0]))
    if run.device.kind == "cuda":
        run.part("answers bf16", lambda: run.answers("bf16"))
    run.part("mixed searches", lambda: parity.mixed_searches(run.device, run.graphs(sizes[0]), 10 if arguments.quick else 60))
    run.part("grpc", run.served)
    print((Path(arguments.output) / "gpu.md").read_text(encoding="utf-8"))
    return int(not is_right(run.found, bool(arguments.texts)))


def is_right(found: dict[str, Any], has_texts: bool) -> bool:
    """Tell whether no part failed and every check came out right."""
    return (
        not any(isinstance(part, dict) and "failed" in part and part["failed"] for part in found.values())
        and found["replay"].get("num_different", 0) == 0
        and found["ahead"].get("same", True)
        and found["answers fp16"].get("same as eager fp16", 1.0) >= (MIN_SAME_TEXTS if has_texts else MIN_SAME_RANDOM)
        and found["answers fp16"].get("log-probability off eager fp32", 0.0) <= MAX_DIFFERENCE
    )


def prepare(arguments: argparse.Namespace) -> int:
    """Write all graphs, for a machine that cannot make them."""
    folder = Path(arguments.graphs)
    for precision in DTYPES:
        graphs_of("en-de", transformer_of(shipped_checkpoint().model), precision, folder)
    for size in ("toy",) if arguments.quick else ("base", "big"):
        graphs_of(size, random_model(size), "fp16", folder)
    return 0


def tables(found: dict[str, Any]) -> str:
    """Return what was found as Markdown."""
    lines = ["# On a GPU", "", ", ".join(f"{name} {value}" for name, value in found["environment"].items()), ""]
    for name, part in found.items():
        if name in ("environment", "seconds"):
            continue
        rows = part.get("rows") if isinstance(part, dict) and "rows" in part else part
        lines += [f"## {name}", ""]
        if isinstance(rows, list) and rows:
            lines += _table(rows)
        if isinstance(part, dict):
            lines += [f"- {key}: {value}" for key, value in part.items() if key != "rows"]
        lines.append("")
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(rows[0])
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("measure", "prepare"), default="measure")
    parser.add_argument("--device", default="cuda:0", help="cpu, cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--output", default=os.environ.get("OUT", "."), help="folder for gpu.json and gpu.md")
    parser.add_argument("--graphs", default="bundles/gpu", help="folder of graphs; what it lacks is made there")
    parser.add_argument("--texts", default="", help="English text, one sentence a line")
    parser.add_argument("--references", default="", help="its German translation, for BLEU")
    parser.add_argument(
        "--greedy", choices=("topk", "both"), default="topk", help="both: also time greedy steps that find their token by ArgMax"
    )
    parser.add_argument("--max-seconds", type=float, default=420, help="no part begins after so long")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        return prepare(arguments) if arguments.command == "prepare" else measure(arguments)
    return 130


START = time.perf_counter()
