"""Arrays of this process as inputs and outputs of a graph on the CPU, without a copy."""

import numpy as np
import onnxruntime
from numpy.typing import NDArray


def bind_input(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    """Have a graph read an array where it lies, which is to stay there while the binding is used."""
    assert array.flags.c_contiguous
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def bind_output(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    """Have a graph write an output into an array; otherwise as `bind_input`."""
    assert array.flags.c_contiguous
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
