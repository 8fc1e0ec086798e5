"""Run a program where the real onnxruntime-gpu sees a GPU that is none.

    python -m benchmarks.gpu_stub fetch                        unpack the wheel (256 MB), once
    python -m benchmarks.gpu_stub run SCRIPT [ARGUMENT ...]    run a script of Python, or `-m MODULE`, there
    python -m benchmarks.gpu_stub exercise BUNDLE ...          run every graph of bundles there, and say what was seen

The device has host memory for memory, succeeds in everything, and computes nothing: every number that a graph gives is whatever lay
there before. It shows where nodes are placed, which kernels are chosen and what they refuse, what is allocated, captured and
replayed. It shows neither numbers nor speed.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_stub.bed import default_folder, fetch, prepare
from benchmarks.gpu_stub.build import StubError

INSIDE = "benchmarks.gpu_stub.inside"
EXERCISE = "benchmarks.gpu_stub.exercise"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_stub", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="of wheel and libraries (default %(default)s)")
    parser.add_argument("--bytes", type=int, default=80 * 2**30, help="memory of the device (default %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="unpack the wheel, once")
    run = commands.add_parser("run", help="run a script there")
    run.add_argument("--report", type=Path, help="file for what was seen, as JSON (default: standard error)")
    run.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments, or -m MODULE and its")
    exercise = commands.add_parser("exercise", help="run every graph of bundles there")
    exercise.add_argument("bundles", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "fetch":
            fetch(given.folder)
        bed = prepare(given.folder)
    except StubError as error:
        print(error, file=sys.stderr)
        return 1
    if given.command == "fetch":
        print(f"{bed.libraries} stands in for CUDA's libraries")
        return 0
    if given.command == "exercise":
        told = ["-m", EXERCISE, *map(str, given.bundles)]
    else:
        told = ["-m", INSIDE, *(["--report", str(given.report)] if given.report else []), "--", *given.script]
    sys.stdout.flush()
    os.execvpe(sys.executable, [sys.executable, *told], bed.environment({"GPU_STUB_BYTES": str(given.bytes)}))


def write_report(report: object, path: Path | None) -> None:
    """Write JSON to a file, or to standard error."""
    text = json.dumps(report, indent=2) + "\n"
    if path is None:
        sys.stderr.write(text)
    else:
        path.write_text(text, encoding="utf-8")
