"""Odd texts, and tokenisers of every kind beside the libraries that they stand for."""

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer as Encoder

from dragoman.model.text.id_tables import same_ids
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.sentencepiece import SentencePieceTokenizer
from dragoman.model.text.tokenizer import Tokenizer
from tests.oracles import vocabularies
from tests.oracles.texts import training_lines
from tests.oracles.vocabularies import trained

Ids = list[int]

OWN = {"user_defined_symbols": ["<2de>", "\n", "▁▁"], "remove_extra_whitespaces": False, "unk_surface": "?"}
BYTES = {"byte_fallback": True, "vocab_size": 520}
PLAIN: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram"} | BYTES,
    "unigram-suffixes": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
    "unigram-symbols": {"model_type": "unigram"} | OWN,
    "bpe": {"model_type": "bpe"},
    "bpe-bytes-identity": BYTES | {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "bpe-no-prefix": {"model_type": "bpe", "add_dummy_prefix": False},
    "char": {"model_type": "char"},
    "word": {"model_type": "word"},
}
# Of a family whose `tokenizer.json` is read: what writes its files, the class of Transformers, end-of-sequence.
FAMILIES: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    "nllb": (vocabularies.nllb, "NllbTokenizer", 2),
    "mbart": (vocabularies.mbart, "MBartTokenizer", 2),
    "pegasus": (vocabularies.pegasus, "PegasusTokenizer", 1),
    "t5": (vocabularies.t5, "T5Tokenizer", 1),
    "bart": (vocabularies.bart, "BartTokenizer", 2),
}


@dataclass(frozen=True)
class Case:
    """A tokeniser of ours and the library's own encoding and decoding, without special tokens.

    Attributes:
        names: Names that the library cuts out of texts, and ours does not.
        silent: Ids that the library treats otherwise in decoding.
    """

    ours: Tokenizer
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Ids], str]
    names: Sequence[str] = ()
    silent: frozenset[int] = field(default_factory=frozenset)


def plain_case(name: str) -> Case:
    model = trained(**PLAIN[name])
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    # In the library a silent token separates the bytes of a character.
    silent = frozenset(i for i in range(len(library)) if "byte_fallback" in PLAIN[name] and library.is_control(i))
    ours = SentencePieceTokenizer(model, same_ids(model), library.eos_id())
    return Case(ours, library.encode, library.decode, silent=silent)


def family_case(name: str, folder: Path) -> Case:
    make, kind, eos_id = FAMILIES[name]
    make(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        getattr(transformers, kind).from_pretrained(folder).save_pretrained(folder / "saved")
    content = (folder / "saved/tokenizer.json").read_bytes()
    encoder = Encoder.from_str(content.decode())
    names = [token.content for token in encoder.get_added_tokens_decoder().values()]

    return Case(
        JsonTokenizer(content, eos_id),
        lambda text: encoder.encode(text, add_special_tokens=False).ids,
        lambda row: str(encoder.decode(row, skip_special_tokens=True)),
        names,
    )


@pytest.fixture(scope="session")
def unigram() -> bytes:
    return trained(model_type="unigram")


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: plain_case(name) if name in PLAIN else family_case(name, tmp_path_factory.mktemp(name)))


BLOCKS = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)),
    *((0x1100, 0x11FF), (0x2000, 0x206F), (0x2100, 0x21FF), (0x3000, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xAD00)),
    *((0xFB00, 0xFB4F), (0xFF00, 0xFFEF), (0x1D400, 0x1D4FF), (0x1F300, 0x1F6FF), (0x0, 0x1F), (0x7F, 0x9F)),
)
ODD = (
    *("  ", "\u00a0", "\u3000", "\t", "\n", "\r\n", "\u200b", "\u2581", " \u2581 ", "\ufeff", "\u00ad", "e\u0301", "\ufb01", "①"),
    *("</s>", "<unk>", "<s>", "<pad>", "<mask>", "<0x41>", "<2de>", ">>fra<<", "deu_Latn", "<extra_id_0>", "[MASK]", "…", "Ⅷ"),
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",  # a family of three, one character to a reader
)


@pytest.fixture(scope="session")
def odd_texts() -> list[str]:
    choice, words = random.Random(7), [word for line in training_lines() for word in line.split()]

    def part() -> str:
        kind = choice.random()
        if kind < 0.5:
            return choice.choice(words)
        if kind < 0.8:
            first, last = choice.choice(BLOCKS)
            return "".join(chr(choice.randint(first, last)) for _ in range(choice.randint(1, 5)))
        return choice.choice(ODD) if kind < 0.9 else "".join(map(chr, choice.sample(range(0x20, 0x3000), 3)))

    def text() -> str:
        parts = [part() for _ in range(choice.randint(1, 12))]
        return choice.choice(["", " ", "  "]) + choice.choice(["", " ", " "]).join(parts) + choice.choice(["", "", " ", "\n"])

    return [text() for _ in range(500)]


def id_rows(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ids]:
    """Return as many sequences of ids as texts: half of them random, half the texts'."""
    choice, half = random.Random(1), len(texts) // 2
    rows = [[choice.randrange(tokenizer.vocab_size) for _ in range(choice.randint(1, 20))] for _ in range(half)]
    return rows + tokenizer.encode_batch(texts[half:])
