"""Foreign checkpoints as `save_pretrained` of Transformers writes them: random weights, a tokeniser and settings of a family."""

import json
import warnings
from pathlib import Path
from typing import Any, Literal

import transformers

from tests.oracles.variants import VARIANTS, Variant
from tests.oracles.weights import randomise

Layout = Literal["hub", "transformers"]

SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model")


def make_checkpoint(folder: Path, name: str, layout: Layout = "hub", seed: int = 0) -> Path:
    """Make the checkpoint of a variant in a folder, with weights that the seed decides; return the folder.

    Tokeniser files are those of published checkpoints ("hub": SentencePiece's own, or `vocab.json` and `merges.txt`), or those that
    today's Transformers saves ("transformers": `tokenizer.json` wherever the family has one).
    """
    variant = VARIANTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**variant.settings, **variant.tokens(folder)}
    model = _model(variant, settings)
    randomise(model, seed, is_tied=settings.get("tie_word_embeddings", True))
    model.save_pretrained(folder)
    if layout == "hub" and "tie_word_embeddings" in settings:
        _write_flag(folder / "config.json", settings["tie_word_embeddings"])
    if variant.has_json or layout == "transformers":
        _save_tokenizer(folder, variant)
    if layout == "transformers" and (folder / "tokenizer.json").is_file():
        for file in ("vocab.json", "merges.txt", *SENTENCEPIECE):
            (folder / file).unlink(missing_ok=True)
    return folder


def load_tokenizer(folder: Path) -> Any:
    name = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
        return getattr(transformers, name).from_pretrained(folder)


def _model(variant: Variant, settings: dict[str, Any]) -> Any:
    kind: Any = getattr(transformers, variant.model)
    model = kind(kind.config_class(**{"dropout_rate" if "d_kv" in settings else "dropout": 0.0}, **settings))
    generation = dict(variant.generation)
    if generation.pop("is_padding_banned", False):
        generation["bad_words_ids"] = [[settings["pad_token_id"]]]
    model.generation_config.update(**generation)
    for key, value in generation.items():
        setattr(model.generation_config, key, value)
    return model.eval()


def _write_flag(path: Path, is_tied: bool) -> None:
    """Say whether the projection is tied as published configurations do: today's classes write True for all of T5's family."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("scale_decoder_outputs", None)
    path.write_text(json.dumps({**settings, "tie_word_embeddings": is_tied}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_tokenizer(folder: Path, variant: Variant) -> None:
    published = (folder / "tokenizer_config.json").read_bytes()
    load_tokenizer(folder).save_pretrained(folder)
    if variant.mended is not None:
        path = folder / "tokenizer.json"
        mended = variant.mended(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(mended, ensure_ascii=False), encoding="utf-8")
        (folder / "tokenizer_config.json").write_bytes(published)
        load_tokenizer(folder).save_pretrained(folder)
