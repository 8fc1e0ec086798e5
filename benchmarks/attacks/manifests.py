"""Bundles whose manifest is absurd: the command must say so in a line, and at once."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.harness.served import environment_of
from dragoman.export.bundle import MANIFEST_FILE

LIMIT_SECONDS = 20.0


def run(scene: Scene) -> Iterator[Figure]:
    """Try to serve each."""
    good = json.loads((scene.bundle / MANIFEST_FILE).read_text())
    for name, text in _texts(good):
        with tempfile.TemporaryDirectory() as folder:
            bundle = Path(folder) / "bundle"
            shutil.copytree(scene.bundle, bundle)
            (bundle / MANIFEST_FILE).write_text(text)
            yield Figure(name, _serve(scene.source, folder))


def _texts(good: dict[str, Any]) -> Iterator[tuple[str, str]]:
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("num_decoder_layers 3,000,000", {"num_decoder_layers": 3_000_000}),
        ("name `liveness`", {"name": "liveness"}),
        ("name of 100,000 characters", {"name": "n" * 100_000}),
        ("name with control characters", {"name": "a\x1b[2J\nb"}),
        ("max_source_tokens 10^30", {"max_source_tokens": 10**30}),
        ("max_source_tokens 1e30", {"max_source_tokens": 1e30}),
    )
    for name, change in changes:
        yield name, json.dumps(good | change)
    for depth in (900, 100_000):
        nested = "[" * depth + "]" * depth
        yield f"JSON of {depth:,} brackets", nested
        yield f"tensors of {depth:,} brackets", json.dumps(good | {"tensors": "here"}).replace('"here"', nested)


def _serve(source: Path, models: str) -> str:
    """Return how `dragoman serve` ends, after how many seconds and with what kind of output; it is ended when it serves."""
    ports = ("--host=127.0.0.1", "--port=0", "--http=false", "--metrics-host=127.0.0.1", "--metrics-port=0")
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "dragoman", "serve", f"--models={models}", *ports]
        process = subprocess.Popen(command, cwd=source, env=environment_of(source), stderr=said, stdout=said)
        try:
            while process.poll() is None and time.monotonic() < began + LIMIT_SECONDS and '"serving"' not in _read(said.fileno()):
                time.sleep(0.02)
            code, took = process.poll(), time.monotonic() - began
        finally:
            process.kill()
            process.wait()
        return describe(code, took, _read(said.fileno()))


def describe(code: int | None, took: float, text: str) -> str:
    """Return an ending in words; a command without a code was ended here."""
    if code is None:
        return f"serves after {took:.1f} s" if '"serving"' in text else f"no end in {took:.1f} s"
    said = "a traceback" if "Traceback" in text else f"{len(text.splitlines())} lines, {len(text)} characters"
    return f"exit {code} after {took:.1f} s, {said}"


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 1 << 20, 0).decode(errors="replace")


ATTACK = Attack("manifests", "bundles with absurd manifests", run)
