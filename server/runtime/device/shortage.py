"""How ONNX Runtime says that a device's memory is short: its errors differ by their text alone."""

SAYINGS = (
    "is smaller than requested bytes of",  # available memory of the arena, whose limit is reached
    "failed to allocate memory",  # the arena may grow, and the device has nothing left
    "out of memory",  # CUDA failure 2
    "cublas failure 3:",  # CUBLAS_STATUS_ALLOC_FAILED, which is now described and not named
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",  # until cuDNN 8; it now says which of the two it is
    "cudnn_status_internal_error_device_allocation_failed",
    "cudnn_status_internal_error_host_allocation_failed",
)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether ONNX Runtime ran out of device memory, so that less at once may do."""
    text = str(error).lower()
    return any(saying in text for saying in SAYINGS)
