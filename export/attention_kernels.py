"""The kernels that attention may have on CUDA: those that export proves are those that serve.

The server imports this file, so it imports nothing.
"""

# ONNX Runtime's provider option: flash attention (1), else memory-efficient attention (2). Its own choice is cuDNN (8) on compute
# capability 9 and later, which plans anew for each new shape; unfused products (16) remain where no other kernel can be used.
KERNEL_OPTIONS = {"sdpa_kernel": str(1 | 2)}
