"""Messages of ONNX Runtime, in its own words, that are shortages of memory, and others."""

import pytest

from dragoman.server.runtime.device.shortage import is_out_of_memory

SHORT = [
    "BFCArena::AllocateRawInternal(...) Available memory of 0 is smaller than requested bytes of 135383040",
    "BFCArena::AllocateRawInternal(...) Failed to allocate memory for requested buffer of size 8388608000",
    "[with ERRTYPE = cudaError] CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);",
    "CUBLAS failure 3: the resource allocation failed ; GPU=0 ; expr=cublasGemmHelper(handle);",
    "cublasCreate(&cublas_handle_): CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
    "CUDNN failure 2: CUDNN_STATUS_ALLOC_FAILED ; GPU=0 ; expr=cudnnCreate(&cudnn_handle_);",
    "CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0 ;",
    "CUDNN failure 4003: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ; GPU=0 ;",
]
OTHER = [
    "present_key and present_value are required unless borrowing a non-quantized KV cache",
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : not enough space: expected 318080, got 314240",
    "CUBLAS failure 13: the GPU program failed to execute ; GPU=0 ;",
    "CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0 ; hostname=node ; line=121",
    "CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR ; GPU=0 ; expr=cudnnCreate();",
    "CUDA failure 900: operation not permitted when stream is capturing ; GPU=0 ; hostname=node ;",
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=node ;",
]


@pytest.mark.parametrize(("text", "is_short"), [*((x, True) for x in SHORT), *((x, False) for x in OTHER)])
def test_shortage_of_memory_is_known_by_its_words(text: str, is_short: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) is is_short
