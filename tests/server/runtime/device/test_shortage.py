"""What ONNX Runtime has been seen to say, in its own words: reports of its users, and its sources."""

import pytest

from dragoman.server.runtime.device.shortage import is_out_of_memory

ARENA = "void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*, bool, WaitNotificationFn)"
NODE = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node. Name:'MatMul_92' "
CALL = (
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:121 std::conditional_t<THRW, void, "
    "onnxruntime::common::Status> onnxruntime::CudaCall(ERRTYPE, const char*, const char*, ERRTYPE, const char*, const char*, int) "
)
SHORT = {
    "an arena at its limit": f"{NODE}Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 {ARENA} "
    "Available memory of 0 is smaller than requested bytes of 135383040",
    "an arena that may grow": f"{NODE}Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:331 {ARENA} "
    "Failed to allocate memory for requested buffer of size 8388608000",
    "a graph's weights": "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: "
    f"/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 {ARENA} Available memory of 1048576 is smaller than requested "
    "bytes of 65536000",
    "CUDA": f"{CALL}[with ERRTYPE = cudaError] CUDA failure 2: out of memory ; GPU=0 ; hostname=node ; "
    "file=/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_allocator.cc ; line=59 ; expr=cudaMalloc((void**)&p, size);",
    "cuBLAS": f"{NODE}Status Message: CUBLAS failure 3: the resource allocation failed ; GPU=0 ; hostname=node ; "
    "file=/onnxruntime_src/onnxruntime/core/providers/cuda/math/matmul.cc ; line=130 ; expr=cublasGemmHelper(handle);",
    "cuBLAS as it was named": f"{CALL}[with ERRTYPE = cublasStatus_t] CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; "
    "file=/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_stream_handle.cc ; line=73 ; expr=cublasCreate(&cublas_handle_);",
    "cuDNN until 8": f"{CALL}[with ERRTYPE = cudnnStatus_t] CUDNN failure 2: CUDNN_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=node ; "
    "expr=cudnnCreate(&cudnn_handle_);",
    "cuDNN": f"{CALL}[with ERRTYPE = cudnnStatus_t] CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; "
    "GPU=0 ; hostname=node ; expr=cudnnCreate(&cudnn_handle_);",
    "cuDNN on the host": f"{CALL}CUDNN failure 4003: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ; GPU=0 ;",
}
OTHER = {
    "the kernel's contract": "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running "
    "GroupQueryAttention node. Name:'GroupQueryAttention_0' Status Message: present_key and present_value are required unless "
    "borrowing a non-quantized KV cache",
    "a bound output of another size": "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : not enough space: expected 318080, got 314240",
    "a product that failed, described": f"{NODE}Status Message: CUBLAS failure 13: the GPU program failed to execute ; GPU=0 ;",
    "a product that failed": f"{CALL}CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0 ; hostname=node ; line=121",
    "cuDNN for another reason": f"{CALL}CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR ; GPU=0 ; expr=cudnnCreate();",
    "a capture": f"{CALL}CUDA failure 900: operation not permitted when stream is capturing ; GPU=0 ; hostname=node ;",
    "a wrong address": f"{CALL}CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=node ;",
}


@pytest.mark.parametrize("text", SHORT.values(), ids=SHORT)
def test_a_shortage_is_known_by_its_words(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_other_errors_are_not_taken_for_one(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
