"""Tokenisers of ours, each beside what it is to agree with, and the causes that differences may have."""

import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from tokenizers import Tokenizer as Encoder

from benchmarks.families import vocabularies
from benchmarks.families.texts import training_lines
from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.id_tables import ids_by_piece, same_ids, shifted_ids
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.piece_model import with_names_as_text
from dragoman.model.text.sentencepiece import SentencePieceTokenizer
from dragoman.model.text.tokenizer import Tokenizer

Ids = list[int]
Encode = Callable[[str], Sequence[int]]
EncodeCause = Callable[[str, Ids], str]


@dataclass(frozen=True)
class DecodeCause:
    """Why decoded texts may differ: of ids without what it concerns, or with both texts changed alike, they must be the same."""

    name: str
    ids: Callable[[Ids], Ids] = lambda ids: ids
    text: Callable[[str], str] = lambda text: text


@dataclass(frozen=True)
class Case:
    """A tokeniser of ours and what it is compared with.

    Attributes:
        name: Of the tokeniser.
        reference: What it is compared with.
        ours: The tokeniser.
        encode: The reference's ids of a text, without special tokens.
        decode: The reference's text of ids, without special tokens.
        encode_cause: Why its ids of a text, which are given, are others; empty if they should not be.
        decode_causes: Why its text of ids may be another.
    """

    name: str
    reference: str
    ours: Tokenizer
    encode: Encode
    decode: Callable[[Ids], str]
    encode_cause: EncodeCause = lambda *_: ""
    decode_causes: tuple[DecodeCause, ...] = ()


def without(name: str, ids: Sequence[int]) -> DecodeCause:
    """Return the cause that some tokens are treated otherwise: without them, texts are the same."""
    return DecodeCause(name, ids=lambda row: [i for i in row if i not in ids])


BAD_BYTES = DecodeCause("one U+FFFD a bad byte, here a bad sequence", text=lambda text: re.sub("\ufffd+", "\ufffd", text))
DROPPED_BYTES = DecodeCause("bad bytes are left out, here U+FFFD", text=lambda text: text.replace("\ufffd", ""))
SPACES_AROUND = DecodeCause("spaces around a text are taken off", text=str.strip)

PLAIN: dict[str, dict[str, Any]] = {
    "unigram, nmt_nfkc": {"model_type": "unigram"},
    "unigram, byte fallback": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 520},
    "unigram, spaces after words": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
    "unigram, user-defined symbols, all spaces": {
        "model_type": "unigram",
        "user_defined_symbols": ["<2de>", "\n", "▁▁"],
        "remove_extra_whitespaces": False,
        "unk_surface": "?",
    },
    "BPE, nmt_nfkc": {"model_type": "bpe"},
    "BPE, byte fallback, identity, all spaces": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 520,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "BPE, no space put before": {"model_type": "bpe", "add_dummy_prefix": False},
    "characters": {"model_type": "char"},
    "words": {"model_type": "word"},
}


def trained(**options: Any) -> bytes:
    """Train a SentencePiece model of some 300 pieces."""
    model = io.BytesIO()
    settings = {"vocab_size": 300, "character_coverage": 0.98, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    train: Any = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(training_lines()), model_writer=model, **{**settings, **options})
    return model.getvalue()


def loaded(model: bytes) -> Any:
    """Return the library's own tokeniser."""
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def plain_cases() -> Iterator[Case]:
    """Yield SentencePiece models of every kind, with their own ids."""
    for name, options in PLAIN.items():
        model = trained(**options)
        library = loaded(model)
        causes: tuple[DecodeCause, ...] = ()
        if options.get("byte_fallback"):
            silent = [i for i in range(len(library)) if library.is_control(i)]
            causes = (BAD_BYTES, without("a silent token parts the bytes of a character, here not", silent))
        ours = SentencePieceTokenizer(model, same_ids(model), library.eos_id())
        yield Case(f"SentencePiece, {name}", "sentencepiece", ours, library.encode, library.decode, decode_causes=causes)


@dataclass(frozen=True)
class Family:
    """A family's files, and how its code makes ids of SentencePiece's pieces.

    Attributes:
        kind: The class of Transformers.
        make: Writes the files.
        file: Name of SentencePiece's among them; empty where there is none.
        eos_id: End-of-sequence.
        table: Our table of ids, and other pieces.
        ids: The ids that the family's code gives to pieces that sentencepiece writes, and to the library's ids.
    """

    kind: str
    make: Callable[[Path], Any]
    file: str = ""
    eos_id: int = 2
    table: Callable[[bytes, Path], tuple[Ids, dict[int, str]]] = lambda model, _: (same_ids(model), {})
    ids: Callable[[Any, Path], Encode] = lambda library, _: library.encode


