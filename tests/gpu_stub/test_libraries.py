"""The stub libraries by themselves: what they export, keep and refuse. These tests need gcc, and no wheel."""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_stub.build import StubError, build, version_script
from benchmarks.gpu_stub.symbols import Library, libraries_of
from dragoman.server.runtime.device.cuda import CudaDevice
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory

OUT_OF_MEMORY, WRONG_CONFIGURATION, CAPTURING, BROKEN = 2, 9, 900, 901
TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3


class Size3(ctypes.Structure):
    """CUDA's dim3."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def ok(result: tuple[Any, ...]) -> Any:
    """Return what a function gives beside a status of success."""
    status, *values = result
    assert status == 0
    return values[0] if values else None


@pytest.fixture
def stream(cuda: Any) -> Iterator[int]:
    stream = ok(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    yield stream
    ok(cuda.cudaStreamDestroy(stream))


@pytest.fixture
def memory(cuda: Any) -> Iterator[Callable[[int], int]]:
    """Reserve memory of the device, given back after the test."""
    taken: list[int] = []

    def take(size: int) -> int:
        taken.append(ok(cuda.cudaMalloc(size)))
        return taken[-1]

    yield take
    for address in taken:
        ok(cuda.cudaFree(address))


@pytest.fixture
def kernel(loaded: SimpleNamespace, watch: Any) -> Any:
    """A registered kernel, by the address of the host's function for it."""
    host = ctypes.create_string_buffer(16)
    loaded.libcudart.__cudaRegisterFunction(None, host, None, b"_Z9my_kernelv", -1, None, None, None, None, None)
    return host


@pytest.fixture
def launch(loaded: SimpleNamespace, kernel: Any) -> Callable[..., int]:
    function = loaded.libcudart.cudaLaunchKernel
    function.argtypes = (ctypes.c_void_p, Size3, Size3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def launch(grid: tuple[int, int, int] = (1, 1, 1), block: tuple[int, int, int] = (32, 1, 1), size: int = 0, on: int = 0) -> int:
        return int(function(ctypes.addressof(kernel), Size3(*grid), Size3(*block), None, size, on))

    return launch


def symbols(path: Path) -> set[str]:
    output = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", str(path)], capture_output=True, text=True)
    return {line.split()[-1] for line in output.stdout.splitlines()}


def test_what_is_asked_for_is_exported_with_its_version(libraries: Path) -> None:
    assert {"cudaMalloc@@libcudart.so.13", "cudaNobodyWroteThis@@libcudart.so.13"} <= symbols(libraries / "libcudart.so.13")
    assert {"cuInit", "cuNobodyWroteThis"} <= symbols(libraries / "libcuda.so.1")


def test_what_a_binary_asks_for_is_found(libraries: Path, tmp_path: Path) -> None:
    """A small provider, linked with the libraries that another one's list made."""
    source, provider = tmp_path / "provider.c", tmp_path / "provider.so"
    source.write_text(
        'int cudaMalloc(void), cuInit(void), printf(const char *, ...);\nconst char *opened[] = {"libcudnn.so.9", "cudnnCreate"};\n'
        "int provide(void) { return cudaMalloc() + cuInit() + printf(opened[0]); }\n"
    )
    linked = [str(libraries / name) for name in ("libcudart.so.13", "libcuda.so.1")]
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), *linked, "-o", str(provider)], check=True)
    found = {library.name: library for library in libraries_of(provider)}
    assert found["libcudart.so.13"].symbols == {"libcudart.so.13": ["cudaMalloc"]}
    assert found["libcuda.so.1"].symbols == {"": ["cuInit"]}
    assert found["libcudnn.so.9"].symbols == {"": ["cudnnCreate"]} and found["libcudnn.so.9"].is_optional
    assert set(found) == {"libcudart.so.13", "libcuda.so.1", "libcudnn.so.9"}


def test_what_gcc_says_is_told(tmp_path: Path) -> None:
    with pytest.raises(StubError, match="gcc fails:"):
        build([Library("libwrong.so.1", {"": ["not a name"]})], tmp_path)
    assert version_script(Library("libcuda.so.1", {"": ["cuInit"]})) == ""


