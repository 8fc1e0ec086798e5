"""Folders that are broken, lie, or are beyond us: each is refused in a line that names file and cause, and nothing is written."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.importing import Order, import_checkpoint
from tests.model.importers.conftest import change_json, change_weights

Change = Callable[[Path], Any]
FC1 = "model.encoder.layers.0.fc1.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:5891b5b522d5df08\nsize 298000000\n"
WI = "encoder.block.0.layer.1.DenseReluDense.wi.weight"


def with_config(**fields: Any) -> Change:
    return lambda folder: change_json(folder / "config.json", **fields)


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    return lambda folder: change_weights(folder, change)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def with_text(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FC1][0, 0] = torch.nan


def untied_without_head(folder: Path) -> None:
    change_json(folder / "config.json", tie_word_embeddings=False)


def missing_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    homes = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {FC1: "model-00002-of-00002.safetensors"}
    save_file({name: tensor for name, tensor in tensors.items() if name != FC1}, folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def with_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": Path("a"), "b": os.system}, folder / "pytorch_model.bin")


def without_memory(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, FC1: tensors[FC1].to("meta")}, folder / "pytorch_model.bin")


def pointer_to_a_shard(folder: Path) -> None:
    missing_shard(folder)
    (folder / "model-00002-of-00002.safetensors").write_text(POINTER)


def link_to_nothing(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "nowhere")

    return change


def as_directory(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def huge_config(folder: Path) -> None:
    os.truncate(folder / "config.json", 2**40)  # of which the disk holds nothing


# What: the family, what is done to its folder, the file that is named, the cause.
BROKEN: dict[str, tuple[str, Change, str, str]] = {
    "missing shard": ("bart", missing_shard, "model-00002-of-00002.safetensors", r"no such file"),
    "wrong shapes": (
        "bart",
        with_config(encoder_ffn_dim=97),
        "model.safetensors",
        rf"{re.escape(FC1)} is \[96, 64\], where config\.json asks for \[97, 64\]",
    ),
    "unknown architecture": (
        "bart",
        with_config(model_type="llama"),
        "config.json",
        "'llama' is not known here; known: bart, m2m_100",
    ),
    "pickle with code": ("bart", with_code, "pytorch_model.bin", "holds pickled code"),
    "no tokeniser": ("t5", without("spiece.model"), "", r"no tokeniser: there is neither spiece\.model nor tokenizer\.json"),
    "vocabulary larger than the table": (
        "bart",
        lambda folder: change_json(folder / "vocab.json", surplus=5000),
        "vocab.json",
        r"the tokeniser has 5001 tokens, the model room for 401",
    ),
    "NaN weights": ("bart", with_weights(with_nan), "model.safetensors", rf"{re.escape(FC1)} holds NaN"),
    "truncated safetensors": ("bart", truncated, "model.safetensors", "incomplete"),
    "wrong dtype": (
        "bart",
        with_weights(lambda tensors: tensors.update({FC1: tensors[FC1].to(torch.int8)})),
        "model.safetensors",
        rf"{re.escape(FC1)} is of type I8",
    ),
    "config that lies about tying": (
        "bart",
        untied_without_head,
        "model.safetensors",
        r"lm_head\.weight is missing, though config\.json says that it is a table of its own \(tie_word_embeddings\)",
    ),
    "weights without memory": ("bart", without_memory, "pytorch_model.bin", rf"{re.escape(FC1)} is not a plain tensor"),
    "weights that Git LFS has": ("bart", with_text("model.safetensors", POINTER), "model.safetensors", "`git lfs pull`"),
    "pickled weights that Git LFS has": (
        "bart",
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin").write_text(POINTER),
        "pytorch_model.bin",
        "`git lfs pull`",
    ),
    "shard that Git LFS has": ("bart", pointer_to_a_shard, "model-00002-of-00002.safetensors", "`git lfs pull`"),
    "pieces that Git LFS has": ("t5", with_text("spiece.model", POINTER), "spiece.model", "`git lfs pull`"),
    "side's pieces that Git LFS has": ("marian", with_text("target.spm", POINTER), "target.spm", "`git lfs pull`"),
    "tokenizer.json that Git LFS has": ("nllb", with_text("tokenizer.json", POINTER), "tokenizer.json", "`git lfs pull`"),
    "settings that are a link to nothing": (
        "bart",
        link_to_nothing("generation_config.json"),
        "generation_config.json",
        "No such file or directory",
    ),
    "tokeniser's settings that are a link to nothing": (
        "bart",
        link_to_nothing("tokenizer_config.json"),
        "tokenizer_config.json",
        "No such file or directory",
    ),
    "more positions than memory": (
        "marian",
        with_config(max_position_embeddings=2**24 - 1),
        "config.json",
        "max_position_embeddings is 16777215",
    ),
    "no configuration": ("bart", without("config.json"), "config.json", "No such file or directory"),
    "configuration that is a directory": ("bart", as_directory("config.json"), "config.json", "not a regular file"),
    "huge configuration": ("bart", huge_config, "config.json", "more than 1048576 bytes"),
    "configuration that is no JSON": ("bart", with_text("config.json", "{"), "config.json", "not JSON"),
    "configuration that is no object": ("bart", with_text("config.json", "[]"), "config.json", "not a JSON object"),
    "configuration that is nested deeply": (
        "bart",
        with_text("config.json", "[" * 10**5),
        "config.json",
        "nested too deeply|not JSON",
    ),
    "generation that is nested deeply": (
        "bart",
        with_text("generation_config.json", '{"a":' * 10**5),
        "generation_config.json",
        "nested too deeply|not JSON",
    ),
    "index that leads elsewhere": (
        "bart",
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            with_text("model.safetensors.index.json", '{"weight_map": {"a": "../../etc/passwd"}}')(folder),
        ),
        "model.safetensors.index.json",
        "no file of the folder",
    ),
    "no weights": ("bart", without("model.safetensors"), "", "neither model.safetensors nor pytorch_model.bin"),
    "code of its own": ("bart", with_config(auto_map={"AutoModel": "modeling.Mine"}), "config.json", "auto_map: it needs code"),
    "mixture of experts": ("m2m100", with_config(num_experts=4), "config.json", "num_experts: a mixture of experts"),
    "switch": ("t5", with_config(model_type="switch_transformers"), "config.json", "a mixture of experts"),
    "other heads a side": ("bart", with_config(decoder_attention_heads=8), "config.json", "encoder_attention_heads 4 and decoder"),
    "unknown activation": (
        "bart",
        with_config(activation_function="mish"),
        "config.json",
        "activation_function 'mish' is not known",
    ),
    "unknown gate": ("t5", with_config(feed_forward_proj="gated-mish"), "config.json", "not go with feed_forward_proj|not known"),
    "activation that lies": ("t5", with_config(dense_act_fn="silu"), "config.json", "dense_act_fn 'silu' does not go with"),
    "decoder alone": ("bart", with_config(is_encoder_decoder=False), "config.json", "is_encoder_decoder is false"),
    "quantised": ("bart", with_config(quantization_config={"load_in_8bit": True}), "config.json", "its weights are quantised"),
    "adapter": ("bart", with_text("adapter_config.json", "{}"), "adapter_config.json", "merge it into its model"),
    "one of ours": ("bart", with_config(model_type=None, format_version=1), "config.json", "a checkpoint of ours already"),
    "no type": ("bart", with_config(model_type=None), "config.json", "model_type is missing"),
    "type that is no text": ("bart", with_config(model_type=["bart"]), "config.json", "model_type must be a string"),
    "width that is no number": ("bart", with_config(d_model="64"), "config.json", "d_model must be a whole number, not '64'"),
    "width of nothing": ("bart", with_config(d_model=0), "config.json", "d_model is 0, which is not between"),
    "width beyond measure": ("bart", with_config(d_model=10**15), "config.json", "d_model is 1000000000000000"),
    "layers beyond measure": ("bart", with_config(encoder_layers=10**7), "config.json", "more layers than"),
    "vocabulary beyond measure": ("bart", with_config(vocab_size=2**24 - 1), "model.safetensors", "where config.json asks for"),
    "distance beyond measure": ("t5", with_config(relative_attention_max_distance=10**9), "config.json", "not between 1 and"),
    "epsilon that is no number": ("t5", with_config(layer_norm_epsilon=float("nan")), "config.json", "must be a finite number"),
    "heads that do not divide": ("bart", with_config(d_model=66), "config.json", "d_model 66 is not a multiple of num_heads 4"),
    "missing tensor": ("bart", with_weights(lambda tensors: tensors.pop(FC1)), "model.safetensors", f"{re.escape(FC1)} missing"),
    "missing tensor of T5": ("t5", with_weights(lambda tensors: tensors.pop(WI)), "model.safetensors", f"{re.escape(WI)} missing"),
    "missing norm": (
        "mbart",
        with_weights(lambda tensors: tensors.pop("model.encoder.layer_norm.weight")),
        "model.safetensors",
        r"model\.encoder\.layer_norm\.weight missing",
    ),
    "tensor without a use": (
        "bart",
        with_weights(lambda tensors: tensors.update({"classification_head.dense.weight": torch.ones(2, 2)})),
        "model.safetensors",
        r"classification_head\.dense\.weight: nothing in this architecture has a use for it",
    ),
    "too few layers": (
        "bart",
        with_config(decoder_layers=1),
        "model.safetensors",
        r"model\.decoder\.layers\.1\..* and 23 more: nothing",
    ),
    "no token table": (
        "bart",
        with_weights(lambda tensors: tensors.pop("model.shared.weight")),
        "model.safetensors",
        r"model\.encoder\.embed_tokens\.weight is missing",
    ),
    "short position table": (
        "bart",
        with_config(max_position_embeddings=200),
        "model.safetensors",
        r"embed_positions\.weight is \[162, 64\], where config\.json asks for \[202, 64\]",
    ),
    "several ends": (
        "bart",
        lambda folder: change_json(folder / "generation_config.json", eos_token_id=[2, 3]),
        "generation_config.json",
        "eos_token_id names 2 ends",
    ),
    "start that is no token": (
        "bart",
        lambda folder: [
            change_json(folder / name, decoder_start_token_id=9999) for name in ("config.json", "generation_config.json")
        ],
        "config.json",
        "decoder_start_id 9999 is outside the vocabulary of 401",
    ),
    "other end of sequence": (
        "marian",
        lambda folder: change_json(folder / "vocab.json", **{"</s>": 5, "<unk>": 1}),
        "",
        "the end of sequence is 5 in the tokeniser and 0 in the model",
    ),
    "damaged sentencepiece": (
        "t5",
        with_text("spiece.model", "nothing"),
        "spiece.model",
        "not a sentencepiece model|not a SentencePiece",
    ),
    "vocabulary that is no object": ("bart", with_text("vocab.json", "[]"), "vocab.json", "not a JSON object"),
    "vocabulary with an id that is none": (
        "marian",
        lambda folder: change_json(folder / "vocab.json", x="y"),
        "vocab.json",
        "'x' and 'y'|'x'",
    ),
    "tokeniser that is a directory": ("t5", as_directory("spiece.model"), "spiece.model", "not a regular file"),
    "damaged tokenizer.json": ("nllb", with_text("tokenizer.json", '{"model":'), "tokenizer.json", "not JSON"),
    "no target vocabulary": ("marian-two-vocabularies", without("target_vocab.json"), "target_vocab.json", "No such file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_it_is_refused_in_one_line(case: str, copied: Callable[..., Path], tmp_path: Path) -> None:
    variant, change, file, reason = BROKEN[case]
    folder = copied(variant)
    change(folder)
    expected = re.escape(str(folder / file)) + rf"(: |/).*({reason})"
    with pytest.raises(ForeignError, match=f"^{expected}") as caught:
        import_checkpoint(folder, tmp_path / "out", Order())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert [path.name for path in tmp_path.iterdir()] == [variant]


def test_an_output_in_the_way_is_refused(copied: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied("t5")
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "link").symlink_to(folder)
    for output, reason in (
        (folder, "lies in"),
        (folder / "out", "lies in"),
        (tmp_path, "lies in .* or around it"),
        (tmp_path / "link" / "out", "lies in"),
        (tmp_path / "file", "not a directory"),
        (tmp_path / "file" / "out", "not a directory"),
        (tmp_path / "full", "not empty"),
    ):
        with pytest.raises(ForeignError, match=f"^{re.escape(str(output.parent))}.*{reason}"):
            import_checkpoint(folder, output, Order())
    with pytest.raises(ForeignError, match="is not a checkpoint; it will not be replaced"):
        import_checkpoint(folder, tmp_path / "full", Order(is_forced=True))
    assert (tmp_path / "full" / "mine").exists()


def test_a_checkpoint_is_replaced_if_told_so(foreign: Callable[..., Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    import_checkpoint(foreign("t5"), output, Order())
    first = (output / "model.safetensors").read_bytes()
    with pytest.raises(ForeignError, match="--force"):
        import_checkpoint(foreign("bart"), output, Order())
    assert (output / "model.safetensors").read_bytes() == first
    import_checkpoint(foreign("bart"), output, Order(is_forced=True))
    assert json.loads((output / "config.json").read_text())["name"] == "foreign-bart-hub"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_nothing(foreign: Callable[..., Path], tmp_path: Path) -> None:
    """No file may be larger than a checkpoint's weights: writing them fails half-way."""
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from dragoman.model.importers.importing import Order, import_checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]}))\n"
        "try: import_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Order())\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    output = tmp_path / "out"
    ran = subprocess.run([sys.executable, "-c", script, foreign("marian"), output], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(f"ForeignError {output}: ")
    assert ran.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_weight_too_large_for_half_precision_is_named(copied: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied("bart")
    change_weights(folder, lambda tensors: tensors[FC1].fill_(1e6))
    with pytest.raises(ValueError, match=r"encoder\.layers\.0\.feed_forward\.inner\.weight does not fit half precision"):
        import_checkpoint(folder, tmp_path / "out", Order(is_half=True))
    assert not (tmp_path / "out").exists()


def test_a_length_beyond_the_table_is_refused(foreign: Callable[..., Path], tmp_path: Path) -> None:
    from dragoman.model.importers.foreign import Limits

    with pytest.raises(ForeignError, match=r"config\.json: its position tables have 160 rows \(max_position_embeddings\), not 161"):
        import_checkpoint(foreign("bart"), tmp_path / "out", Order(limits=Limits(max_source_tokens=161)))
