"""Odd texts, and tokenisers of every kind beside the libraries that they stand for."""

import json
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer as Encoder

from dragoman.model.text.id_tables import ids_by_piece, same_ids, shifted_ids
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.piece_model import with_names_as_text
from dragoman.model.text.sentencepiece import SentencePieceTokenizer
from dragoman.model.text.tokenizer import Tokenizer
from tests.oracles import vocabularies
from tests.oracles.texts import training_lines
from tests.oracles.vocabularies import trained

Ids = list[int]

PLAIN: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 520},
    "unigram-suffixes": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
    "unigram-symbols": {
        "model_type": "unigram",
        "user_defined_symbols": ["<2de>", "\n", "▁▁"],
        "remove_extra_whitespaces": False,
        "unk_surface": "?",
    },
    "bpe": {"model_type": "bpe"},
    "bpe-bytes-identity": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 520,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe-no-prefix": {"model_type": "bpe", "add_dummy_prefix": False},
    "char": {"model_type": "char"},
    "word": {"model_type": "word"},
}
NAMES = ("<s>", "</s>", "<pad>", *vocabularies.MARIAN_LANGUAGES)
FAIRSEQ = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
# Of a family: what writes its files, SentencePiece's file among them, the class of Transformers, end-of-sequence.
FAMILIES: dict[str, tuple[Callable[[Path], Any], str, str, int]] = {
    "marian": (vocabularies.marian, "source.spm", "", 0),
    "m2m100": (vocabularies.m2m100, "sentencepiece.bpe.model", "", 2),
    "nllb": (vocabularies.nllb, "sentencepiece.bpe.model", "NllbTokenizer", 2),
    "mbart": (vocabularies.mbart, "sentencepiece.bpe.model", "MBartTokenizer", 2),
    "pegasus": (vocabularies.pegasus, "spiece.model", "PegasusTokenizer", 1),
    "t5": (vocabularies.t5, "spiece.model", "T5Tokenizer", 1),
    "madlad": (vocabularies.madlad, "spiece.model", "", 2),
    "bart": (vocabularies.bart, "", "BartTokenizer", 2),
}


@dataclass(frozen=True)
class Case:
    """A tokeniser of ours and the library's own encoding and decoding, without special tokens.

    Attributes:
        names: Names that the library cuts out of texts, and ours does not.
        silent: Ids that the library treats otherwise in decoding.
        text: Applied to both texts before they are compared.
    """

    name: str
    ours: Tokenizer
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Ids], str]
    names: Sequence[str] = ()
    silent: frozenset[int] = field(default_factory=frozenset)
    text: Callable[[str], str] = lambda text: re.sub("\ufffd+", "\ufffd", text)  # the library has one for each bad byte


def plain_case(name: str) -> Case:
    model = trained(**PLAIN[name])
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    # In the library a silent token separates the bytes of a character.
    silent = frozenset(i for i in range(len(library)) if "byte_fallback" in PLAIN[name] and library.is_control(i))
    ours = SentencePieceTokenizer(model, same_ids(model), library.eos_id())
    return Case(name, ours, library.encode, library.decode, silent=silent)


def family_cases(name: str, folder: Path) -> Iterator[Case]:
    make, file, kind, eos_id = FAMILIES[name]
    make(folder)
    if file:
        yield table_case(name, (folder / file).read_bytes(), folder, eos_id)
    if kind:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
            getattr(transformers, kind).from_pretrained(folder).save_pretrained(folder / "saved")
        yield json_case(name, (folder / "saved/tokenizer.json").read_bytes(), eos_id)


def table_case(name: str, model: bytes, folder: Path, eos_id: int) -> Case:
    """Return the family's own rule of ids, applied to the pieces of sentencepiece."""
    hidden, names = with_names_as_text(model)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids, others = same_ids(hidden), dict[int, str]()
    encode: Callable[[str], Sequence[int]] = library.encode
    if name in ("marian", "m2m100"):
        vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        unknown = vocabulary["<unk>"]
        ids, others = ids_by_piece(hidden, vocabulary, unknown, NAMES)

        def encode(text: str) -> Ids:
            return [vocabulary.get(p, unknown) if p not in NAMES else unknown for p in library.encode(text, out_type=str)]

    elif name in ("nllb", "mbart"):
        ids, encode = shifted_ids(hidden, 1, FAIRSEQ), lambda text: [i + 1 if i else 3 for i in library.encode(text)]
    elif name == "pegasus":
        ids, encode = shifted_ids(hidden, 103, {"<pad>": 0, "</s>": 1}), lambda text: [i + 103 for i in library.encode(text)]
    elif name == "madlad":  # its languages are user-defined pieces, no special tokens: answers show them
        others = {library.piece_to_id(piece): piece for piece in names}
    piece_of = {i: library.id_to_piece(own) for own, i in reversed(list(enumerate(ids)))} | others

    def decode(row: Ids) -> str:
        pieces = [piece_of[i] for i in row if i in piece_of]
        return str(library.decode(pieces)).replace("▁", " ") if pieces else ""

    return Case(name, SentencePieceTokenizer(hidden, ids, eos_id, others), encode, decode, names, text=str.strip)


def json_case(name: str, content: bytes, eos_id: int) -> Case:
    encoder = Encoder.from_str(content.decode())
    names = [token.content for token in encoder.get_added_tokens_decoder().values()]

    def decode(row: Ids) -> str:
        return str(encoder.decode(row, skip_special_tokens=True))

    return Case(
        f"{name}-json",
        JsonTokenizer(content, eos_id),
        lambda text: encoder.encode(text, add_special_tokens=False).ids,
        decode,
        names,
    )


@pytest.fixture(scope="session")
def unigram() -> bytes:
    """A `.model` file: unigram, with the pieces `<unk>`, `<s>` and `</s>` first."""
    return trained(model_type="unigram")


@pytest.fixture(scope="session")
def cases_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Case]]:
    """Give the cases of a plain model or of a family; each is made once."""
    made: dict[str, list[Case]] = {}

    def cases(name: str) -> list[Case]:
        if name not in made:
            is_family = name in FAMILIES
            made[name] = list(family_cases(name, tmp_path_factory.mktemp(name))) if is_family else [plain_case(name)]
        return made[name]

    return cases


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
    """Random texts: words, characters of many scripts, odd spaces, names of special tokens."""
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
        if choice.random() < 0.3:
            return choice.choice(["", " "]).join(parts)
        return choice.choice(["", " ", "  "]) + " ".join(parts) + choice.choice(["", "", " ", "\n"])

    return [text() for _ in range(500)]


def id_rows(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ids]:
    """Return as many sequences of ids as texts: half of them random, half the texts'."""
    choice, half = random.Random(1), len(texts) // 2
    rows = [[choice.randrange(tokenizer.vocab_size) for _ in range(choice.randint(1, 20))] for _ in range(half)]
    return rows + tokenizer.encode_batch(texts[half:])
