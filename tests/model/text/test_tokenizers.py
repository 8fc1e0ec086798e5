"""Tokenisers of every kind against the libraries that they stand for; streams; files, and descriptions that are wrong."""

import itertools
import json
import random
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer as Encoder

from dragoman.model.text.byte_level import ByteLevelTokenizer, ByteTokenizer
from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.sentencepiece import (
    CONTROL,
    NO_ID,
    PieceModel,
    SentencePieceTokenizer,
    parsed,
    same_ids,
    with_names_as_text,
)
from dragoman.model.text.tokenizer import SpecialToken, Tokenizer, TokenizerError
from dragoman.model.text.tokenizers import Tokenizers
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


class Case(NamedTuple):
    """A tokeniser of ours and the library's encoding and decoding, without special tokens.

    The library cuts `names` out of texts, ours does not; it decodes `silent` ids otherwise.
    """

    ours: Tokenizer
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Ids], str]
    names: Sequence[str] = ()
    silent: frozenset[int] = frozenset()


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


@pytest.mark.parametrize("name", [*PLAIN, *FAMILIES])
def test_ids_texts_and_streams_are_the_librarys(name: str, case_of, odd_texts: list[str]) -> None:
    case, choice = case_of(name), random.Random(3)
    named = re.compile("|".join(map(re.escape, case.names)) or r"(?!)")
    for text, ids in zip(odd_texts, case.ours.encode_batch(odd_texts), strict=True):
        if named.search(text):
            text = named.sub(" x ", text)
            ids = case.ours.encode(text)
        assert named.search(text) or ids == list(case.encode(text)), text
    tokenizer = case.ours
    for row in id_rows(tokenizer, odd_texts):
        heard = [i for i in row if i not in case.silent]
        shortened = [re.sub("\ufffd+", "\ufffd", text) for text in (tokenizer.decode(heard), case.decode(heard))]
        assert shortened[0] == shortened[1], "but for runs of U+FFFD: the library has one for each bad byte"
    for ids in id_rows(tokenizer, odd_texts[:160]):  # pieces add up, and are all that is certain
        together = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        assert together.lstrip(" ") == tokenizer.decode(ids).lstrip(" ")
        assert len(together) - len(tokenizer.decode(ids)) in range(len(ids) + 1)
        ids.insert(choice.randrange(len(ids) + 1), tokenizer.vocab_size + choice.randrange(9))  # pads a model's vocabulary
        stream, shown = tokenizer.detokenizer(), ""
        cuts = sorted(choice.randrange(len(ids) + 1) for _ in range(4))
        for start, end in itertools.pairwise([0, *cuts, len(ids)]):
            shown += stream.push(ids[start:end])
            whole = tokenizer.decode(ids[:end])
            # The rest is a character that lacks bytes, which decoding ends with U+FFFD.
            assert whole.startswith(shown) and re.fullmatch("\ufffd{0,3}", whole.removeprefix(shown))
        assert shown + stream.finish() == tokenizer.decode(ids)


def test_bytes_come_after_the_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [100, 198, 172] and tokenizer.vocab_size == 384
    assert tokenizer.decode([0, 1, 2, *tokenizer.encode("aé</s>"), 259, 383, 384, 10**9]) == "aé</s>"
    assert [tokenizer.token_bytes(i) for i in (2, 3, 258, 259, 383, 384)] == [b"", b"\0", b"\xff", b"", b"", b""]
    assert tokenizer.encode_batch(["a", ""]) == [[100], []]
    for numbers in ((3, 3, 125), (258, 3, 125), (384, 3, 125), (-1, 3, 125), (1, -1, 0), (1, 3, 1 << 20)):
        with pytest.raises(TokenizerError):
            ByteTokenizer(*numbers)


TEXTS = ["the work", "</s> é 猫", "", "  two  spaces "]


@pytest.fixture(scope="module")
def kinds(unigram: bytes, tokenizer: ByteLevelTokenizer, case_of) -> dict[str, Tokenizer]:
    ids = same_ids(unigram)
    pieces = SentencePieceTokenizer(unigram, ids, 2, {len(ids): "猫"})
    return {"byte_level": tokenizer, "sentencepiece": pieces, "tokenizers": case_of("bart").ours, "bytes": ByteTokenizer()}


def agrees(one: Tokenizer, other: Tokenizer) -> bool:
    ids = [one.encode(text) for text in TEXTS]
    return (
        ids == [other.encode(text) for text in TEXTS]
        and [*map(one.decode, ids)] == [*map(other.decode, ids)]
        and (one.kind, one.vocab_size, one.eos_id) == (other.kind, other.vocab_size, other.eos_id)
    )


