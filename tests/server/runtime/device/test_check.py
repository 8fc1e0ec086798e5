"""`dragoman gpu-check`: on host memory everything works, and each thing that does not is named with advice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.server.runtime.device import check
from dragoman.server.runtime.device.check import Finding, GpuCheck, Wanted, kernels_of
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.runner import Candidates
from tests.export.conftest import Export
from tests.server.runtime.conftest import FailingDevice

ROOT = Path(__file__).resolve().parents[4]
BEFORE = ["bundle", "device", "load"]
ALL = [*BEFORE, "encode", "step", "capture", "replay", "score", "attention", "memory"]
WANTED = Wanted(max_slots=4, prefill_tokens=64)
Findings = dict[str, Finding]


@pytest.fixture
def half_bundle(export: Export) -> Path:
    return export("tiny", "fp16").directory


def findings(bundle: Path, device: Any, wanted: Wanted = WANTED) -> Findings:
    found = list(GpuCheck(bundle, lambda: device, wanted).run())
    assert len({finding.name for finding in found}) == len(found)
    assert all("\n" not in str(finding) for finding in found)
    return {finding.name: finding for finding in found}


def failed(found: Findings) -> list[str]:
    return [name for name, finding in found.items() if not finding.is_good]


class Unloadable(FailingDevice):
    """A device that loads no graph."""

    error: type[Exception] = DeviceError

    def open_session(self, *_: Any, **__: Any) -> Any:
        raise self.error("decoder.onnx: ONNX Runtime cannot load it:\nno kernel\n")


class Greedy(FailingDevice):
    """A device of which more is taken than was planned."""

    def synchronize(self) -> None:
        self.num_bytes = 4 * 2**30 - 1000


CAPTURE_ERROR = RuntimeError("CUDA failure 900:\n operation not permitted")
# Attributes of a device, the findings that fail, and a part of each of some findings.
CASES: list[tuple[dict[str, Any], list[str], list[tuple[str, str]]]] = [
    ({}, [], [("replay", "3 steps have the bits of plain ones"), ("memory", "4.00 GiB free before, "), ("memory", "3.60 GiB may")]),
    ({"compute_capability": (7, 5)}, ["device"], [("device", "compute capability 7.5")]),
    ({"max_bytes": 2**20}, ["load"], [("load", "not even one slot fits"), ("load", "--max-slots")]),
    ({"kind": Unloadable}, ["load"], [("load", "ONNX Runtime cannot load it: no kernel. ")]),
    ({"has_one_shortage": True}, ["capture"], [("capture", "2 steps"), ("capture", "--max-slots"), ("replay", "2 steps have the")]),
    (
        {"capture_error": CAPTURE_ERROR},
        ["capture"],
        [("capture", "900"), ("capture", "works without graphs"), ("replay", "nothing is captured")],
    ),
    ({"kind": Greedy}, ["memory"], [("memory", "--gpu-memory-gib")]),
]


@pytest.mark.parametrize(("attributes", "failing", "parts"), CASES)
def test_findings_come_in_the_order_of_serving_and_advise_where_one_fails(
    half_bundle: Path, attributes: dict[str, Any], failing: list[str], parts: list[tuple[str, str]]
) -> None:
    device = attributes.get("kind", FailingDevice)(max_bytes=attributes.get("max_bytes", 4 * 2**30))
    for name in attributes.keys() - {"kind", "max_bytes"}:
        setattr(device, name, attributes[name])
    found = findings(half_bundle, device)
    assert list(found) == (BEFORE if failing == ["load"] else ALL) and failed(found) == failing
    assert all(bool(finding.advice) is not finding.is_good for finding in found.values())
    assert all(part in str(found[name]) for name, part in parts), list(map(str, found.values()))


def test_check_ends_with_a_folder_or_a_device_that_cannot_be_opened(half_bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    found = findings(tiny_bundle, FailingDevice())
    assert list(found) == ["bundle"]
    assert str(found["bundle"]).startswith("FAIL  bundle: ") and "--precision fp16" in found["bundle"].advice
    found = findings(tmp_path / "exports", FailingDevice())
    assert list(found) == failed(found) == ["bundle"] and found["bundle"].advice == check.AGAIN

    def refuse() -> Any:
        raise DeviceError("cudaSetDevice: cudaErrorDevicesUnavailable")

    *_, last = GpuCheck(half_bundle, refuse, WANTED).run()
    assert not last.is_good and last.name == "device" and "nvidia-smi" in last.advice
    line = "Operator=GroupQueryAttention Node=GroupQueryAttention_{} DataType=fp16 SdpaKernel={}\n"
    told = "".join(line.format(*each) for each in ((0, "FLASH_ATTENTION"), (0, "FLASH_ATTENTION"), (1, "CUDNN_FLASH_ATTENTION")))
    assert kernels_of(f"noise\n{told}") == {"FLASH_ATTENTION": 1, "CUDNN_FLASH_ATTENTION": 1}, "one of each node"


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_failed_run_is_named_and_the_others_are_tried(
    half_bundle: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: Any) -> None:
        raise error("INVALID_ARGUMENT : present_key and\npresent_value are required")

    monkeypatch.setattr(check.DeviceRunner, "prefill", refuse)
    found = findings(half_bundle, FailingDevice())
    assert list(found) == ALL and "encode" in failed(found) and found["score"].is_good
    assert "present_key and present_value are required" in found["encode"].text and "report it" in found["encode"].advice


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *((lambda log_probs, count, number=number: np.full_like(log_probs, number), "step") for number in (np.nan, np.inf, 0.5)),
        (lambda log_probs, count: log_probs - count * np.float32(1e-3), "replay"),
    ],
)
def test_wrong_results_are_found(half_bundle: Path, monkeypatch: pytest.MonkeyPatch, change: Any, name: str) -> None:
    step, count = check.DeviceRunner.step, 0

    def broken(self: Any, *arguments: Any) -> Candidates:
        nonlocal count
        count += 1
        found = step(self, *arguments)
        return Candidates(found.ids, change(found.log_probs, count))

    monkeypatch.setattr(check.DeviceRunner, "step", broken)
    found = findings(half_bundle, FailingDevice())
    assert name in failed(found) and (name == "step" or "differ" in found[name].text)


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words, environ = [sys.executable, "-m", "dragoman", "gpu-check", *map(str, arguments)], os.environ | environment
    return subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)


def test_command_rehearses_without_a_gpu_with_the_servers_settings(half_bundle: Path, tmp_path: Path) -> None:
    """A flag goes before the environment, the environment before the file, as in the server."""
    file = tmp_path / "dragoman.toml"
    file.write_text('models = "/elsewhere"\ndevice = "cpu"\nmax_slots = 2\n')
    given = {"DRAGOMAN_CONFIG": str(file), "DRAGOMAN_MAX_SLOTS": "3"}
    for bundle, flags, environment, code, parts in (
        (half_bundle, [], given, 0, ["load: 3 slots"]),
        (half_bundle, ["--max-slots", "4", "--config", file], {}, 0, ["load: 4 slots"]),
        (half_bundle, ["--device", "cuda"], {}, 1, ["FAIL  libraries: "]),
        (half_bundle, ["--device", "tpu"], {}, 2, ["device: 'tpu' is not auto, cpu, cuda or cuda:N (flag --device)"]),
    ):
        result = command(bundle, *flags, **environment)
        if code == 0:
            assert [line.split(":")[0] for line in result.stdout.splitlines()] == [f"ok    {name}" for name in ALL]
        assert result.returncode == code and all(part in result.stdout + result.stderr for part in parts)
    told = [json.loads(line) for line in command(half_bundle, "--json", **given).stdout.splitlines()]
    assert [(line["name"], line["is_good"]) for line in told] == [(name, True) for name in ALL]