def test_what_nobody_wrote_succeeds_and_is_counted(loaded: SimpleNamespace, watch: Any) -> None:
    assert loaded.libcudart.cudaNobodyWroteThis(1, 2) == 0
    assert loaded.libcuda.cuNobodyWroteThis() == 0
    assert watch.read().calls == {"cudaNobodyWroteThis": 1, "cuNobodyWroteThis": 1}


def test_a_function_fails_as_it_is_told_to(cuda: Any, watch: Any) -> None:
    watch.fail("cudaStreamCreateWithFlags", 999, after=1, times=2)
    statuses = [cuda.cudaStreamCreateWithFlags(1)[0] for _ in range(4)]
    assert statuses == [0, 999, 999, 0]
    assert cuda.cudaGetLastError() == (999,) and cuda.cudaGetLastError() == (0,)


def test_memory_is_what_the_device_has(cuda: Any, watch: Any) -> None:
    watch.set_bytes(watch.read().memory["used_bytes"] + 4096)
    first = ok(cuda.cudaMalloc(1024))
    assert cuda.cudaMemGetInfo()[1] == 3072
    assert cuda.cudaMalloc(4096)[0] == OUT_OF_MEMORY
    ok(cuda.cudaFree(first))
    second = ok(cuda.cudaMalloc(4096))
    ok(cuda.cudaFree(second))
    assert cuda.cudaFree(second)[0] != 0
    memory = watch.read().memory
    assert (memory["num_allocations"], memory["num_frees"], memory["num_refusals"]) == (2, 2, 1)
    assert len(watch.read().faults) == 1


def test_copies_arrive_and_stay_within_what_is_reserved(cuda: Any, watch: Any, stream: int, memory: Callable[[int], int]) -> None:
    there, here, back = memory(1024), np.arange(1024, dtype=np.uint8), np.zeros(1024, np.uint8)
    ok(cuda.cudaMemcpyAsync(there, here.ctypes.data, 1024, TO_DEVICE, stream))
    ok(cuda.cudaMemcpy2DAsync(there + 512, 16, there, 32, 8, 4, WITHIN, stream))
    ok(cuda.cudaMemcpyAsync(back.ctypes.data, there, 1024, TO_HOST, stream))
    expected = here.copy()
    expected[512:576].reshape(4, 16)[:, :8] = here[:128].reshape(4, 32)[:, :8]
    np.testing.assert_array_equal(back, expected)
    assert not watch.read().faults
    for size, target, source, kind in (
        (1025, there, here.ctypes.data, TO_DEVICE),
        (8, here.ctypes.data, there, TO_DEVICE),
        (8, back.ctypes.data, here.ctypes.data, TO_HOST),
        (600, there, there + 600, WITHIN),
    ):
        assert cuda.cudaMemcpyAsync(target, source, size, kind, stream)[0] != 0
    assert sum(watch.read().faults.values()) == 4


def test_work_on_no_stream_is_refused(cuda: Any, watch: Any, memory: Callable[[int], int]) -> None:
    assert cuda.cudaMemsetAsync(memory(64), 0, 64, 0x1234)[0] != 0
    assert "work is given to 0x1234, which is no stream" in watch.read().faults


def test_captured_work_is_done_when_its_graph_is_launched(
    loaded: SimpleNamespace, cuda: Any, watch: Any, stream: int, memory: Callable[[int], int], launch: Callable[..., int]
) -> None:
    there, seen = memory(64), np.zeros(64, np.uint8)
    runtime, graph, instance = loaded.libcudart, ctypes.c_void_p(), ctypes.c_void_p()
    handle = ctypes.c_void_p(stream)
    assert runtime.cudaStreamBeginCapture(handle, 0) == 0
    ok(cuda.cudaMemsetAsync(there, 7, 64, stream))
    assert launch(on=stream) == 0
    assert runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
    ok(cuda.cudaMemcpyAsync(seen.ctypes.data, there, 64, TO_HOST, stream))
    assert not seen.any()
    assert runtime.cudaGraphInstantiate(ctypes.byref(instance), graph, 0) == 0
    for _ in range(3):
        assert runtime.cudaGraphLaunch(instance, handle) == 0
    ok(cuda.cudaMemcpyAsync(seen.ctypes.data, there, 64, TO_HOST, stream))
    assert (seen == 7).all()
    found = watch.read()
    assert found.launches_of("my_kernel") == (0, 1, 3)
    assert (found.graphs["num_captures"], found.graphs["num_launches"], found.graphs["num_stray_works"]) == (1, 3, 0)


