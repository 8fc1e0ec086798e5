"""Special tokens that a text names: text, or, where that is asked for, the ids that Transformers has for the same text."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import transformers

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.importers.files import ForeignError
from dragoman.model.text.tokenizers import Tokenizers
from tests.oracles.checkpoints import load_tokenizer
from tests.oracles.variants import VARIANTS
from tests.oracles.vocabularies import T5, train

TEXTS = ("the {} work", "the{}work.{}  {}\nand", " {}", "{} {} the  {}.", "of{}the {}{}")
# Of every family: what begins, ends or fills a sequence, what is unknown, languages.
STRUCTURE = ("<s>", "</s>", "<pad>", "<unk>", "<2de>", ">>fra<<", "__de__", "deu_Latn", "de_DE")


def with_added_tokens(folder: Path, variant: str) -> Path:
    """Add tokens as fine-tuning in Transformers does."""
    tokenizer, model = load_tokenizer(folder), getattr(transformers, VARIANTS[variant].model).from_pretrained(folder)
    tokenizer.add_tokens(["<hl>", transformers.AddedToken("<gap>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens(["<sep>"], special_tokens=True)
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    for saved in (tokenizer, model):
        saved.save_pretrained(folder)
    return folder


def check(tokenizers: Tokenizers, theirs: Any, names: Collection[str]) -> None:
    source, special = tokenizers.source, {token.content: token.id for token in tokenizers.special_tokens}
    assert special.keys() >= set(names) and not special.keys() & {*STRUCTURE}
    for name in special:
        for text in (text.replace("{}", name) for text in TEXTS):
            ids = tokenizers.encode_with_special_tokens(text)
            assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
            assert special[name] in ids and special[name] not in source.encode(text)
    for text in (f"the {name} work" for name in STRUCTURE):
        assert tokenizers.encode_with_special_tokens(text) == source.encode(text)


@pytest.mark.parametrize("layout", ["hub", "transformers"])
@pytest.mark.parametrize("variant", ["t5", "byt5", "bart", "pegasus", "nllb", "mbart", "marian-multilingual", "madlad"])
def test_tokens_of_a_text_are_those_of_transformers(variant: str, layout: Any, copied: Callable[..., Path], imported: Any) -> None:
    folder = with_added_tokens(copied(variant, layout), variant)
    output, report = imported(folder, reads_special_tokens=True)
    checkpoint, theirs = Checkpoint.load(output), load_tokenizer(folder)
    assert checkpoint.defaults.special_tokens_in_text is True
    assert any(line.startswith("special tokens that a text names are tokens: ") for line in report.translated)
    check(checkpoint.tokenizers, theirs, ["<hl>", "<gap>", "<sep>"])
    ids = checkpoint.tokenizers.encode_with_special_tokens("the <hl> work")
    if variant not in ("byt5", "marian-multilingual"):  # which do not write added tokens
        assert checkpoint.tokenizers.target.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("variant", "name"), [("t5", "<extra_id_7>"), ("byt5", "<extra_id_7>"), ("pegasus", "<n>")])
def test_sentinels_and_pieces_need_no_other_file(variant: str, name: str, copied: Callable[..., Path], imported: Any) -> None:
    folder = copied(variant)
    if name == "<n>":
        (folder / "spiece.model").write_bytes(train("unigram", 300, T5, [name]))
    output, report = imported(folder)
    checkpoint, theirs = Checkpoint.load(output), load_tokenizer(folder)
    assert checkpoint.defaults.special_tokens_in_text is None
    [told] = [line for line in report.translated if line.startswith("special tokens that a text names are text: ")]
    assert "--special-tokens-in-text" in told
    check(checkpoint.tokenizers, theirs, [name])
    if name == "<n>":
        ids = checkpoint.tokenizers.encode_with_special_tokens("the work.<n>the <n> work")
        assert checkpoint.tokenizers.target.decode(ids) == "the work.<n>the <n> work"


def test_tokens_added_to_byte_pairs_need_no_tokenizer_json(copied: Callable[..., Path], imported: Any) -> None:
    folder = with_added_tokens(copied("bart"), "bart")
    theirs = load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    ids = {name: theirs.convert_tokens_to_ids(name) for name in ("<hl>", "<sep>")}
    (folder / "added_tokens.json").write_text(json.dumps(ids), encoding="utf-8")
    check(Checkpoint.load(imported(folder)[0]).tokenizers, theirs, [*ids, "<mask>"])


def test_there_may_be_none(copied: Callable[..., Path], imported: Any) -> None:
    """In Transformers, too, the tokens that are added to M2M100 have ids of its languages."""
    with pytest.raises(ForeignError, match="--special-tokens-in-text: its tokeniser has none that a text may name"):
        imported(with_added_tokens(copied("m2m100"), "m2m100"), reads_special_tokens=True)
