"""What gpu-check finds: on host memory everything works, and each thing that does not is named with what to do."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.server.runtime.device import check
from dragoman.server.runtime.device.check import Finding, GpuCheck, Wanted, cuda_findings, kernels_of
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from dragoman.server.runtime.device.steps import Likeliest
from tests.server.runtime.conftest import FailingDevice

ROOT = Path(__file__).resolve().parents[4]
USES = ["encode", "step", "capture", "replay", "score", "attention", "memory"]
WANTED = Wanted(max_slots=4, prefill_tokens=64)


@pytest.fixture(scope="module")
def half_bundle(shipped_bundle: Callable[..., Path]) -> Path:
    return shipped_bundle("en-de", "fp16")


def findings(bundle: Path, device: Any, wanted: Wanted = WANTED) -> dict[str, Finding]:
    found = list(GpuCheck(bundle, lambda: device, wanted).run())
    assert len({finding.name for finding in found}) == len(found)
    return {finding.name: finding for finding in found}


def test_all_of_it_is_tried_in_the_order_of_serving(half_bundle: Path) -> None:
    found = findings(half_bundle, FailingDevice(max_bytes=4 * 2**30))
    assert list(found) == ["bundle", "device", "load", *USES]
    assert all(finding.is_good and not finding.advice for finding in found.values()), list(map(str, found.values()))
    assert found["replay"].text == "3 steps have the bits of plain ones"
    assert re.search(r"4\.00 GiB free before, .* after; 3\.60 GiB may be taken", found["memory"].text)
    assert all("\n" not in str(finding) for finding in found.values())


def test_a_bundle_for_the_cpu_is_the_last_line(tiny_bundle: Path) -> None:
    found = findings(tiny_bundle, FailingDevice())
    assert list(found) == ["bundle"]
    assert str(found["bundle"]).startswith("FAIL  bundle: ") and "--precision fp16" in found["bundle"].advice


def test_a_folder_that_is_no_bundle_is_the_last_line(tmp_path: Path) -> None:
    assert [finding.is_good for finding in findings(tmp_path, FailingDevice()).values()] == [False]


def test_a_device_that_cannot_be_opened_is_the_last_line(half_bundle: Path) -> None:
    def refuse() -> Any:
        raise DeviceError("cudaSetDevice: cudaErrorDevicesUnavailable")

    *_, last = GpuCheck(half_bundle, refuse, WANTED).run()
    assert not last.is_good and last.name == "device" and "nvidia-smi" in last.advice


def test_an_old_device_is_told_apart_and_the_rest_is_tried(half_bundle: Path) -> None:
    device = FailingDevice()
    device.compute_capability = (7, 5)
    found = findings(half_bundle, device)
    assert not found["device"].is_good and "compute capability 7.5" in found["device"].text
    assert found["score"].is_good


def test_too_little_memory_is_the_last_line_and_says_what_fits(half_bundle: Path) -> None:
    found = findings(half_bundle, FailingDevice(max_bytes=2**20))
    assert list(found) == ["bundle", "device", "load"]
    assert not found["load"].is_good and "not even one slot fits" in found["load"].text and "--max-slots" in found["load"].advice


def test_a_capture_that_fails_is_said_with_its_reason(half_bundle: Path) -> None:
    device = FailingDevice()
    device.capture_error = RuntimeError("CUDA failure 900:\n operation not permitted")
    found = findings(half_bundle, device)
    assert [name for name, finding in found.items() if not finding.is_good] == ["capture"]
    assert "900" in found["capture"].text and "--gpu-graphs never" in found["capture"].advice


def test_a_capture_that_memory_is_too_short_for_is_said(half_bundle: Path) -> None:
    device = FailingDevice()
    device.has_one_shortage = True
    found = findings(half_bundle, device)
    assert not found["capture"].is_good and "2 steps" in found["capture"].text and "--max-slots" in found["capture"].advice
    assert found["replay"].text == "2 steps have the bits of plain ones"


def test_without_graphs_nothing_is_captured_or_compared(half_bundle: Path) -> None:
    device = FailingDevice()
    device.capture_error = RuntimeError("CUDA failure 900: operation not permitted")
    found = findings(half_bundle, device, replace(WANTED, graphs="never"))
    assert all(finding.is_good for finding in found.values()) and "never" in found["capture"].text
    assert found["replay"].text == "nothing is captured" and device.num_left == 0


@pytest.mark.parametrize("error", [DeviceError, RuntimeError])
def test_what_cannot_be_loaded_is_one_line(half_bundle: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    device = FailingDevice()

    def refuse(*_: Any, **__: Any) -> None:
        raise error("decoder.onnx: ONNX Runtime cannot load it:\nno kernel\n")

    monkeypatch.setattr(device, "open_session", refuse)
    found = findings(half_bundle, device)
    assert list(found) == ["bundle", "device", "load"] and not found["load"].is_good and found["load"].advice
    assert "cannot load it: no kernel. " in str(found["load"]) and "\n" not in str(found["load"])


def test_what_to_do_depends_on_no_folders_name(tmp_path: Path) -> None:
    assert findings(tmp_path / "exports", FailingDevice())["bundle"].advice == check.AGAIN


def test_a_run_that_fails_is_said_and_the_others_are_tried(half_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : present_key and\npresent_value are required")

    monkeypatch.setattr(check.DeviceRunner, "prefill", refuse)
    found = findings(half_bundle, FailingDevice())
    assert list(found) == ["bundle", "device", "load", *USES]
    assert "present_key and present_value are required" in found["encode"].text and "report it" in found["encode"].advice
    assert found["score"].is_good


@pytest.mark.parametrize("number", [np.nan, np.inf, 0.5])
def test_numbers_that_are_no_probabilities_are_found(half_bundle: Path, monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    decode = check.DeviceRunner.decode

    def broken(self: Any, *arguments: Any) -> Likeliest:
        found = decode(self, *arguments)
        return Likeliest(found.ids, np.full_like(found.log_probs, number))

    monkeypatch.setattr(check.DeviceRunner, "decode", broken)
    assert not findings(half_bundle, FailingDevice())["step"].is_good


def test_a_replay_of_other_bits_is_found(half_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = check.DeviceRunner.decode
    count = 0

    def shifted(self: Any, *arguments: Any) -> Likeliest:
        nonlocal count
        count += 1
        found = decode(self, *arguments)
        return Likeliest(found.ids, found.log_probs - count * np.float32(1e-3))

    monkeypatch.setattr(check.DeviceRunner, "decode", shifted)
    found = findings(half_bundle, FailingDevice())
    assert not found["replay"].is_good and "differ" in found["replay"].text


def test_memory_beyond_the_plan_is_found(half_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FailingDevice(max_bytes=4 * 2**30)
    encode = check.GpuCheck._encode

    def greedy(self: GpuCheck, *arguments: Any) -> Any:
        device.num_bytes = 4 * 2**30 - 1000
        return encode(self, *arguments)

    monkeypatch.setattr(check.GpuCheck, "_encode", greedy)
    found = findings(half_bundle, device)
    assert not found["memory"].is_good and "--gpu-memory-gib" in found["memory"].advice


def test_no_memory_for_a_source_is_said(half_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OutOfDeviceMemory("Available memory of 0 is smaller than requested bytes of 2048")

    monkeypatch.setattr(check.DeviceRunner, "prefill", refuse)
    assert "Available memory" in findings(half_bundle, FailingDevice())["encode"].text


def test_kernels_are_counted_by_node() -> None:
    said = """Operator=GroupQueryAttention Node=GroupQueryAttention_0 DataType=fp16 SdpaKernel=FLASH_ATTENTION
