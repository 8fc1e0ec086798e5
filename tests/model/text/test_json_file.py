import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dragoman.model.text.json_file import JsonTokenizer
from dragoman.model.text.tokenizer import TokenizerError
from tests.oracles.texts import training_lines

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
EOS = 2


def bpe() -> Encoder:
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    encoder.train_from_iterator(training_lines(), trainer)
    return encoder


def unigram() -> Encoder:
    """Its special tokens are pieces among others, which a text with their names would have."""
    pieces = [(name, 0.0) for name in SPECIAL] + [("▁", -3.0), ("▁the", -2.0)]
    pieces += [*((letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz</>_L"), ("deu_Latn", 0.0)]
    encoder = Encoder(models.Unigram(pieces, 3))
    encoder.normalizer, encoder.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    return encoder


@pytest.fixture(scope="module", params=[bpe, unigram], ids=["byte-level BPE", "unigram"])
def description(request: pytest.FixtureRequest) -> dict[str, Any]:
    made: Callable[[], Encoder] = request.param
    found: dict[str, Any] = json.loads(made().to_str())
    vocabulary = found["model"]["vocab"]
    size = len(vocabulary)
    names = [(name, i, True) for i, name in enumerate(SPECIAL)] + [("<br>", size, False), ("...", size + 1, False)]
    if isinstance(vocabulary, list):
        names.append(("deu_Latn", size - 1, True))
    found["added_tokens"] = [{"id": i, "content": name, "special": special, **FLAGS} for name, i, special in names]
    return found


def made(description: dict[str, Any], **changes: Any) -> JsonTokenizer:
    return JsonTokenizer(json.dumps({**description, **changes}).encode(), EOS)


def test_a_name_that_is_typed_is_text(description: dict[str, Any]) -> None:
    tokenizer, library = made(description), Encoder.from_str(json.dumps(description))
    for name in (*SPECIAL, "deu_Latn", "<br>"):
        token, text = library.token_to_id(name), f"the {name} the"
        if token is not None:
            assert token in library.encode(text, add_special_tokens=False).ids, "the library takes it for the token"
            assert token not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_added_text_is_found_special_tokens_are_not_shown_and_texts_are_never_cut(description: dict[str, Any]) -> None:
    tokenizer, size = made(description), len(description["model"]["vocab"])
    assert size + 1 in tokenizer.encode("the...") and tokenizer.vocab_size == size + 2
    assert tokenizer.decode([EOS, *tokenizer.encode("the"), size, 0, 4, size + 1, size + 2, 10**9]) == "the<br>..."
    library = Encoder.from_str(json.dumps(description))
    library.enable_truncation(3)
    library.enable_padding(length=9)
    asked = json.loads(library.to_str()) | {"post_processor": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}}
    assert made(asked).encode("the the the the the") == tokenizer.encode("the the the the the")


def test_a_merge_that_makes_a_name_is_left_out() -> None:
    encoder = bpe()
    found = json.loads(encoder.to_str())
    size = len(found["model"]["vocab"])
    found["model"]["vocab"] |= {"pa": size, "pad": size + 1}
    found["model"]["merges"] = [["p", "a"], ["pa", "d"]]
    found["added_tokens"] = [{"id": size + 1, "content": "pad", "special": True, **FLAGS}]
    tokenizer = made(found)
    assert tokenizer.encode("pad") == [size, found["model"]["vocab"]["d"]] and tokenizer.token_bytes(size + 1) == b""


def test_what_drops_merges_in_training_reads_a_text_as_the_same_ids_each_time() -> None:
    described = json.loads(bpe().to_str())
    described["model"]["dropout"] = 0.9
    tokenizer = made(described)
    for encode in (tokenizer.encode, tokenizer.reading(())):
        assert len({tuple(encode("A dog runs in the street.")) for _ in range(20)}) == 1


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]), "Replace.Strip"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.WordPiece()]), "ByteLevel.WordPiece"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Replace("A", "B")]), "Replace"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]), "Strip"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "Strip"),
    ],
)
def test_a_decoder_that_does_not_go_by_token_is_refused_by_name(decoder: Any, name: str) -> None:
    encoder = bpe()
    encoder.decoder = decoder
    with pytest.raises(TokenizerError, match=name):
        JsonTokenizer(encoder.to_str().encode(), EOS)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.ByteLevel(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_ids_are_decoded_as_the_library_does(decoder: Any) -> None:
    pieces = ["<s>", "▁", "▁▁", "▁a", "b▁c", "Ġ", "Ġd", "é", "<0xC3>", "<0xA9>", "<0x41>", "<0x80>", " e", "▁<0xC3>"]
    encoder = Encoder(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    encoder.decoder = decoder
    encoder.add_special_tokens(["<s>"])
    tokenizer = JsonTokenizer(encoder.to_str().encode(), 0)
    for first in range(len(pieces)):
        for ids in ([first], *([first, second, third] for second in range(len(pieces)) for third in (0, 3, 6, 8, 9))):
            expected = encoder.decode(ids, skip_special_tokens=True)
            if "\ufffd" not in expected:
                assert tokenizer.decode(ids) == expected, ids


BROKEN = """null|[]|{}|{"model": {"vocab": 3}}|{"model": {"vocab": {}}}|{"model": {"vocab": {"a": "b"}}}|{"model": {"vocab": ["a"]}}
{"model": {"vocab": {"a": 99999999}}}|{"model": {"vocab": {"a": true}}}|{"model": {"vocab": [[1, 2]]}}
{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": "x", "content": "y"}]}|{"model": {"vocab": {"a": 0}}, "added_tokens": {}}
{"model": {"vocab": {"a": -1}}}|{"model": {"vocab": {"a": [3]}}}|{"model": {"vocab": {"a": 0}}, "decoder": {"type": {}}}"""


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, *map(str.encode, re.split(r"[|\n]", BROKEN))])
def test_what_is_no_such_file_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerError) as caught:
        JsonTokenizer(content, 0)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_a_file_with_one_thing_wrong_is_refused(description: dict[str, Any]) -> None:
    moved = [{**entry, "id": entry["id"] + (entry["content"] == "...")} for entry in description["added_tokens"]]
    for changes, complaint in (
        ({"model": {**description["model"], "type": "Other"}}, "not a file of `tokenizers`"),
        ({"pre_tokenizer": {"type": "Nothing"}}, "not a file of `tokenizers`"),
        ({"normalizer": 3}, "not a file of `tokenizers`"),
        ({"decoder": None}, "no decoder"),
        ({"added_tokens": moved}, "added_tokens gives an id"),
    ):
        with pytest.raises(TokenizerError, match=complaint):
            made(description, **changes)
    with pytest.raises(TokenizerError, match="eos_id 99999 is not"):
        JsonTokenizer(json.dumps(description).encode(), 99999)
    for model in (models.Unigram([("a", 0.0)]), models.WordLevel({"a": 0}, "<unk>")):
        encoder = Encoder(model)
        encoder.decoder = decoders.Metaspace()
        with pytest.raises(TokenizerError, match="no token for what is unknown"):
            JsonTokenizer(encoder.to_str().encode(), 0)


