"""Where a server runs: fp16 on the CPU, and CUDA or an error."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def half_models(shipped_bundle: Callable[..., Path]) -> Path:
    """Folder with the en-de model in fp16."""
    return shipped_bundle("en-de", "fp16").parent


def start_in_vain(models: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dragoman", "serve", "--models", str(models), "--port", "0", "--metrics-port", "0", *flags]
    return subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=120)


def reason_in_one_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return why there was no start, having made sure that no other line is a warning or worse, however many models there are."""
    events = [json.loads(line) for line in result.stderr.splitlines()]
    [line] = [event for event in events if event["level"] != "info"]
    assert line["event"] == "cannot serve" and "exception" not in line
    return str(line["reason"])


def test_an_fp16_bundle_is_served_on_the_cpu(half_models: Path, serve: Callable[..., Any]) -> None:
    from dragoman.client.sync import Client

    with serve(half_models, "--device", "cpu") as server, Client(server.address) as client:
        (model,) = client.models()
        assert (model.precision, model.device) == ("fp16", "cpu")
        assert client.generate("A dog runs through the snow.").text.startswith("Ein Hund")
        score = client.score("A dog.", "Ein Hund.")
        assert -20 < score.log_prob < 0
        assert server.terminate() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_stops_the_start_and_says_why(half_models: Path) -> None:
    result = start_in_vain(half_models, "--device", "cuda")
    assert result.returncode == 1
    reason = reason_in_one_line(result)
    assert "--device cuda: " in reason and "pip install --editable '.[gpu]'" in reason


def test_cuda_is_refused_for_a_bundle_that_it_does_not_run(bundles: Path) -> None:
    result = start_in_vain(bundles, "--device", "cuda:0")
    assert result.returncode == 1
    assert reason_in_one_line(result).endswith("CUDA runs fp16 and bf16 bundles, and this one is fp32; export it anew")


def test_an_unknown_device_is_a_wrong_setting(bundles: Path) -> None:
    result = start_in_vain(bundles, "--device", "tpu")
    assert result.returncode == 2
    assert "device: 'tpu' is not auto, cpu, cuda or cuda:N (flag --device)" in result.stderr
