"""BART: post-norm, a norm behind the embeddings, trained positions of which the first two rows are not used."""

from typing import Final

from dragoman.model.importers.bart_like import BartLike
from dragoman.model.importers.family import Family
from dragoman.model.importers.tokenisers import TokenizerFiles, from_byte_pairs

_DEFAULTS: Final = {
    "vocab_size": 50265,
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
    "pad_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
}
FAMILY: Final = Family(
    name="BART",
    model_type="bart",
    defaults=_DEFAULTS,
    architecture=BartLike(norm="post", has_embedding_norm=True, position_offset=2),
    tokenizers=(TokenizerFiles(("vocab.json", "merges.txt"), from_byte_pairs),),
)
