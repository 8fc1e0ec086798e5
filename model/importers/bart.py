"""BART: post-norm, a norm behind the embeddings, trained positions of which the first two rows are not used."""

from typing import Final

from dragoman.model.importers.bart_like import DEFAULTS, BartLike
from dragoman.model.importers.family import Family
from dragoman.model.importers.tokenisers import TokenizerFiles, from_byte_pairs

_DEFAULTS: Final = DEFAULTS | {
    "vocab_size": 50265,
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
