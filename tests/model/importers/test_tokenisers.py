"""Which files a tokeniser is read from, and what ids its tokens get; how they encode is shown in the families' tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.foreign import Foreign, Limits
from dragoman.model.importers.registry import family_of
from dragoman.model.importers.report import Report
from dragoman.model.importers.tokenisers import read_tokenizers
from dragoman.model.text.tokenizers import Tokenizers
from tests.model.importers.conftest import change_json, change_weights
from tests.oracles.checkpoints import load_tokenizer


def tokenizers_of(folder: Path) -> tuple[Tokenizers, Report]:
    foreign, report = Foreign.open(folder), Report()
    family = family_of(foreign.config)
    config = family.architecture.lay_out(foreign, Limits(), Report()).config
    return read_tokenizers(foreign, family.tokenizers, config, report), report


@pytest.mark.parametrize(
    ("variant", "layout", "kinds"),
    [
        ("marian", "hub", ("sentencepiece", "sentencepiece")),
        ("marian-two-vocabularies", "hub", ("sentencepiece", "sentencepiece")),
        ("m2m100", "transformers", ("sentencepiece", "sentencepiece")),
        ("nllb", "hub", ("sentencepiece", "sentencepiece")),
        ("nllb", "transformers", ("tokenizers", "tokenizers")),
        ("bart", "hub", ("tokenizers", "tokenizers")),
        ("pegasus", "hub", ("sentencepiece", "sentencepiece")),
        ("t5", "transformers", ("tokenizers", "tokenizers")),
        ("byt5", "hub", ("bytes", "bytes")),
    ],
)
def test_kinds(variant: str, layout: str, kinds: tuple[str, str], foreign: Callable[..., Path]) -> None:
    read, report = tokenizers_of(foreign(variant, layout))
    assert (read.source.kind, read.target.kind) == kinds
    assert (read.source is read.target) == (not variant.startswith("marian"))
    assert any(line.startswith("tokeniser: ") for line in report.found)


@pytest.mark.parametrize(
    "name", ["</s>", "<pad>", "<unk>", "<s>", "<extra_id_0>", "<2de>", ">>fra<<", "__de__", "deu_Latn", "de_DE"]
)
@pytest.mark.parametrize(
    "variant", ["marian-multilingual", "m2m100", "nllb", "mbart", "mbart50", "pegasus", "t5", "madlad", "bart", "byt5"]
)
def test_names_that_a_user_types_stay_text(variant: str, name: str, foreign: Callable[..., Path]) -> None:
    """No text makes a token that means something to the model, and none ends it."""
    folder = foreign(variant)
    read, _ = tokenizers_of(folder)
    for text in (name, f"a {name} b", f"{name}{name}", f"{name} "):
        ids = read.source.encode(text)
        assert len(ids) > 1
        assert read.source.eos_id not in ids
        named = Foreign.open(folder).tokenizer.fields.get("added_tokens_decoder", {})
        assert not {str(token_id) for token_id in ids} & {
            key for key, token in named.items() if token["content"] == name != "<unk>"
        }
    vocabulary = json.loads((folder / "vocab.json").read_text()) if (folder / "vocab.json").exists() else {}
    assert name == "<unk>" or vocabulary.get(name) not in read.source.encode(f"a {name} b")


def add_token(folder: Path, text: str, special: bool = False) -> int:
    """Add a token as `add_tokens` of Transformers does; return its id."""
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    token_id = len(said["model"]["vocab"])
    token = {"id": token_id, "content": text, "special": special, "single_word": False, "lstrip": False, "rstrip": False}
    path.write_text(json.dumps({**said, "added_tokens": [*said["added_tokens"], {**token, "normalized": False}]}))
    return token_id


def test_tokenizer_json_is_read_where_it_has_text_that_the_model_file_has_not(copied: Callable[..., Path]) -> None:
    folder = copied("umt5")
    assert tokenizers_of(folder)[0].source.kind == "sentencepiece"
    token_id = add_token(folder, "SARS-CoV")
    read, report = tokenizers_of(folder)
    assert read.source.kind == "tokenizers"
    assert token_id in read.source.encode("the SARS-CoV here")
    assert any("it is read in its place" in line for line in report.translated)
    assert (
        read.source.encode("the SARS-CoV here")
        == load_tokenizer(folder)("the SARS-CoV here", add_special_tokens=False)["input_ids"]
    )


def test_tokenizer_json_is_read_where_its_ids_are_others(copied: Callable[..., Path]) -> None:
    folder = copied("nllb")
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = said["model"]["vocab"]
    first, second = [token for token, token_id in vocabulary.items() if token_id in (50, 60)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(said))
    read, _ = tokenizers_of(folder)
    assert read.source.kind == "tokenizers"
    text = "the server answers each request"
    assert read.source.encode(text) == load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]


def test_a_special_token_more_changes_nothing(copied: Callable[..., Path]) -> None:
    folder = copied("umt5")
    add_token(folder, "quiet", special=True)
    read, _ = tokenizers_of(folder)
    assert read.source.kind == "sentencepiece"


def test_added_text_without_tokenizer_json_is_written_and_told(copied: Callable[..., Path]) -> None:
    folder = copied("t5")
    token_id = Foreign.open(folder).config.get("vocab_size", int) - 1
    (folder / "added_tokens.json").write_text(json.dumps({"<extra_id_3>": token_id - 30, "SARS CoV": token_id}))
    read, report = tokenizers_of(folder)
    assert read.target.decode([token_id]).strip() == "SARS CoV"
    assert token_id not in read.source.encode("SARS CoV")
    (told,) = [line for line in report.ignored if "SARS CoV" in line]
    assert "not looked for in texts" in told and "extra_id" not in told


def test_a_space_put_before_byte_pairs_is_kept(copied: Callable[..., Path]) -> None:
    folder = copied("bart")
    change_json(folder / "tokenizer_config.json", add_prefix_space=True)
    read, _ = tokenizers_of(folder)
    text = "the server"
    expected = load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    assert read.source.encode(text) == expected == tokenizers_of(copied_again(folder))[0].source.encode(f" {text}")


def copied_again(folder: Path) -> Path:
    """The same folder, without the space."""
    change_json(folder / "tokenizer_config.json", add_prefix_space=None)
    return folder


def test_pegasus_may_have_another_offset(copied: Callable[..., Path]) -> None:
    folder = copied("pegasus")
    before = tokenizers_of(folder)[0].source.encode("the server")
    change_json(folder / "tokenizer_config.json", offset=100)
    assert tokenizers_of(folder)[0].source.encode("the server") == [token_id - 3 for token_id in before]


@pytest.mark.parametrize(
    ("variant", "fields", "reason"),
    [
        ("pegasus", {"offset": 10**6}, "the model room for"),
        ("pegasus", {"offset": "x"}, "offset must be a whole number"),
        ("byt5", {"extra_ids": 10**6}, "special tokens; at most"),
        ("byt5", {"extra_ids": 200}, "the tokeniser has 459 tokens, the model room for 384"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    variant: str, fields: dict[str, Any], reason: str, copied: Callable[..., Path]
) -> None:
    folder = copied(variant)
    change_json(folder / "tokenizer_config.json", **fields)
    with pytest.raises(ForeignError, match=reason):
        tokenizers_of(folder)


def test_a_vocabulary_a_side(foreign: Callable[..., Path]) -> None:
    read, _ = tokenizers_of(foreign("marian-two-vocabularies"))
    source, target = (
        json.loads((foreign("marian-two-vocabularies") / name).read_text()) for name in ("vocab.json", "target_vocab.json")
    )
    text = "the server answers"
    pieces = [{token_id: piece for piece, token_id in side.items()} for side in (source, target)]
    written = ["".join(table[i] for i in side.encode(text)) for table, side in zip(pieces, (read.source, read.target), strict=True)]
    assert written == ["▁the▁server▁answers"] * 2
    assert read.source.encode(text) != read.target.encode(text)


@pytest.mark.parametrize("layout", ["hub", "transformers"])
def test_a_mask_that_the_model_has_no_row_for_is_left_out(layout: str, copied: Callable[..., Path]) -> None:
    """As of bart-large-cnn: 50,265 tokens, of which the last is the mask, and 50,264 rows."""
    folder = copied("bart", layout)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    change_weights(folder, lambda tensors: cut(tensors, rows))
    change_json(folder / "config.json", vocab_size=rows)
    read, report = tokenizers_of(folder)
    assert read.source.vocab_size == rows
    assert any("no row for <mask>" in line for line in report.translated)
    text = "A man walks the dog."
    assert read.source.encode(text) == load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    assert max(read.source.encode("a <mask> b")) < rows
    assert read.source.decode(read.source.encode("a <mask> b")) == "a <mask> b"
    change_weights(folder, lambda tensors: cut(tensors, rows - 1))
    change_json(folder / "config.json", vocab_size=rows - 1)
    with pytest.raises(ForeignError, match=f"{rows + 1} tokens, the model room for {rows - 1}"):
        tokenizers_of(folder)


def cut(tensors: dict[str, torch.Tensor], rows: int) -> None:
    """Take the last row off every table of tokens, and off the bias."""
    for name, tensor in tensors.items():
        for axis, size in enumerate(tensor.shape):
            if size == rows + 1:
                tensors[name] = tensor.narrow(axis, 0, rows).contiguous()


def test_bytes_may_be_named_in_the_models_configuration_alone(copied: Callable[..., Path]) -> None:
    """As byt5-small has it."""
    folder = copied("byt5")
    change_json(folder / "tokenizer_config.json", tokenizer_class=None)
    with pytest.raises(ForeignError, match="no tokeniser"):
        tokenizers_of(folder)
    change_json(folder / "config.json", tokenizer_class="ByT5Tokenizer")
    read, _ = tokenizers_of(folder)
    assert read.source.kind == "bytes"
    assert read.source.encode("\u00e4b") == [0xC3 + 3, 0xA4 + 3, ord("b") + 3]


@pytest.mark.parametrize(("variant", "is_sought"), [("bart", True), ("marian", False), ("mbart", False)])
def test_tokens_added_in_a_file_of_their_own_are_written(variant: str, is_sought: bool, copied: Callable[..., Path]) -> None:
    """As Transformers writes them; what it finds of them in a text is found of byte pairs, and told of the others."""
    folder = copied(variant)
    theirs = load_tokenizer(folder)
    theirs.add_tokens(["zebra", "SARS-CoV 2"])
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = {name: theirs.convert_tokens_to_ids(name) for name in ("zebra", "SARS-CoV 2")}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    change_weights(folder, lambda tensors: lengthen(tensors, rows, max(ids.values()) + 1))
    change_json(folder / "config.json", vocab_size=max(ids.values()) + 1)
    read, report = tokenizers_of(folder)
    text = "the zebra is SARS-CoV 2 here"
    found = theirs(text, add_special_tokens=False)["input_ids"]
    assert set(ids.values()) <= set(found)
    assert read.target.decode(found).replace(" ", "") == text.replace(" ", "")
    assert (read.source.encode(text) == found) == is_sought
    told = sum("added tokens" in line and "zebra, SARS-CoV 2" in line for line in report.ignored)
    assert told == (0 if is_sought else len({"source", "target"} if variant == "marian" else {"both"}))


def lengthen(tensors: dict[str, torch.Tensor], before: int, after: int) -> None:
    """Give every table of tokens, and the bias, as many rows of zeros as it lacks."""
    for name, tensor in tensors.items():
        for axis, size in enumerate(tensor.shape):
            if size == before:
                more = list(tensor.shape)
                more[axis] = after - before
                tensors[name] = torch.cat([tensor, torch.zeros(more)], axis)


def test_tokens_added_to_bytes_are_told(copied: Callable[..., Path]) -> None:
    folder = copied("byt5")
    (folder / "added_tokens.json").write_text('{"zebra": 384, "<extra_id_200>": 385}')
    _, report = tokenizers_of(folder)
    assert [line for line in report.ignored if "added tokens" in line] == [
        "added tokens are neither looked for in texts nor written: zebra"
    ]
