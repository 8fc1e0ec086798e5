"""Tokenisers of every kind against the libraries that they stand for; streams; saving, loading, and descriptions that are wrong."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.id_tables import same_ids
from dragoman.model.text.sentencepiece import SentencePieceTokenizer
from dragoman.model.text.tokenizer import Tokenizer, TokenizerError
from dragoman.model.text.tokenizers import Tokenizers
from tests.model.text.conftest import FAMILIES, PLAIN, id_rows


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
