"""Marian, that is OPUS-MT: post-norm, with a bias for each token, and a vocabulary for both sides or one for each."""

from typing import Final

from dragoman.model.importers.bart_like import DEFAULTS, BartLike
from dragoman.model.importers.family import Family
from dragoman.model.importers.positions import halves
from dragoman.model.importers.tokenisers import TokenizerFiles, from_marian

_DEFAULTS: Final = DEFAULTS | {
    "vocab_size": 58101,
    "pad_token_id": 58100,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "decoder_start_token_id": 58100,
    "share_encoder_decoder_embeddings": True,
}
FAMILY: Final = Family(
    name="Marian",
    model_type="marian",
    defaults=_DEFAULTS,
    architecture=BartLike(norm="post", make_positions=halves, may_separate_sides=True),
    tokenizers=(TokenizerFiles(("source.spm", "target.spm", "vocab.json"), from_marian),),
)
