"""Choice of the device, with its reason.

ONNX Runtime that cannot load CUDA silently falls back to the CPU; here all requirements are checked first and missing ones named.
"""

import contextlib
import ctypes
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dragoman.extras import install_command, installed_version
from dragoman.server.runtime.device.device import DeviceError

CUDA_PROVIDER = "CUDAExecutionProvider"
REQUEST = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?")
HALF_PRECISIONS = ("fp16", "bf16")
CPU_PRECISIONS = ("fp32", "int8", "fp16")
# onnxruntime-gpu works without the other libraries.
NEEDED_LIBRARIES = ("libcublas", "libcudart", "libcurand")


@dataclass(frozen=True, slots=True)
class Choice:
    """A CUDA device's ordinal, None for the CPU, and the reason for the log."""

    ordinal: int | None
    reason: str


def choose_device(request: str, precision: str, check_cuda: "Callable[[int], str] | None" = None) -> Choice:
    """Return the device for a bundle of this precision; `check_cuda` returns an obstacle or an empty string.

    Raises:
        DeviceError: If the requested device cannot be used, or none for the precision.
    """
    found = REQUEST.fullmatch(request)
    if found is None:
        raise DeviceError(f"--device must be auto, cpu, cuda or cuda:N, not {request!r}")
    ordinal = int(found[1] or 0)
    fits_cuda, fits_cpu = precision in HALF_PRECISIONS, precision in CPU_PRECISIONS
    if request.startswith("cuda") and not fits_cuda:
        reason = f"CUDA runs fp16 and bf16 bundles, and this one is {precision}; export it anew"
        raise DeviceError(f"--device {request}: {_no_gpu()}{reason}")
    if request == "cpu" and not fits_cpu:
        raise DeviceError(f"--device cpu: the CPU does not run {precision} bundles; export one of {', '.join(CPU_PRECISIONS)}")
    if request == "cpu":
        return Choice(None, "asked for")
    if not fits_cuda:
        return Choice(None, f"CUDA does not run {precision} bundles")
    obstacle = (check_cuda or cuda_obstacle)(ordinal)
    if not obstacle:
        return Choice(ordinal, "asked for" if request != "auto" else "it is there, and the bundle is for it")
    if request != "auto":
        raise DeviceError(f"--device {request}: {obstacle}")
    if not fits_cpu:
        raise DeviceError(f"--device auto: the CPU does not run {precision} bundles, and there is no CUDA device: {obstacle}")
    return Choice(None, f"no CUDA device: {obstacle}")


def cuda_obstacle(ordinal: int) -> str:
    """Return why a CUDA device cannot be used; empty if it can."""
    if reason := wheel_obstacle():
        return _no_gpu() + reason
    return driver_obstacle(ordinal) or library_obstacle()


def _no_gpu() -> str:
    """Return that there is no GPU, as a prefix of other reasons; empty if there is one."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA GPU, or no driver for it; "
    return ""


def wheel_obstacle() -> str:
    """Return what is wrong with the installed packages; empty if nothing is."""
    cpu_wheel, gpu_wheel = installed_version("onnxruntime"), installed_version("onnxruntime-gpu")
    try:
        onnxruntime: Any = import_module("onnxruntime")
    except ImportError as error:
        return f"onnxruntime cannot be imported ({error}); {install_command('gpu')}"
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        if gpu_wheel is not None and cpu_wheel is not None:
            return (
                f"onnxruntime {cpu_wheel}, the CPU build, lies over onnxruntime-gpu {gpu_wheel}; uninstall both and "
                f"{install_command('gpu')}"
            )
        return f"the installed onnxruntime {onnxruntime.__version__} is the CPU build; in its place: {install_command('gpu')}"
    return ""


def driver_obstacle(ordinal: int) -> str:
    """Return why CUDA does not find the device; empty if it does."""
    try:
        runtime: Any = import_module("cuda.bindings.runtime")
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); {install_command('gpu')}"
    try:
        status, count = runtime.cudaGetDeviceCount()
    except RuntimeError as error:  # the package has no CUDA library to call
        return f"CUDA's runtime library cannot be loaded ({error})"
    name = getattr(status, "name", str(status))
    match name:
        case "cudaSuccess":
            pass
        case "cudaErrorInsufficientDriver":
            return "there is no NVIDIA driver, or it is older than this CUDA needs (in a container: was it started with GPUs?)"
        case "cudaErrorNoDevice":
            return "the NVIDIA driver sees no device"
        case _:
            return f"CUDA does not start: {name}"
    if not count:
        return "the NVIDIA driver sees no device"
    if ordinal >= count:
        return f"there is no cuda:{ordinal}; the driver sees {count} {'device' if count == 1 else 'devices'}"
    return ""


def driver_versions() -> str:
    """Return the CUDA versions of driver and runtime."""
    runtime: Any = import_module("cuda.bindings.runtime")
    numbers = [getattr(runtime, name)()[-1] for name in ("cudaDriverGetVersion", "cudaRuntimeGetVersion")]
    driver, own = (f"{number // 1000}.{number % 1000 // 10}" for number in numbers)
    return f"driver for CUDA {driver}, runtime of CUDA {own}"


def library_obstacle() -> str:
    """Load CUDA's libraries; return those that are missing, parsed from ONNX Runtime's output."""
    onnxruntime: Any = import_module("onnxruntime")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    missing = [line.split()[3].rstrip(":") for line in said.getvalue().splitlines() if line.startswith("Failed to load ")]
    needed = [library for library in missing if library.startswith(NEEDED_LIBRARIES)]
    return f"{', '.join(needed)} cannot be loaded; {install_command('gpu')}" if needed else ""
