"""A foreign folder of the shape of NLLB-200-distilled-600M, or of a smaller one: random weights, a vocabulary of its size.

`python -m benchmarks.large.folder SHAPE FOLDER` makes one.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from tests.oracles.vocabularies import FAIRSEQ, train

BEYOND = 1 + len(FAIRSEQ_LANGUAGE_CODES) + 1
"""Tokens after SentencePiece's: padding, which its file lacks, languages and a mask."""
WORD_SCORE = -5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model.

    Attributes:
        vocab_size: V.
        d_model: Width.
        num_layers: Of each side.
        num_heads: H.
        ffn_dim: Width of the feed-forward layers.
        max_positions: Longest source and target.
        num_listed: Words of the shortlist's text.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    max_positions: int
    num_listed: int


SHAPES = {
    "nllb-600m": Shape(256_206, 1024, 12, 16, 4096, 1024, 8192),
    "mid": Shape(64_000, 256, 2, 4, 1024, 256, 4096),
    "small": Shape(4_000, 64, 2, 4, 128, 128, 500),
}


def make_folder(folder: Path, shape: Shape) -> int:
    """Write a checkpoint as `save_pretrained` does; return how many parameters it has."""
    import transformers

    folder.mkdir(parents=True)
    _write_tokenizer(folder, shape.vocab_size)
    sides: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", shape.num_layers), ("attention_heads", shape.num_heads), ("ffn_dim", shape.ffn_dim))
    }
    config = transformers.M2M100Config(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        max_position_embeddings=shape.max_positions,
        activation_function="relu",
        dropout=0.0,
        scale_embedding=True,
        decoder_start_token_id=2,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        init_std=shape.d_model**-0.5,  # for logits about as far apart as standard normals
        **sides,
    )
    transformers.set_seed(0)
    kind: Any = transformers.M2M100ForConditionalGeneration
    model = kind(config).eval()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def words(count: int) -> list[str]:
    """Return words that are a token each."""
    return [f"w{i}" for i in range(count)]


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a SentencePiece model of the kind unigram: some that were learnt, and words up to the size."""
    kind: Any = vars(sentencepiece_model_pb2)["ModelProto"]
    proto = kind.FromString(train("unigram", 200, FAIRSEQ))
    for i in range(vocab_size - BEYOND - len(proto.pieces)):
        proto.pieces.add(piece=f"\u2581w{i}", score=WORD_SCORE)
    (folder / "sentencepiece.bpe.model").write_bytes(proto.SerializeToString())
    settings = {
        "tokenizer_class": "NllbTokenizer",
        "src_lang": "eng_Latn",
        "tgt_lang": "fra_Latn",
        "additional_special_tokens": FAIRSEQ_LANGUAGE_CODES,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    make_folder(Path(sys.argv[2]), SHAPES[sys.argv[1]])
