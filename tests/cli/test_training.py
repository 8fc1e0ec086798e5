"""Commands that train and that make text to train on: what they write, and what they say while they work."""

import gzip
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dragoman.model.training.file import EXAMPLE
from tests.cli.conftest import assert_refused

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def train(run_command: Run, files: Path) -> Callable[..., str]:
    """Train a configuration into a folder and return standard error."""

    def train(config: str, output: str, *options: object) -> str:
        asked = ("--output", files / output, "--device", "cpu", "--threads", 1, *options)
        code, out, err = run_command("train", files / config, *asked)
        assert (code, out) == (0, f"wrote {files / output}\n"), err
        return err

    return train


def test_the_example_is_printed_and_training_starts_with_it(run_command: Run, train: Callable[..., str], files: Path) -> None:
    assert run_command("train", "--example") == (0, EXAMPLE, "")
    (files / "toy.toml").write_text(EXAMPLE + "max_steps = 2\n", encoding="utf-8")
    train("toy.toml", "out")
    assert json.loads((files / "out/config.json").read_text(encoding="utf-8"))["name"] == "toy"
    assert tomllib.loads((files / "out/training/config.toml").read_text(encoding="utf-8"))["training"]["max_steps"] == 2


def test_training_without_a_terminal_tells_how_it_goes_and_goes_on_from_a_checkpoint(train, files: Path) -> None:
    lines = train("small.toml", "out").splitlines()
    assert all(line.startswith("dragoman: ") and line.isprintable() for line in lines)
    for expected in ("27 pairs", "by rule ", "step 1 of 3, loss ", "validation at step 3 of 3: "):
        assert sum(expected in line for line in lines) == 1, expected
    summary = json.loads((files / "out/training/summary.json").read_text(encoding="utf-8"))
    assert summary["chosen"]["training.warmup_steps"] == 1 and summary["text"]["num_pairs"] == 27
    assert "resumed at step 3 of 3" in train("small.toml", "out")
    assert json.loads((files / "out/training/summary.json").read_text(encoding="utf-8"))["chosen"] == summary["chosen"]
    with (files / "small.toml").open("a") as config:
        config.write("seed = 2\nlearning_rate = 1e-9\nwarmup_steps = 2000\nmax_tokens = 4096\n")
    err = train("small.toml", "second", "--initial-checkpoint", files / "out")
    warned = [line.split(": ")[2] for line in err.splitlines() if line.startswith("dragoman: warning: ")]
    assert warned == ["training.warmup_steps", "training.max_tokens"]
    first, second = (load_file(files / name / "model.safetensors") for name in ("out", "second"))
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_training_on_a_gpu_that_is_not_there_fails(run_command: Run, files: Path) -> None:
    code, out, err = run_command("train", files / "small.toml", "--output", files / "out", "--device", "cuda")
    assert (code, out) == (1, "") and err.endswith("dragoman: --device cuda: PyTorch sees no CUDA device\n")


def test_the_nearest_candidates_are_written(run_command: Run, files: Path) -> None:
    (files / "more").write_text("the cow\na dog\ncats\na cat\n")
    output = files / "nearest.gz"
    assert run_command("nearest", files / "two", files / "more", "--reference", files / "two", "--output", output)[0] == 0
    assert gzip.decompress(output.read_bytes()) == b"a dog\na cat\n"


def test_text_for_rare_words_is_parallel(run_command: Run, files: Path) -> None:
    """A stand-in for the aligner links each word with the one at its place, or no words at all."""
    colours = ["red", "green", "white", "grey", "brown"] * 12
    (files / "en").write_text("".join(f"The {colour}{i} dog{i} sleeps here.\n" for i, colour in enumerate(colours)))
    (files / "de").write_text("".join(f"Der {colour}{i} Hund{i} schläft hier.\n" for i, colour in enumerate(colours)))
    aligner = files / "aligner"
    aligner.write_text('#!/bin/sh\nsed \'s/.*/0-0 1-1 2-2 3-3 4-4 5-5/\' "$2" | tee "$6" >"$8"\n')
    aligner.chmod(0o755)
    asked = ["augment", "--source-language", "en", "--target-language", "de", "--output-source", files / "more.en.gz"]
    asked += ["--output-target", files / "more.de", "--copies", 2, "--phrases", 1, "--aligner", aligner]
    code, out, _ = run_command(*asked, "--source", files / "en", "--target", files / "de")
    assert code == 0 and "120 sentences" in out
    english = gzip.decompress((files / "more.en.gz").read_bytes()).decode().splitlines()
    german = (files / "more.de").read_text().splitlines()
    assert len(german) > 120
    for source, target in zip(english, german, strict=True):
        assert re.findall(r"\d+", source) == re.findall(r"\d+", target)
    (files / "more.de").unlink()
    aligner.write_text('#!/bin/sh\nprintf "\\n\\n" >"$6"; cp "$6" "$8"\n')
    assert_refused(run_command(*asked, "--source", files / "two", "--target", files / "more"), f"{files}/two")
    assert not (files / "more.de").exists()
