"""Pegasus: pre-norm, with a bias for each token."""

from typing import Final

from dragoman.model.importers.bart_like import DEFAULTS, BartLike
from dragoman.model.importers.family import Family
from dragoman.model.importers.positions import halves
from dragoman.model.importers.tokenisers import TokenizerFiles, from_pegasus

_DEFAULTS: Final = DEFAULTS | {
    "vocab_size": 50265,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "forced_eos_token_id": 1,
    "decoder_start_token_id": 0,
}
FAMILY: Final = Family(
    name="Pegasus",
    model_type="pegasus",
    defaults=_DEFAULTS,
    architecture=BartLike(norm="pre", make_positions=halves),
    tokenizers=(TokenizerFiles(("spiece.model",), from_pegasus),),
)
