"""Names of files of weights, and of those that tell folders of other programs."""

from pathlib import Path
from typing import Final

from dragoman.model.importers.errors import ForeignError

SAFETENSORS: Final = "model.safetensors"
PICKLED: Final = "pytorch_model.bin"
INDEX_SUFFIX: Final = ".index.json"  # after either, where weights are in several files
COMPILED: Final = "_orig_mod."  # before the names of a model that `torch.compile` was asked for, taken off
# Of other libraries: not read, but told apart from nothing.
OTHERS: Final = ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.npz", "model.ckpt.index")
_SCRIPT: Final = "convert it with the script of its family in Transformers 4 (models/*/convert_*_to_pytorch.py), and import that"
# Files that are there together, of which the first is named, what writes them, and what to do.
_OTHER_FOLDERS: Final = (
    (("checkpoint-*/config.json",), "what a Trainer wrote while it trained", "import one of its checkpoints, for example {}"),
    (("snapshots/*/config.json",), "a repository in the cache of the hub", "import {}, or the repository by its name"),
    (("model.bin", "*vocabulary.*"), "a model of CTranslate2", "import the checkpoint that it was converted from"),
    (("*.onnx",), "graphs of ONNX", "import the checkpoint that they were exported from"),
    (("onnx/*.onnx",), "graphs of ONNX", "import the checkpoint that they were exported from"),
    (("dict.*.txt", "*.pt"), "a model of fairseq", _SCRIPT),
    (("*.npz", "*.yml"), "a model of Marian itself", _SCRIPT),
)


def refuse_other_folder(folder: Path) -> None:
    """Refuse a folder without a checkpoint of Transformers that is known to be something else.

    Raises:
        ForeignError: Saying what it is, and what to do.
    """
    for patterns, what, mend in _OTHER_FOLDERS:
        found = [max(folder.glob(pattern), key=lambda path: (len(str(path)), path), default=None) for pattern in patterns]
        if found[0] is not None and all(found):
            raise ForeignError(f"{folder}: {what} ({found[0].relative_to(folder)}); {mend.format(found[0].parent)}")
