"""`python -m benchmarks.large.convert CHECKPOINT FOLDER`: our checkpoint as a model of CTranslate2, in 8 bits."""

import sys
from pathlib import Path

from benchmarks.libraries.ctranslate2_model import write_model
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import transformer_of

if __name__ == "__main__":
    write_model(transformer_of(Checkpoint.load(Path(sys.argv[1])).model), Path(sys.argv[2]), "int8")