@pytest.mark.parametrize("source", ["byte_level", "sentencepiece", "tokenizers", "bytes"])
@pytest.mark.parametrize("target", ["byte_level", "sentencepiece", "tokenizers", "bytes", None])
def test_what_is_saved_is_loaded(kinds: dict[str, Tokenizer], source: str, target: str | None, tmp_path: Path) -> None:
    saved = Tokenizers(kinds[source], kinds[target or source])
    saved.save(tmp_path)
    loaded = Tokenizers.load(tmp_path)
    assert agrees(loaded.source, saved.source) and agrees(loaded.target, saved.target)
    assert (loaded.source is loaded.target) == (target in (None, source))
    assert loaded.is_same(saved) and saved.is_same(loaded)
    assert not loaded.is_same(Tokenizers(ByteTokenizer(num_extra=7), ByteTokenizer()))
    Tokenizers.shared(kinds["byte_level"]).save(tmp_path)  # a folder that had another kind is that of the last
    assert agrees(Tokenizers.load(tmp_path).source, kinds["byte_level"])
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / "text.json").exists()


def test_other_kinds_are_not_trained_further_and_other_sizes_are_refused(kinds: dict[str, Tokenizer]) -> None:
    own, size = kinds["byte_level"], kinds["sentencepiece"].vocab_size
    assert Tokenizers.shared(own).byte_level() is own
    for others in (Tokenizers.shared(kinds["bytes"]), Tokenizers(own, kinds["bytes"])):
        with pytest.raises(TokenizerError, match="only one that was learnt here can be trained further"):
            others.byte_level()
    tokenizers = Tokenizers(kinds["bytes"], kinds["sentencepiece"])
    tokenizers.refuse_other_sizes(384, size)
    for sizes, complaint in (((383, size), "has 384 tokens, the model room for 383"), ((384, size - 1), f"has {size} tokens")):
        with pytest.raises(TokenizerError, match=complaint):
            tokenizers.refuse_other_sizes(*sizes)
    for token in (SpecialToken("<hl>", 384), SpecialToken("<hl>", 383, space_id=384), SpecialToken("</s>", 1)):
        with pytest.raises(TokenizerError, match="no text can name the special token"):
            Tokenizers(kinds["bytes"], kinds["sentencepiece"], (token,)).refuse_other_sizes(384, size)


