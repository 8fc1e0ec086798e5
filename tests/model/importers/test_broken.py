"""Folders that are broken, lie, or are not supported: each is refused in a line that names file and cause; nothing is written."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.importing import ImportOptions, import_checkpoint
from dragoman.model.importers.weights import Limits
from tests.model.importers.conftest import change_json, change_weights

Change = Callable[[Path], Any]
FC1, HEAD = "model.encoder.layers.0.fc1.weight", "classification_head.dense.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:5891b5b522d5df08\nsize 298000000\n"
CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS = "model.safetensors"

# Fields of config.json that name the fault themselves.
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("bart", {"model_type": "llama"}, "'llama' is not known here; known: bart, m2m_100"),
    ("bart", {"model_type": None}, "model_type is missing"),
    ("bart", {"model_type": ["bart"]}, "model_type must be a string"),
    ("bart", {"model_type": None, "format_version": 1}, "a checkpoint of ours already"),
    ("t5", {"model_type": "switch_transformers"}, "a mixture of experts"),
    ("m2m100", {"num_experts": 4}, "num_experts: a mixture of experts"),
    ("bart", {"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map: it needs code"),
    ("bart", {"is_encoder_decoder": False}, "is_encoder_decoder is false"),
    ("bart", {"quantization_config": {"load_in_8bit": True}}, "its weights are quantised"),
    ("bart", {"decoder_attention_heads": 8}, "encoder_attention_heads 4 and decoder"),
    ("bart", {"activation_function": "mish"}, "activation_function 'mish' is not known"),
    ("t5", {"feed_forward_proj": "gated-mish"}, "not go with feed_forward_proj|not known"),
    ("bart", {"d_model": "64"}, "d_model must be a whole number, not '64'"),
    ("bart", {"d_model": 0}, "d_model is 0, which is not between"),
    ("bart", {"d_model": 66}, "d_model 66 is not a multiple of num_heads 4"),
    ("bart", {"encoder_layers": 10**7}, "more layers than"),
    ("marian", {"max_position_embeddings": 2**24 - 1}, "max_position_embeddings is 16777215"),
    ("t5", {"relative_attention_max_distance": 10**9}, "not between 1 and"),
    ("t5", {"layer_norm_epsilon": float("nan")}, "must be a finite number"),
]


def with_config(**fields: Any) -> Change:
    return lambda folder: change_json(folder / CONFIG, **fields)


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    return lambda folder: change_weights(folder, change)


def with_text(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def other_folder(*names: str) -> Change:
    """Return a change to a folder with such files in place of a checkpoint."""

    def change(folder: Path) -> None:
        for name in (CONFIG, WEIGHTS):
            (folder / name).unlink()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")

    return change


# The variant, the change of its folder, the file that is named, the cause.
BROKEN: list[tuple[str, Change, str, str]] = [
    ("bart", lambda f: (f / CONFIG).unlink(), CONFIG, "No such file or directory"),
    ("bart", lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()), CONFIG, "not a regular file"),
    ("bart", lambda folder: os.truncate(folder / CONFIG, 2**40), CONFIG, "more than 1048576 bytes"),
    ("bart", with_text(CONFIG, "[]"), CONFIG, "not a JSON object"),
    ("bart", with_text(CONFIG, "[" * 10**5), CONFIG, "nested too deeply|not JSON"),
    (
        "bart",
        lambda f: ((f / GENERATION).unlink(), (f / GENERATION).symlink_to("nowhere")),
        GENERATION,
        "No such file or directory",
    ),
    ("bart", with_text("adapter_config.json", "{}"), "adapter_config.json", "merge it into its model"),
    ("bart", lambda folder: change_json(folder / GENERATION, eos_token_id=[2, 3]), GENERATION, "eos_token_id names 2 ends"),
    (
        "bart",
        lambda f: [change_json(f / name, decoder_start_token_id=9999) for name in (CONFIG, GENERATION)],
        CONFIG,
        "decoder_start_id 9999 is outside the vocabulary of 401",
    ),
    # Folders of others.
    ("bart", other_folder(f"checkpoint-500/{CONFIG}", f"checkpoint-1000/{CONFIG}"), "", "Trainer .* import .*/checkpoint-1000$"),
    ("bart", other_folder(f"snapshots/a1b2/{CONFIG}"), "", "in the cache of the hub .* import .*/snapshots/a1b2, or"),
    (
        "bart",
        other_folder("model.bin", "shared_vocabulary.json", CONFIG),
        "",
        r"of CTranslate2 \(model\.bin\); import the checkpoint",
    ),
    ("bart", lambda f: (f / WEIGHTS).rename(f / "encoder_model.onnx"), "", r"graphs of ONNX \(encoder_model\.onnx\); import the"),
    ("bart", other_folder("onnx/decoder_model.onnx"), "", "graphs of ONNX"),
    ("bart", other_folder("dict.en.txt", "checkpoint_best.pt"), "", "of fairseq .* Transformers 4"),
    ("bart", other_folder("model.npz", "decoder.yml"), "", "of Marian itself .* Transformers 4"),
    # Weights.
    ("bart", with_config(encoder_ffn_dim=97), WEIGHTS, rf"{re.escape(FC1)} is \[96, 64\], where config\.json asks for \[97, 64\]"),
    ("bart", with_config(max_position_embeddings=200), WEIGHTS, r"embed_positions\.weight is \[162, 64\], .* for \[202, 64\]"),
    ("bart", with_config(decoder_layers=1), WEIGHTS, r"model\.decoder\.layers\.1\..* and 23 more: nothing"),
    ("bart", with_config(tie_word_embeddings=False), WEIGHTS, r"lm_head\.weight is missing, .* \(tie_word_embeddings\)"),
    ("bart", with_weights(lambda w: w.pop(FC1)), WEIGHTS, f"{re.escape(FC1)} missing"),
    ("bart", with_weights(lambda w: w.pop("model.shared.weight")), WEIGHTS, r"model\.encoder\.embed_tokens\.weight is missing"),
    ("bart", with_weights(lambda w: w.update({HEAD: torch.ones(2, 2)})), WEIGHTS, rf"{re.escape(HEAD)}: nothing in this arch"),
    # Files that Git LFS has.
    ("t5", with_text("spiece.model", POINTER), "spiece.model", "`git lfs pull`"),
    ("nllb", with_text("tokenizer.json", POINTER), "tokenizer.json", "`git lfs pull`"),
    # Tokenisers.
    (
        "t5",
        lambda f: (f / "spiece.model").unlink(),
        "",
        r"no tokeniser: there is neither spiece\.model nor vocab\.json and merges\.txt nor tokenizer\.json",
    ),
    ("t5", with_text("spiece.model", "nothing"), "spiece.model", "not a sentencepiece model|not a SentencePiece"),
    ("nllb", with_text("tokenizer.json", '{"model":'), "tokenizer.json", "not JSON"),
    ("bart", with_text("vocab.json", "[]"), "vocab.json", "not a JSON object"),
    ("bart", lambda folder: change_json(folder / "vocab.json", x=5000), "vocab.json", "has 5001 tokens, the model room for 401"),
    ("marian", lambda folder: change_json(folder / "vocab.json", x="y"), "vocab.json", "'x' and 'y'|'x'"),
    ("marian", lambda folder: change_json(folder / "vocab.json", **{"</s>": 5, "<unk>": 1}), "", "is 5 in the tokeniser and 0 in"),
    ("marian-two-vocabularies", lambda f: (f / "target_vocab.json").unlink(), "target_vocab.json", "No such file"),
]
CASES = BROKEN + [(variant, with_config(**fields), CONFIG, reason) for variant, fields, reason in CONFIGS]


@pytest.mark.parametrize(("variant", "change", "file", "reason"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_it_is_refused_in_one_line(variant: str, change: Change, file: str, reason: str, copied, tmp_path: Path) -> None:
    folder = copied(variant)
    change(folder)
    expected = re.escape(str(folder / file)) + rf"(: |/).*({reason})"
    with pytest.raises(ForeignError, match=f"^{expected}") as caught:
        import_checkpoint(folder, tmp_path / "out", ImportOptions())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert [path.name for path in tmp_path.iterdir()] == [variant]


def test_an_output_in_the_way_is_refused_and_a_checkpoint_replaced_only_if_forced(
    copied: Any, foreign: Any, tmp_path: Path
) -> None:
    folder, output = copied("t5"), tmp_path / "out"
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "link").symlink_to(folder)
    import_checkpoint(folder, output, ImportOptions())
    first = (output / WEIGHTS).read_bytes()
    for place, is_forced, reason in (
        (folder, False, "lies in"),
        (folder / "out", False, "lies in"),
        (tmp_path, False, "lies in .* or around it"),
        (tmp_path / "link" / "out", False, "lies in"),
        (tmp_path / "file", False, "not a directory"),
        (tmp_path / "file" / "out", False, "not a directory"),
        (tmp_path / "full", False, "not empty"),
        (tmp_path / "full", True, "is not a checkpoint; it will not be replaced"),
        (output, False, "--force"),
    ):
        with pytest.raises(ForeignError, match=f"^{re.escape(str(place.parent))}.*{reason}"):
            import_checkpoint(folder, place, ImportOptions(is_forced=is_forced))
    assert (tmp_path / "full" / "mine").exists() and (output / WEIGHTS).read_bytes() == first
    import_checkpoint(foreign("bart"), output, ImportOptions(is_forced=True))
    assert json.loads((output / CONFIG).read_text())["name"] == "foreign-bart-hub"
    assert {path.name for path in tmp_path.iterdir()} == {"t5", "out", "file", "full", "link"}


def test_an_order_that_the_model_cannot_keep_is_refused(copied: Callable[..., Path], tmp_path: Path) -> None:
    folder, output = copied("bart"), tmp_path / "out"
    with pytest.raises(ForeignError, match=r"config\.json: its position tables have 160 rows \(max_position_embeddings\), not 161"):
        import_checkpoint(folder, output, ImportOptions(limits=Limits(max_source_tokens=161)))
    change_weights(folder, lambda tensors: tensors[FC1].fill_(1e6))
    with pytest.raises(ValueError, match=r"encoder\.layers\.0\.feed_forward\.inner\.weight does not fit half precision"):
        import_checkpoint(folder, output, ImportOptions(is_half=True))
    assert not output.exists()
