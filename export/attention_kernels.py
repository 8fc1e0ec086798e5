"""The kernels that attention may have on CUDA, as ONNX Runtime's provider option `sdpa_kernel` counts them.

The gate and the server ask here, so that what was proved is what serves. The server imports this file, so it imports nothing.
"""

BITS = {"flash": 1, "efficient": 2, "cudnn": 8, "math": 16}
"""By name; the last, which takes everything, stays where no other can be used, whether it is named or not."""

AUTO = "auto"
"""ONNX Runtime's own choice: on compute capability 9 and later cuDNN before all others, which plans anew for each new shape."""

USUAL = "flash,efficient"
OPTION = "sdpa_kernel"


def kernel_bits(names: str) -> int:
    """Return what the provider option says for names with commas between them; 0 for `auto`.

    Raises:
        ValueError: Naming what is no kernel.
    """
    if names.strip() == AUTO:
        return 0
    bits = 0
    for name in names.split(","):
        if name.strip() not in BITS:
            raise ValueError(f"{name.strip()!r} is not {AUTO}, and none of {', '.join(BITS)}")
        bits |= BITS[name.strip()]
    return bits
