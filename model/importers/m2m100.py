"""M2M100 and the dense models of NLLB: pre-norm, a made position table whose rows begin behind the padding token's."""

from typing import Final

from dragoman.model.importers.bart_like import DEFAULTS, BartLike
from dragoman.model.importers.family import Family
from dragoman.model.importers.positions import tensor2tensor
from dragoman.model.importers.tokenisers import TokenizerFiles, from_fairseq, from_m2m100

_DEFAULTS: Final = DEFAULTS | {
    "vocab_size": 128112,
    "activation_function": "relu",
    "scale_embedding": True,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
}
FAMILY: Final = Family(
    name="M2M100",
    model_type="m2m_100",
    defaults=_DEFAULTS,
    architecture=BartLike(
        norm="pre", has_output_bias=False, position_offset=None, make_positions=tensor2tensor, has_longer_tables=True
    ),
    tokenizers=(
        TokenizerFiles(("sentencepiece.bpe.model", "vocab.json"), from_m2m100),
        TokenizerFiles(("sentencepiece.bpe.model",), from_fairseq),
    ),
)
