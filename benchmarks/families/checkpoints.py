"""Make foreign checkpoints, as `save_pretrained` of Transformers writes them: random weights, a tokeniser and settings of a family.

`python -m benchmarks.families.checkpoints VARIANT FOLDER [--size real] [--layout transformers]` makes one by hand.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import transformers

from benchmarks.families.variants import VARIANTS, Variant
from benchmarks.families.weights import randomise

Size = Literal["small", "real"]
Layout = Literal["hub", "transformers"]

SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model")


def make_checkpoint(folder: Path, name: str, size: Size = "small", layout: Layout = "hub", seed: int = 0) -> Path:
    """Make the checkpoint of a variant in a folder, which is made if need be; return the folder.

    Args:
        folder: Where it shall lie: a folder that is empty or is not there.
        name: One of `VARIANTS`.
        size: "small", or "real" for the variants that have one: opus-mt-en-de's, bart-base's, Flan-T5-base's, NLLB-600M's.
        layout: Tokeniser files as published checkpoints have them ("hub": SentencePiece's own, or `vocab.json` and `merges.txt`),
            or as today's Transformers saves them ("transformers": `tokenizer.json` wherever the family has one).
        seed: Decides the weights.

    Raises:
        KeyError: If there is no such variant.
        ValueError: If it has no real size.
        FileExistsError: If something lies in the folder.
    """
    variant = VARIANTS[name]
    settings, filled_to = variant.small, None
    if size == "real":
        if variant.real is None:
            raise ValueError(f"{name} has no real size")
        settings, filled_to = variant.real, variant.real_vocab_size
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    model = _model(variant, {**settings, **variant.tokens(folder, filled_to)})
    randomise(model, seed, is_tied=settings.get("tie_word_embeddings", True))
    model.save_pretrained(folder)
    if layout == "hub" and "tie_word_embeddings" in settings:
        _write_flag(folder / "config.json", settings["tie_word_embeddings"])
    if variant.has_json or layout == "transformers":
        _save_tokenizer(folder, variant.mended)
    if layout == "transformers":
        for path in folder.iterdir():
            if path.name in ("merges.txt", *SENTENCEPIECE) and (folder / "tokenizer.json").is_file():
                path.unlink()
        if (folder / "tokenizer.json").is_file():
            (folder / "vocab.json").unlink(missing_ok=True)
    return folder


def load_tokenizer(folder: Path) -> Any:
    """Load a folder's tokeniser by the class that it names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
        kind: Any = getattr(
            transformers, json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
        )
        return kind.from_pretrained(folder)


def _model(variant: Variant, settings: dict[str, Any]) -> Any:
    kind: Any = getattr(transformers, variant.model)
    model = kind(
        kind.config_class(dropout=0.0, **settings) if "d_kv" not in settings else kind.config_class(dropout_rate=0.0, **settings)
    )
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


def _save_tokenizer(folder: Path, mend: Callable[[dict[str, Any]], dict[str, Any]] | None) -> None:
    """Write the tokeniser as Transformers saves it today, beside the files that it was read from."""
    published = (folder / "tokenizer_config.json").read_bytes()
    load_tokenizer(folder).save_pretrained(folder)
    if mend is not None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(mend(json.loads(path.read_text(encoding="utf-8"))), ensure_ascii=False), encoding="utf-8")
        (folder / "tokenizer_config.json").write_bytes(published)
        load_tokenizer(folder).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a foreign checkpoint with random weights.")
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=("small", "real"), default="small")
    parser.add_argument("--layout", choices=("hub", "transformers"), default="hub")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    make_checkpoint(asked.folder, asked.variant, asked.size, asked.layout, asked.seed)