noise
Operator=GroupQueryAttention Node=GroupQueryAttention_0 DataType=fp16 SdpaKernel=FLASH_ATTENTION
Operator=GroupQueryAttention Node=GroupQueryAttention_1 DataType=fp16 SdpaKernel=CUDNN_FLASH_ATTENTION
"""
    assert kernels_of(said) == {"FLASH_ATTENTION": 1, "CUDNN_FLASH_ATTENTION": 1}


def test_what_native_code_says_is_kept_off_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    with check._standard_output() as said:
        os.write(1, b"Operator=GroupQueryAttention Node=n SdpaKernel=MATH\n")
    assert kernels_of(said()) == {"MATH": 1}
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({}, [("driver", True), ("libraries", True)]),
        ({"wheel_obstacle": "the CPU build"}, [("libraries", False)]),
        ({"driver_obstacle": "there is no NVIDIA driver"}, [("driver", False)]),
        ({"library_obstacle": "libcublas.so.13 cannot be loaded"}, [("driver", True), ("libraries", False)]),
    ],
)
def test_what_cuda_needs_is_looked_for_first(
    monkeypatch: pytest.MonkeyPatch, broken: dict[str, str], expected: list[tuple[str, bool]]
) -> None:
    for name in ("wheel_obstacle", "library_obstacle"):
        monkeypatch.setattr(check, name, partial(broken.get, name, ""))
    monkeypatch.setattr(check, "driver_obstacle", lambda ordinal: broken.get("driver_obstacle", ""))
    monkeypatch.setattr(check, "driver_versions", lambda: "driver for CUDA 13.1, runtime of CUDA 13.0")
    found = list(cuda_findings(0))
    assert [(finding.name, finding.is_good) for finding in found] == expected
    for reason in broken.values():
        assert reason in found[-1].text


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dragoman", "gpu-check", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_rehearses_without_a_gpu(half_bundle: Path) -> None:
    result = command(str(half_bundle), "--device", "cpu", "--max-slots", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"ok    {name}" for name in ("bundle", "device", "load", *USES)]
    assert json.loads((half_bundle / "bundle.json").read_text())["version"] in lines[0]


def test_the_command_reads_the_servers_settings(half_bundle: Path, tmp_path: Path) -> None:
    """A flag goes before the environment, the environment before the file, as the server has it."""
    file = tmp_path / "dragoman.toml"
    file.write_text('models = "/elsewhere"\ndevice = "cpu"\nmax_slots = 2\ngpu_row_buckets = [1, 2]\n')
    for arguments, environment, num_slots in (((), {}, 2), ((), {"DRAGOMAN_MAX_SLOTS": "3"}, 3), (("--max-slots", "4"), {}, 4)):
        result = command(str(half_bundle), *arguments, DRAGOMAN_CONFIG=str(file), **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"load: {num_slots} slots" in result.stdout
    assert "load: 2 slots" in command(str(half_bundle), "--config", str(file)).stdout
    assert "capture: off" in command(str(half_bundle), DRAGOMAN_CONFIG=str(file), DRAGOMAN_GPU_GRAPHS="never").stdout


def test_without_a_gpu_the_command_says_so_in_one_line(half_bundle: Path) -> None:
    if not check.wheel_obstacle() and not check.driver_obstacle(0):
        pytest.skip("there is a GPU")
    result = command(str(half_bundle))
    assert result.returncode == 1 and not result.stderr
    assert len(result.stdout.splitlines()) == 1 and result.stdout.startswith("FAIL  ")


def test_the_exit_code_tells_an_init_container(tiny_bundle: Path) -> None:
    result = command(str(tiny_bundle), "--device", "cpu")
    assert result.returncode == 1 and "--precision fp16" in result.stdout


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--device", "tpu", "device: 'tpu' is not auto, cpu, cuda or cuda:N (flag --device)"),
        ("--gpu-attention-kernels", "xqa", "gpu_attention_kernels: 'xqa' is not auto, and none of flash"),
        ("--max-slots", "0", "max_slots: 0: "),
    ],
)
def test_a_wrong_argument_is_named(tiny_bundle: Path, flag: str, value: str, message: str) -> None:
    result = command(str(tiny_bundle), flag, value)
    assert result.returncode == 2 and message in result.stderr