_NAMES = ("<s>", "</s>", "<pad>", *vocabularies.MARIAN_LANGUAGES)


def _vocabulary(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return found


def _looked_up(library: Any, folder: Path) -> Encode:
    """Encode as Marian's code does: what sentencepiece writes is looked up, unknown or not; but names are never."""
    vocabulary = _vocabulary(folder)
    unknown = vocabulary["<unk>"]
    return lambda text: [vocabulary.get(p, unknown) if p not in _NAMES else unknown for p in library.encode(text, out_type=str)]


def _by_piece(model: bytes, folder: Path) -> tuple[Ids, dict[int, str]]:
    vocabulary = _vocabulary(folder)
    return ids_by_piece(model, vocabulary, vocabulary["<unk>"], _NAMES)


def _fairseq(model: bytes, _: Path) -> tuple[Ids, dict[int, str]]:
    return shifted_ids(model, 1, {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}), {}


def _fairseq_ids(library: Any, _: Path) -> Encode:
    return lambda text: [i + 1 if i else 3 for i in library.encode(text)]


def _pegasus(model: bytes, _: Path) -> tuple[Ids, dict[int, str]]:
    return shifted_ids(model, 103, {"<pad>": 0, "</s>": 1}), {}


def _pegasus_ids(library: Any, _: Path) -> Encode:
    return lambda text: [i + 103 for i in library.encode(text)]


def _madlad(model: bytes, _: Path) -> tuple[Ids, dict[int, str]]:
    """Its languages are user-defined pieces, no special tokens: answers show them."""
    names = [i for i in range(len(loaded(model))) if loaded(model).is_control(i)]
    return same_ids(model), {i: piece for i in names if (piece := loaded(model).id_to_piece(i)) not in _NAMES}


_BPE = "sentencepiece.bpe.model"
FAMILIES = {
    "Marian": Family("MarianTokenizer", lambda f: vocabularies.marian(f, None), "source.spm", 0, _by_piece, _looked_up),
    "M2M100": Family("M2M100Tokenizer", vocabularies.m2m100, _BPE, 2, _by_piece, _looked_up),
    "NLLB": Family("NllbTokenizer", lambda f: vocabularies.nllb(f, None), _BPE, 2, _fairseq, _fairseq_ids),
    "mBART": Family("MBartTokenizer", vocabularies.mbart, _BPE, 2, _fairseq, _fairseq_ids),
    "mBART-50": Family("MBart50Tokenizer", lambda f: vocabularies.mbart(f, True), _BPE, 2, _fairseq, _fairseq_ids),
    "Pegasus": Family("PegasusTokenizer", vocabularies.pegasus, "spiece.model", 1, _pegasus, _pegasus_ids),
    "T5": Family("T5Tokenizer", lambda f: vocabularies.t5(f, None), "spiece.model", 1),
    "MADLAD-400": Family("T5Tokenizer", vocabularies.madlad, "spiece.model", 2, _madlad),
    "BART": Family("BartTokenizer", lambda f: vocabularies.bart(f, None)),
    "ByT5": Family("ByT5Tokenizer", vocabularies.byt5, "", 1),
}


def family_cases(name: str, root: Path) -> Iterator[Case]:
    """Yield a family's tokeniser beside its definition and its class, and what that class saves beside both libraries."""
    family, folder = FAMILIES[name], root / name
    folder.mkdir()
    family.make(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")  # which no encoding uses
        theirs = getattr(transformers, family.kind).from_pretrained(folder)
    special = [*theirs.all_special_tokens, *theirs.get_added_vocab(), *(vocabularies.MARIAN_LANGUAGES if name == "Marian" else ())]
    if family.file:
        model = (folder / family.file).read_bytes()
        hidden, names = with_names_as_text(model)
        library = loaded(model)
        ids, others = family.table(hidden, folder)
        ours: Tokenizer = SentencePieceTokenizer(hidden, ids, family.eos_id, others)
        pieces = {i: library.id_to_piece(own) for own, i in reversed(list(enumerate(ids)))} | others
        yield Case(
            *(name, "sentencepiece and the family's table", ours, family.ids(library, folder), _by_pieces(library, pieces)),
            _named(names, ours, family.ids(library, folder)),
            (SPACES_AROUND,),
        )
        special += [library.id_to_piece(i) for i in range(len(library)) if library.is_control(i) or library.is_unknown(i)]
        yield _class_case(name, ours, theirs, special, library)
    elif name == "BART":
        files = [(folder / file).read_bytes() for file in ("vocab.json", "merges.txt")]
        ours = JsonTokenizer.from_byte_pairs(files[0], files[1], theirs.all_special_tokens, family.eos_id)
        yield _class_case(name, ours, theirs, special)
    else:
        ours = ByteTokenizer()
        yield Case(name, "UTF-8", ours, lambda text: [byte + 3 for byte in text.encode()], _utf_8)
        yield _class_case(name, ours, theirs, special)
    if hasattr(theirs, "_tokenizer"):
        theirs.save_pretrained(folder / "saved")
        yield from _json_cases(name, theirs, family.eos_id, (folder / "saved/tokenizer.json").read_bytes())


def _by_pieces(library: Any, piece_of: dict[int, str]) -> Callable[[Ids], str]:
    """Decode by sentencepiece: ids to pieces, and these together."""

    def decode(row: Ids) -> str:
        pieces = [piece_of[i] for i in row if i in piece_of]
        return str(library.decode(pieces)).replace("▁", " ") if pieces else ""

    return decode


def _utf_8(row: Ids) -> str:
    return bytes(i - 3 for i in row if 3 <= i < 259).decode(errors="replace")


def _named(names: Sequence[str], ours: Tokenizer, encode: Encode, otherwise: EncodeCause = lambda *_: "") -> EncodeCause:
    """Return what finds that a text names special tokens: without them, it has the same ids, or there is another cause, too."""

    def cause(text: str, theirs: Ids) -> str:
        rest = text
        while names and (cut := re.sub("|".join(map(re.escape, names)), " x ", rest)) != rest:
            rest = cut
        if rest == text:
            return otherwise(text, theirs)
        theirs = list(encode(rest))
        found = otherwise(rest, theirs)
        is_same = ours.encode(rest) == theirs
        return "the text names special tokens" if is_same else f"the text names special tokens, and {found}" if found else ""

    return cause


def _class_case(name: str, ours: Tokenizer, theirs: Any, special: Sequence[str], library: Any = None) -> Case:
    """Return the comparison with a class of Transformers."""

    def encode(text: str) -> Ids:
        return list(theirs(text, add_special_tokens=False)["input_ids"])

    backend = getattr(theirs, "_tokenizer", None)
    own_unknown = None if backend is None else json.loads(backend.to_str())["model"].get("unk_id")
    unknown_id = theirs.unk_token_id if library is None else ours.encode("\U0010fffd")[-1]

    def swapped(text: str) -> Ids:
        return [own_unknown if own_unknown is not None and i == unknown_id else i for i in ours.encode(text)]

    def otherwise(text: str, found: Ids) -> str:
        """Say whether the class has another unknown token, or gives our ids to what sentencepiece makes of a text."""
        if library is None or backend is None:
            return ""
        if own_unknown not in (None, unknown_id) and swapped(text) == found:
            return "the class has another unknown token"
        normal, prepared = library.normalize(text), _prepared(backend, text)
        if prepared == normal:
            return ""
        both = _plain(_prepared(backend, _plain(normal)))  # which neither changes
        is_known = swapped(text) == encode(_plain(normal)) or swapped(_plain(prepared)) == found or swapped(both) == encode(both)
        return "the class normalises otherwise" if is_known else ""

    unknown, shown = [theirs.unk_token_id], [i for i in theirs.get_added_vocab().values() if i not in theirs.all_special_ids]
    causes = (
        without("the unknown token is left out", unknown),
        SPACES_AROUND,
        without("names are not put together with what is around them", shown),
        DROPPED_BYTES,
    )
    return Case(
        *(name, type(theirs).__name__, ours, encode, lambda row: str(theirs.decode(row, skip_special_tokens=True))),
        _named(special, ours, encode, otherwise),
        causes,
    )


def _plain(prepared: str) -> str:
    return prepared.replace("▁", " ").strip()


def _prepared(encoder: Any, text: str) -> str:
    """Return what a model of `tokenizers` is given, in one."""
    if encoder.normalizer is not None:
        text = encoder.normalizer.normalize_str(text)
    return "".join(piece for piece, _ in encoder.pre_tokenizer.pre_tokenize_str(text))


def _json_cases(name: str, theirs: Any, eos_id: int, content: bytes) -> Iterator[Case]:
    """Yield the comparisons of what a class saves: with `tokenizers` and with the class."""
    ours, encoder = JsonTokenizer(content, eos_id), Encoder.from_str(content.decode())
    names = [token.content for token in encoder.get_added_tokens_decoder().values()]

    def encode(text: str) -> Ids:
        return list(encoder.encode(text, add_special_tokens=False).ids)

    def decode(row: Ids) -> str:
        return str(encoder.decode(row, skip_special_tokens=True))

    yield Case(f"{name}, tokenizer.json", "tokenizers", ours, encode, decode, _named(names, ours, encode), (BAD_BYTES,))
    yield _class_case(f"{name}, tokenizer.json", ours, theirs, names)
