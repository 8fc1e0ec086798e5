"""The part of `cuda.bindings.runtime` that the server uses, called in whatever libcudart the dynamic linker finds.

The package of that name calls the driver in ways that only NVIDIA's own answers. Functions return a status and the values that C
writes behind pointers, as theirs do.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_void_p
from enum import IntEnum
from typing import Any

_library = ctypes.CDLL("libcudart.so.13")

cudaStreamNonBlocking, cudaEventDisableTiming = 1, 2


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidConfiguration = 9
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidResourceHandle = 400
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901
    cudaErrorUnknown = 999

    @classmethod
    def _missing_(cls, value: object) -> "cudaError_t":
        return cls.cudaErrorUnknown


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaDeviceProp(ctypes.Structure):
    """The beginning of CUDA 13's structure, and room for the rest."""

    _fields_ = (
        *(("name", c_char * 256), ("_identity", c_char * 32), ("totalGlobalMem", c_size_t), ("_limits", c_char * 64)),
        *(("major", c_int), ("minor", c_int), ("_texture", c_char * 16), ("multiProcessorCount", c_int), ("_rest", c_char * 620)),
    )


def _function(name: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...] = ()) -> Callable[..., tuple[Any, ...]]:
    """Return a function; its outputs come first in C, as pointers, and follow the status here."""
    function = getattr(_library, name)
    function.argtypes = (*(POINTER(kind) for kind in outputs), *inputs)
    function.restype = c_int

    def call(*arguments: Any) -> tuple[Any, ...]:
        places = [kind() for kind in outputs]
        plain = (int(value) if isinstance(value, IntEnum) else value for value in arguments)
        status = cudaError_t(function(*(byref(place) for place in places), *plain))
        return status, *(place if isinstance(place, ctypes.Structure) else place.value or 0 for place in places)

    return call


_SIGNATURES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "cudaGetDeviceCount": ((), (c_int,)),
    "cudaSetDevice": ((c_int,), ()),
    "cudaGetDeviceProperties": ((c_int,), (cudaDeviceProp,)),
    "cudaDriverGetVersion": ((), (c_int,)),
    "cudaRuntimeGetVersion": ((), (c_int,)),
    "cudaGetLastError": ((), ()),
    "cudaMemGetInfo": ((), (c_size_t, c_size_t)),
    "cudaMalloc": ((c_size_t,), (c_void_p,)),
    "cudaFree": ((c_void_p,), ()),
    "cudaHostAlloc": ((c_size_t, c_uint), (c_void_p,)),
    "cudaMemsetAsync": ((c_void_p, c_int, c_size_t, c_void_p), ()),
    "cudaMemcpyAsync": ((c_void_p, c_void_p, c_size_t, c_int, c_void_p), ()),
    "cudaMemcpy2DAsync": ((c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p), ()),
    "cudaStreamCreateWithFlags": ((c_uint,), (c_void_p,)),
    "cudaStreamSynchronize": ((c_void_p,), ()),
    "cudaEventCreateWithFlags": ((c_uint,), (c_void_p,)),
    "cudaEventRecord": ((c_void_p, c_void_p), ()),
    "cudaEventSynchronize": ((c_void_p,), ()),
}


def cudaStreamIsCapturing(stream: int) -> tuple[cudaError_t, int]:
    found = c_int()
    return cudaError_t(_library.cudaStreamIsCapturing(c_void_p(stream), byref(found))), found.value


def cudaStreamEndCapture(stream: int) -> tuple[cudaError_t, int]:
    graph = c_void_p()
    return cudaError_t(_library.cudaStreamEndCapture(c_void_p(stream), byref(graph))), graph.value or 0


globals().update({name: _function(name, *signature) for name, signature in _SIGNATURES.items()})
__all__ = [name for name in globals() if name.startswith("cuda")]
