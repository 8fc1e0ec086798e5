"""Marian, that is OPUS-MT: post-norm, with a bias for each token, and a vocabulary for both sides or one for each."""

from typing import Final

from dragoman.model.importers.bart_like import BartLike
from dragoman.model.importers.family import Family
from dragoman.model.importers.positions import halves
from dragoman.model.importers.tokenisers import TokenizerFiles, from_marian

_DEFAULTS: Final = {
    "vocab_size": 58101,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "d_model": 1024,
    "scale_embedding": False,
    "tie_word_embeddings": True,
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
