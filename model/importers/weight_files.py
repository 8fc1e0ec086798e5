"""What files of weights are called."""

from typing import Final

SAFETENSORS: Final = "model.safetensors"
PICKLED: Final = "pytorch_model.bin"
INDEX_SUFFIX: Final = ".index.json"  # after either, where weights are in several files
# Of other libraries: not read, but told apart from nothing.
OTHERS: Final = ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.npz", "model.ckpt.index")
