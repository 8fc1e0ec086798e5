"""A large model from another library's folder to decode steps: seconds and memory of each stage, beside CTranslate2.

    python -m benchmarks.large [--shape nllb-600m|mid|small] [--folder FOLDER] [--threads N]

Every stage is a process of its own, as an operator would run it: `dragoman import`, `dragoman export` in fp32, in int8 and in int8
with a shortlist, then loading and decode steps. It needs `transformers`, `ctranslate2`, and for the largest shape 24 GB of memory
and 30 GB of disk. Folders that are there already from a run before are taken as they are, and their stages left out.
"""

import argparse
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.report import environment, write
from benchmarks.large.child import Measured, result_of, run
from benchmarks.large.folder import SHAPES, Shape, words
from dragoman.server.cores import available_cores

EXPORTS = {"fp32": ["--precision", "fp32"], "int8": ["--precision", "int8"], "int8, shortlist": ["--precision", "int8"]}
LOADED = ("loaded in, s", "loaded, MiB", "in no file, MiB", "choices", "1 rows, ms", "8 rows, ms", "64 rows, ms")
PACKAGES = ("onnxruntime", "torch", "transformers", "ctranslate2")


def main() -> None:
    """Run every stage; write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="nllb-600m")
    parser.add_argument("--folder", type=Path, help="Keep what is made there; by default a temporary one.")
    parser.add_argument("--threads", type=int, default=available_cores())
    asked = parser.parse_args()
    about = environment(*PACKAGES)
    with ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="large.")))
        folder.mkdir(parents=True, exist_ok=True)
        rows = Stages(folder, asked.shape, SHAPES[asked.shape], asked.threads).rows()
    write(
        "large" if asked.shape == "nllb-600m" else f"large-{asked.shape}",
        f"A large model, from import to steps: {asked.shape}, random weights, {asked.threads} threads",
        about | {"threads": asked.threads, "shape": asked.shape},
        rows,
        [
            "Peak memory counts mapped files. Memory of a loaded model is what loading and running its sessions added: all, and "
            "what of it lies in no file, which every further engine takes for itself.",
            "A step decodes one token of every row, 8 to 32 tokens after the start, greedily; sources have 20 tokens.",
        ],
    )


class Stages:
    """The stages of one shape in one folder."""

    def __init__(self, folder: Path, name: str, shape: Shape, num_threads: int) -> None:
        self._folder, self._name, self._shape, self._num_threads = folder, name, shape, num_threads

    def rows(self) -> list[dict[str, Any]]:
        """Run them all; return a row each."""
        foreign, checkpoint = self._folder / "foreign", self._folder / "checkpoint"
        text = self._folder / "listed.txt"
        text.write_text("\n".join(words(self._shape.num_listed)) + "\n", encoding="utf-8")
        rows = [self._make("made with Transformers", foreign, ["-m", "benchmarks.large.folder", self._name, str(foreign)])]
        rows.append(self._make("import", checkpoint, ["-m", "dragoman", "import", str(foreign), str(checkpoint)]))
        for export, options in EXPORTS.items():
            output = self._bundle(export)
            listed = ["--shortlist", str(text)] if "shortlist" in export else []
            command = ["-m", "dragoman", "export", str(checkpoint), str(output), *options, *listed]
            rows.append(self._make(f"export {export}", output, command))
        theirs = self._folder / "ctranslate2"
        rows.append(self._make("CTranslate2's int8", theirs, ["-m", "benchmarks.large.convert", str(checkpoint), str(theirs)]))
        rows += [self._steps(f"steps {export}", "bundle", self._bundle(export)) for export in EXPORTS]
        rows.append(self._steps("steps CTranslate2 int8", "ctranslate2", theirs))
        return rows

    def _bundle(self, export: str) -> Path:
        return self._folder / f"bundle-{export.replace(', ', '-')}"

    def _make(self, stage: str, output: Path, arguments: list[str]) -> dict[str, Any]:
        """Run a stage that makes a folder, unless it is there."""
        if output.exists():
            return _row(stage, output, None)
        try:
            return _row(stage, output, self._run(stage, arguments))
        except BaseException:
            shutil.rmtree(output, ignore_errors=True)
            raise

    def _steps(self, stage: str, kind: str, model: Path) -> dict[str, Any]:
        """Load a model and time its steps."""
        measured = self._run(stage, ["-m", "benchmarks.large.steps", kind, str(model), str(self._num_threads)])
        found = result_of(measured)
        return _row(stage, model, measured) | {
            "loaded in, s": round(found["load_seconds"], 2),
            "loaded, MiB": found["memory_mib"]["rss"],
            "in no file, MiB": found["memory_mib"]["anonymous"],
            "choices": found.get("num_choices", ""),
            **{f"{rows} rows, ms": round(value, 2) for rows, value in found["step_ms"].items()},
        }

    def _run(self, stage: str, arguments: list[str]) -> Measured:
        print(f"{stage} …", flush=True)
        measured = run(arguments, self._folder / f"{stage.replace(' ', '-').replace(',', '')}.log")
        print(f"{stage}: {measured.seconds:.1f} s, {measured.peak_gib:.2f} GiB", flush=True)
        return measured


def _row(stage: str, output: Path, measured: Measured | None) -> dict[str, Any]:
    """Return a stage's row; what it has no figures for stays empty."""
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return {
        "stage": stage,
        "seconds": "" if measured is None else round(measured.seconds, 1),
        "peak, GiB": "" if measured is None else round(measured.peak_gib, 2),
        "on disk, MiB": round(size / 2**20, 1),
        **dict.fromkeys(LOADED, ""),
    }
