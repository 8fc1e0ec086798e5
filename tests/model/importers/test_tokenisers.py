"""The files that a tokeniser is read from, and the ids of its tokens; how they encode is shown in the families' tests."""

import json
from collections.abc import Callable
from pathlib import Path

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

SETTINGS = "tokenizer_config.json"


def tokenizers_of(folder: Path) -> tuple[Tokenizers, Report]:
    foreign, report = Foreign.open(folder), Report()
    family = family_of(foreign.config)
    config = family.architecture.lay_out(foreign, Limits(), Report()).config
    return read_tokenizers(foreign, family.tokenizers, config, report), report


def theirs(folder: Path, text: str) -> list[int]:
    ids: list[int] = load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


def resize(folder: Path, rows: int) -> None:
    before = json.loads((folder / "config.json").read_text())["vocab_size"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            for axis in (axis for axis, size in enumerate(tensor.shape) if size == before):
                last = tensor.narrow(axis, before - 1, 1)
                longer = torch.cat([tensor, *[last] * max(0, rows - before)], axis)
                tensors[name] = longer.narrow(axis, 0, rows).contiguous()

    change_weights(folder, change)
    change_json(folder / "config.json", vocab_size=rows)


NAMES = ("</s>", "<pad>", "<unk>", "<s>", "<extra_id_0>", "<2de>", ">>fra<<", "__de__", "deu_Latn", "de_DE")


@pytest.mark.parametrize(
    "variant", ["marian-multilingual", "m2m100", "nllb", "mbart", "mbart50", "pegasus", "t5", "madlad", "bart", "byt5"]
)
def test_names_that_a_user_types_stay_text(variant: str, foreign: Callable[..., Path]) -> None:
    """No text makes a token that means something to the model, and none ends it."""
    folder = foreign(variant)
    tokenizer = tokenizers_of(folder)[0].source
    named = Foreign.open(folder).tokenizer.fields.get("added_tokens_decoder", {})
    vocabulary = json.loads((folder / "vocab.json").read_text()) if (folder / "vocab.json").exists() else {}
    for name in NAMES:
        special = {key for key, token in named.items() if token["content"] == name != "<unk>"}
        for text in (name, f"a {name} b", f"{name}{name}", f"{name} "):
            ids = tokenizer.encode(text)
            assert len(ids) > 1 and tokenizer.eos_id not in ids, text
            assert not {str(token_id) for token_id in ids} & special, text
        assert name == "<unk>" or vocabulary.get(name) not in tokenizer.encode(f"a {name} b")


def add_token(folder: Path, text: str, special: bool = False) -> int:
    """Add a token as `add_tokens` of Transformers does; return its id."""
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    token_id = 1 + max(len(said["model"]["vocab"]) - 1, *(token["id"] for token in said["added_tokens"]))
    token = {"id": token_id, "content": text, "special": special}
    token |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    path.write_text(json.dumps({**said, "added_tokens": [*said["added_tokens"], token]}))
    return token_id


def test_tokenizer_json_is_read_where_it_has_other_text_or_ids(copied: Callable[..., Path]) -> None:
    folder = copied("umt5")
    assert tokenizers_of(folder)[0].source.kind == "sentencepiece"
    add_token(folder, "quiet", special=True)
    assert tokenizers_of(folder)[0].source.kind == "sentencepiece", "a special token more changes nothing"
    token_id, text = add_token(folder, "SARS-CoV"), "the SARS-CoV here"
    read, report = tokenizers_of(folder)
    assert read.source.kind == "tokenizers" and token_id in read.source.encode(text) == theirs(folder, text)
    assert any("it is read in its place" in line for line in report.translated)
    folder, text = copied("nllb"), "the server answers each request"
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = said["model"]["vocab"]
    first, second = [token for token, token_id in vocabulary.items() if token_id in (50, 60)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(said))
    tokenizer = tokenizers_of(folder)[0].source
    assert tokenizer.kind == "tokenizers" and tokenizer.encode(text) == theirs(folder, text)


def test_added_text_without_tokenizer_json_is_written_and_reported(copied: Callable[..., Path]) -> None:
    folder = copied("t5")
    token_id = Foreign.open(folder).config.get("vocab_size", int) - 1
    (folder / "added_tokens.json").write_text(json.dumps({"<extra_id_3>": token_id - 30, "SARS CoV": token_id}))
    read, report = tokenizers_of(folder)
    assert read.target.decode([token_id]).strip() == "SARS CoV" and token_id not in read.source.encode("SARS CoV")
    (told,) = [line for line in report.ignored if "SARS CoV" in line]
    assert "not looked for in texts" in told and "extra_id" not in told


@pytest.mark.parametrize(("variant", "is_sought"), [("bart", True), ("marian", False), ("mbart", False)])
def test_tokens_added_in_a_file_of_their_own_are_written(variant: str, is_sought: bool, copied: Callable[..., Path]) -> None:
    folder, text = copied(variant), "the zebra is SARS-CoV 2 here"
    library = load_tokenizer(folder)
    library.add_tokens(["zebra", "SARS-CoV 2"])
    ids = {name: library.convert_tokens_to_ids(name) for name in ("zebra", "SARS-CoV 2")}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    resize(folder, max(ids.values()) + 1)
    read, report = tokenizers_of(folder)
    found = library(text, add_special_tokens=False)["input_ids"]
    assert set(ids.values()) <= set(found)
    assert read.target.decode(found).replace(" ", "") == text.replace(" ", "")
    assert (read.source.encode(text) == found) == is_sought
    told = sum("added tokens" in line and "zebra, SARS-CoV 2" in line for line in report.ignored)
    assert told == (0 if is_sought else 2 if variant == "marian" else 1)


def test_settings_of_a_tokeniser_count(copied: Callable[..., Path]) -> None:
    bart, pegasus, byt5, text = copied("bart"), copied("pegasus"), copied("byt5"), "the server"
    plain = tokenizers_of(bart)[0].source
    change_json(bart / SETTINGS, add_prefix_space=True)
    assert tokenizers_of(bart)[0].source.encode(text) == theirs(bart, text) == plain.encode(f" {text}")
    for folder, fields, reason in (
        (pegasus, {"offset": 10**6}, "the model room for"),
        (pegasus, {"offset": "x"}, "offset must be a whole number"),
        (byt5, {"extra_ids": 10**6}, "special tokens; at most"),
        (byt5, {"extra_ids": 200}, "the tokeniser has 459 tokens, the model room for 384"),
    ):
        settings = (folder / SETTINGS).read_text()
        change_json(folder / SETTINGS, **fields)
        with pytest.raises(ForeignError, match=reason):
            tokenizers_of(folder)
        (folder / SETTINGS).write_text(settings)
    before = tokenizers_of(pegasus)[0].source.encode(text)
    change_json(pegasus / SETTINGS, offset=100)
    assert tokenizers_of(pegasus)[0].source.encode(text) == [token_id - 3 for token_id in before]
    change_json(byt5 / SETTINGS, tokenizer_class=None)
    with pytest.raises(ForeignError, match="no tokeniser"):
        tokenizers_of(byt5)
    change_json(byt5 / "config.json", tokenizer_class="ByT5Tokenizer")
    assert tokenizers_of(byt5)[0].source.encode("\u00e4b") == [0xC3 + 3, 0xA4 + 3, ord("b") + 3]


@pytest.mark.parametrize("layout", ["hub", "transformers"])
def test_a_mask_that_the_model_has_no_row_for_is_left_out(layout: str, copied: Callable[..., Path]) -> None:
    """As of bart-large-cnn: 50,265 tokens, of which the last is the mask, and 50,264 rows."""
    folder, text = copied("bart", layout), "A man walks the dog."
    rows = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    resize(folder, rows)
    read, report = tokenizers_of(folder)
    assert read.source.vocab_size == rows and any("no row for <mask>" in line for line in report.translated)
    assert read.source.encode(text) == theirs(folder, text)
    masked = read.source.encode("a <mask> b")
    assert max(masked) < rows and read.source.decode(masked) == "a <mask> b"
    resize(folder, rows - 1)
    with pytest.raises(ForeignError, match=f"{rows + 1} tokens, the model room for {rows - 1}"):
        tokenizers_of(folder)
