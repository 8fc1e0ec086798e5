"""The trained model en-de, texts for it with PyTorch's translations, and commands run as processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import greedy_search

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = ("A dog", "Two men", "A woman in a red coat", "The child", "An old man with a hat")
ENDS = ("runs through the snow.", "plays with a ball.", "are sitting on a bench.", "is standing in front of a house.", "sleeps.")


class Parallel(NamedTuple):
    """Sources, all different, and their translations."""

    sources: list[str]
    targets: list[str]


@pytest.fixture(scope="session")
def bundle(shipped_bundle: Callable[..., Path]) -> Path:
    return shipped_bundle("en-de")


@pytest.fixture(scope="session")
def parallel() -> Parallel:
    checkpoint = Checkpoint.load(ROOT / "model/pretrained/en-de")
    sources = [f"{subject} {end}" for subject in SUBJECTS for end in ENDS]
    tokenizers = checkpoint.tokenizers
    found = greedy_search(checkpoint.model, tokenizers.source.encode_batch(sources), 60)
    return Parallel(sources, [tokenizers.target.decode(hypothesis.ids) for hypothesis in found])


@pytest.fixture
def command(bundle: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Start `dragoman bulk` with the bundle."""

    def start(*arguments: object) -> "subprocess.Popen[str]":
        given = [sys.executable, "-m", "dragoman", "bulk", "--model", str(bundle), "--engines", "1", *map(str, arguments)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    return start


@pytest.fixture
def bulk(command: Callable[..., "subprocess.Popen[str]"]) -> Callable[..., tuple[int, str, str]]:
    """Run `dragoman bulk` with the bundle; return its exit code and what it printed on both streams."""

    def run(*arguments: object) -> tuple[int, str, str]:
        process = command(*arguments)
        out, errors = process.communicate(timeout=300)
        return process.returncode, out, errors

    return run