SIDE = {"type": "bytes", "eos_id": 1, "offset": 3, "num_extra": 125}
MODEL = {"type": "sentencepiece", "file": "shared.model", "eos_id": 2, "ids": [0]}


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        ({}, r"text\.json: .*format_version"),
        ({"format_version": 2, "source": SIDE}, r"text\.json: format_version is 2, not 1"),
        ({"format_version": 1, "source": {**SIDE, "type": "other"}}, r"text\.json: .*other"),
        ({"format_version": 1, "source": {**SIDE, "more": 1}}, r"text\.json: .*more"),
        ({"format_version": 1, "source": {**SIDE, "eos_id": 5}}, r"text\.json: eos_id 5 is not that of a special token"),
        ({"format_version": 1, "source": {**SIDE, "offset": -5}}, r"text\.json: .*offset"),
        ({"format_version": 1, "source": SIDE, "target": {**MODEL, "file": "../x"}}, r"text\.json: .*target\.file"),
        ({"format_version": 1, "source": SIDE, "special_tokens": [{"content": "", "id": 3}]}, r"text\.json: .*special_tokens"),
        ({"format_version": 1, "source": MODEL}, r"shared\.model: no such file"),
        ({"format_version": 1, "source": {**MODEL, "file": "folder"}}, r"folder: not a regular file"),
        ({"format_version": 1, "source": {**MODEL, "file": "garbage"}}, r"garbage: not a SentencePiece model"),
        ({"format_version": 1, "source": {**MODEL, "file": "real.model"}}, r"real\.model: ids of 1 pieces"),
        ({"format_version": 1, "source": {**MODEL, "pieces": {"x": "y"}}}, r"pieces has an id that is not a number"),
        ({"format_version": 1, "source": {"type": "tokenizers", "file": "garbage", "eos_id": 2}}, r"garbage: not JSON"),
        ({"format_version": 1, "source": {"type": "byte_level", "file": "garbage"}}, r"garbage: not a byte-level tokeniser"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(described: dict[str, Any], complaint: str, unigram: bytes, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "garbage").write_bytes(b"\xffgarbage")
    (tmp_path / "real.model").write_bytes(unigram)
    (tmp_path / "text.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(TokenizerError, match=complaint) as caught:
        Tokenizers.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_description_that_is_damaged_or_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    for content in (b"", b"\xff", b"[" * 100_000, b"nul", b'{"format_version": 1e999}'):
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=r"text\.json: "):
            Tokenizers.load(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"text\.json: no such file"):
        Tokenizers.load(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(TokenizerError, match=r"text\.json: not a regular file"):
        Tokenizers.load(tmp_path)


EOS = 2


@pytest.fixture(scope="module")
def pieces(unigram: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(unigram, same_ids(unigram), EOS)


def test_a_special_token_that_is_typed_is_text(unigram: bytes, pieces: SentencePieceTokenizer) -> None:
    for name in ("</s>", "<s>", "<unk>"):
        ids = pieces.encode(f"the {name} work")
        assert EOS not in ids and 1 not in ids and all(character in pieces.decode(ids) for character in name.strip("<>/"))
    size = len(PieceModel(unigram).pieces)  # every character of "<猫>" is unknown, so the library gives it as one unknown piece
    named = SentencePieceTokenizer(unigram, same_ids(unigram), EOS, {1: "<s>", size: "<猫>", size + 1: "猫"})
    assert size + 1 in named.encode("a 猫") and size not in named.encode("a <猫>") and 1 not in named.encode("<s>")
    assert named.decode([1, *named.encode("the work"), EOS]) == "<s> the work", "answers may show it"
    ids = same_ids(unigram)
    ids[1] = NO_ID  # which control pieces may have
    assert SentencePieceTokenizer(unigram, ids, EOS).decode([1, 5]) == pieces.decode([5])


def test_user_defined_names_become_text_and_other_symbols_stay() -> None:
    model = trained(model_type="unigram", user_defined_symbols=["<2de>", "[X]", ">>fra<<", "\n", "▁▁", "#"])
    hidden, names = with_names_as_text(model)
    assert list(names) == ["<2de>", "[X]", ">>fra<<"]
    before, after = (SentencePieceTokenizer(content, same_ids(content), EOS) for content in (model, hidden))
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    for name in names:
        token = library.piece_to_id(name)
        assert token in before.encode(f"the {name} work"), "this is what shall not be"
        assert token not in after.encode(f"the {name} work")
        assert (before.token_bytes(token), after.token_bytes(token)) == (name.encode(), b"")
    assert after.encode("the # work\n") == before.encode("the # work\n") and library.piece_to_id("#") in after.encode("#")
    assert with_names_as_text(hidden) == (hidden, [])
    everything, names = with_names_as_text(model, lambda _: True)
    assert len(names) == 6 and PieceModel(everything).types.count(CONTROL) == 8


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda ids: ids[:-1], "ids of .* pieces, but the model has"),
        (lambda ids: [*ids[:-1], -1], "the piece .* has no id"),
        (lambda ids: [*ids[:-1], 1 << 24], "id 16777216 is not in 0 to"),
        (lambda ids: [*ids[:-1], ids[5]], r"id 5 is that of .* and of another piece"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(unigram: bytes, change, complaint: str) -> None:
    with pytest.raises(TokenizerError, match=complaint):
        SentencePieceTokenizer(unigram, change(same_ids(unigram)), EOS)
    for others in ({5: "x"}, {-1: "x"}, {1 << 24: "x"}):
        with pytest.raises(TokenizerError):
            SentencePieceTokenizer(unigram, same_ids(unigram), EOS, others)
    with pytest.raises(TokenizerError, match="has no id"):
        SentencePieceTokenizer(unigram, same_ids(unigram), -1)


def test_a_damaged_model_is_refused_or_still_tokenises(unigram: bytes) -> None:
    choice, num_refused = random.Random(5), 0
    for content in (b"", b"\0" * 100, b"no model", b"\x0a\x03\x0a\x01", b"\xff" * 1000):
        for read in (lambda content: SentencePieceTokenizer(content, [0], 0), PieceModel):
            with pytest.raises(TokenizerError):
                read(content)
    for _ in range(60):
        damaged = bytearray(unigram)
        if choice.random() < 0.4:
            del damaged[choice.randrange(len(damaged)) :]
        for _ in range(choice.randint(0, 6)):
            damaged[choice.randrange(len(damaged) or 1) if choice.random() < 0.5 else choice.randrange(6000) % len(damaged)] = 255
        try:
            content = bytes(damaged)
            tokenizer = SentencePieceTokenizer(content, same_ids(content), EOS)
        except TokenizerError as error:
            assert str(error).isprintable() and len(str(error)) < 500
            num_refused += 1
        else:
            assert isinstance(tokenizer.decode(tokenizer.encode("the work \u2581 猫")), str)
    assert num_refused > 20


def test_pieces_that_are_no_text_and_texts_that_would_change_are_refused(unigram: bytes) -> None:
    at = unigram.index(b"<unk>")
    with pytest.raises(TokenizerError):
        PieceModel(unigram[:at] + b"\xff\xfe\xfd\xfc\xfb" + unigram[at + 5 :])
    for kind, piece, complaint in (
        (1, "x" * 2000, "a piece has more than 1024 characters"),
        (6, "<0xZZ>", "is not written as one"),
        (2, "x", "2 pieces stand for what is unknown"),
    ):
        proto = parsed(unigram)
        proto.pieces[9].piece, proto.pieces[9].type = piece, kind
        with pytest.raises(TokenizerError, match=complaint):
            PieceModel(proto.SerializeToString())
    proto = parsed(unigram)
    proto.denormalizer_spec.precompiled_charsmap = proto.normalizer_spec.precompiled_charsmap
    with pytest.raises(TokenizerError, match="denormalizer_spec changes texts"):
        PieceModel(proto.SerializeToString())


def test_threads_get_what_one_gets(pieces: SentencePieceTokenizer, odd_texts: list[str]) -> None:
    texts = [*odd_texts[:200], "the work and " * 3000]
    expected = pieces.encode_batch(texts)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda _: [*map(pieces.encode, texts)], range(4))] == [expected] * 4
