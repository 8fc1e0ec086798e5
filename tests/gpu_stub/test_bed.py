"""What surrounds the stub device: the environment of a program, what a dump and a profile say, and what is missing."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_stub.bed import Bed, prepare
from benchmarks.gpu_stub.build import StubError
from benchmarks.gpu_stub.main import main
from benchmarks.gpu_stub.sessions import placement
from benchmarks.gpu_stub.watch import Launches, parse


def test_a_program_finds_wheel_and_libraries_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs")
    environment = Bed(tmp_path, tmp_path / "lib").environment({"GPU_STUB_BYTES": "7"})
    modules = environment["PYTHONPATH"].split(":")
    assert modules[0] == str(tmp_path / "wheel") and modules[-1] == "/mine"
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path / 'lib'}:/theirs"
    assert environment["GPU_STUB_BYTES"] == "7"


def test_without_a_wheel_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StubError, match=r"onnxruntime-gpu==\S+ is not in .* \(make cuda-stub, or DRAGOMAN_CUDA_STUB=FOLDER\)"):
        prepare(tmp_path)
    assert main(["--folder", str(tmp_path), "run", "script.py"]) == 1
    assert "make cuda-stub" in capsys.readouterr().err


def test_a_dump_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "call\tcudaMalloc\t3",
        "kernel\t_Z4copyi\t1\t2\t0",
        "kernel\t_Z4copyi\t4\t0\t9",
        "stream\t1\t12",
        "memory\tpeak_bytes\t4096",
        "graphs\tnum_captures\t2",
        "fault\tmemory is given back twice\t5",
    )
    seen = parse(lines)
    assert seen.calls == {"cudaMalloc": 3} and seen.streams == {1: 12} and seen.graphs == {"num_captures": 2}
    assert seen.memory == {"peak_bytes": 4096} and seen.faults == {"memory is given back twice": 5}
    assert seen.launches_of("copy") == Launches(5, 2, 9) and seen.launches_of("move") == Launches(0, 0, 0)
    assert list(seen.as_dict()["kernels"].values()) == [{"run": 5, "captured": 2, "replayed": 9}]
    with pytest.raises(ValueError, match="no line of a dump"):
        parse(["nonsense\tx\t1"])


def node(name: str, operator: str, provider: str, index: str) -> dict[str, Any]:
    return {
        "cat": "Node",
        "name": f"{name}_kernel_time",
        "args": {"op_name": operator, "provider": provider, "node_index": index},
    }


def test_a_node_that_ran_often_is_one() -> None:
    profile = [
        {"cat": "Session", "name": "model_run", "args": {}},
        *(node("a", "MatMul", "CUDAExecutionProvider", "1") for _ in range(3)),
        node("b", "MatMul", "CUDAExecutionProvider", "2"),
        node("c", "MemcpyToHost", "CUDAExecutionProvider", "3"),
        node("d", "Shape", "CPUExecutionProvider", "4"),
        {"cat": "Node", "name": "d_fence_before", "args": {"op_name": "Shape"}},
    ]
    assert placement(profile) == {
        "CUDAExecutionProvider": {"MatMul": 2, "MemcpyToHost": 1},
        "CPUExecutionProvider": {"Shape": 1},
    }