def test_merges_that_would_end_the_process_are_refused() -> None:
    """The library cuts a prefix off the right side of a merge, by its bytes, without looking whether it is there."""
    model = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]], "continuing_subword_prefix": "#"}
    found = json.loads(bpe().to_str()) | {"model": model, "added_tokens": []}
    for merges in ([["a", "é"]], ["a é"], [[]], [3]):
        model["merges"] = merges
        with pytest.raises(TokenizerError, match="a merge lacks continuing_subword_prefix '#'"):
            made(found)


def test_two_files_make_byte_level_bpe_without_a_space_before() -> None:
    encoder = bpe()
    found = json.loads(encoder.to_str())["model"]
    vocabulary = json.dumps(found["vocab"]).encode()
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in found["merges"]) + "\n"
    tokenizer = JsonTokenizer.from_byte_pairs(vocabulary, merges.encode(), SPECIAL, EOS)
    for text in ("the work", " the work", "", "é 猫\n\n x"):
        assert tokenizer.encode(text) == encoder.encode(text, add_special_tokens=False).ids
    for files in ((b"[]", b""), (b"{", b""), (vocabulary, b"\xff"), (vocabulary, b"one"), (vocabulary, b"x y")):
        with pytest.raises(TokenizerError):
            JsonTokenizer.from_byte_pairs(*files, SPECIAL, EOS)
