"""`python -m benchmarks.large.convert CHECKPOINT FOLDER`: our checkpoint as a model of CTranslate2, in 8 bits."""

import sys
from pathlib import Path

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import transformer_of
from tests.oracles.ctranslate2_model import write_model

if __name__ == "__main__":
    write_model(transformer_of(Checkpoint.load(Path(sys.argv[1])).model), Path(sys.argv[2]), "int8")