@pytest.mark.parametrize("name", ["cudaMalloc", "cudaStreamSynchronize"])
def test_what_a_capture_does_not_stand_breaks_it(loaded: SimpleNamespace, cuda: Any, watch: Any, stream: int, name: str) -> None:
    graph = ctypes.c_void_p()
    assert loaded.libcudart.cudaStreamBeginCapture(ctypes.c_void_p(stream), 0) == 0
    assert getattr(cuda, name)(stream if "Stream" in name else 64)[0] == CAPTURING
    assert loaded.libcudart.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == BROKEN
    assert watch.read().graphs["num_broken_captures"] == 1 and watch.read().faults


def test_work_beside_a_capture_is_seen(loaded: SimpleNamespace, watch: Any, stream: int, launch: Callable[..., int]) -> None:
    graph = ctypes.c_void_p()
    assert loaded.libcudart.cudaStreamBeginCapture(ctypes.c_void_p(stream), 0) == 0
    assert launch(on=0) == 0
    assert loaded.libcudart.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0
    assert watch.read().graphs["num_stray_works"] == 1 and watch.read().launches_of("my_kernel").captured == 0


def test_launches_that_a_device_refuses_are_refused(
    loaded: SimpleNamespace, cuda: Any, watch: Any, kernel: Any, launch: Callable[..., int]
) -> None:
    assert launch() == launch(block=(1024, 1, 1), size=48 * 1024) == 0
    assert launch(grid=(0, 1, 1)) == launch(block=(1025, 1, 1)) == launch(grid=(1, 65536, 1)) == WRONG_CONFIGURATION
    assert cuda.cudaGetLastError() == (WRONG_CONFIGURATION,)
    assert launch(size=64 * 1024) == 1
    assert loaded.libcudart.cudaFuncSetAttribute(kernel, 8, 64 * 1024) == 0
    assert launch(size=64 * 1024) == 0
    assert loaded.libcudart.cudaFuncSetAttribute(kernel, 8, 256 * 1024) == 1
    assert loaded.libcudart.cudaFuncSetAttribute(ctypes.create_string_buffer(16), 8, 1024) == 98
    assert watch.read().launches_of("my_kernel").run == 3 and len(watch.read().faults) == 4
    cuda.cudaGetLastError()


def test_a_product_is_work_on_its_handles_stream(loaded: SimpleNamespace, watch: Any, stream: int) -> None:
    blas, handle = loaded.libcublas, ctypes.c_void_p()
    before = {number for number, count in watch.read().streams.items() if count}
    assert blas.cublasCreate_v2(ctypes.byref(handle)) == 0
    assert blas.cublasSetStream_v2(handle, ctypes.c_void_p(stream)) == 0
    assert blas.cublasGemmEx(handle) == blas.cublasSetNothing(handle) == 0
    found = watch.read()
    assert found.kernels["cublasGemmEx"] == (1, 0, 0) and "cublasSetNothing" not in found.kernels
    assert {number for number, count in found.streams.items() if count} - before == {max(found.streams)}
    assert blas.cublasGemmEx(None) != 0


def test_our_device_computes_on_it(cuda: Any, watch: Any) -> None:
    """The class that serves, on memory that checks every copy."""
    device = CudaDevice(0, cuda)
    assert device.name == "cuda:0 (Stub GPU)" and device.available_bytes() <= 2**30
    there, here = device.allocate(1000), device.allocate_host(1000)
    here[:] = 7
    device.upload(there, here)
    device.copy_pieces(there + 500, 100, there, 100, 50, 5)
    device.wait(device.mark())
    with pytest.raises(DeviceError, match="cudaMemcpyAsync: cudaErrorInvalidValue"):
        device.copy(there + 900, there, 200)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(2**31)
    assert cuda.cudaPeekAtLastError() == (1,), "what is short of memory is not reported again, what is wrong is"
    device.free(there)
    cuda.cudaGetLastError()
