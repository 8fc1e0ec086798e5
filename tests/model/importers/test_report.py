"""The report names every field of a configuration, as used or with the reason why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.importers.report import Report
from tests.model.importers.conftest import change_json, change_weights
from tests.oracles.variants import VARIANTS

# Read of config.json, and covered by the line on the network, the tables or the lengths.
USED = """
    model_type vocab_size decoder_vocab_size share_encoder_decoder_embeddings tie_word_embeddings scale_embedding d_model
    d_kv d_ff num_heads num_layers num_decoder_layers encoder_layers decoder_layers encoder_attention_heads
    decoder_attention_heads encoder_ffn_dim decoder_ffn_dim max_position_embeddings activation_function feed_forward_proj
    dense_act_fn is_gated_act layer_norm_epsilon relative_attention_num_buckets relative_attention_max_distance
    scale_decoder_outputs is_encoder_decoder is_decoder n_positions pad_token_id eos_token_id
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_field_is_used_or_named(variant: str, foreign: Callable[..., Path], imported: Any) -> None:
    folder = foreign(variant)
    lines = imported(folder)[1].lines()
    told = "\n".join(lines)
    fields = json.loads((folder / "config.json").read_text())
    assert [name for name in fields if name not in USED.split() and name not in told] == []
    assert [name for name in json.loads((folder / "generation_config.json").read_text()) if name not in told] == []
    # Tasks are something to choose, not something without effect.
    assert sum("task_specific_params" in line for line in lines) == ("task_specific_params" in fields)


def test_unknown_fields_and_halves_are_named(copied: Callable[..., Path], imported: Any) -> None:
    folder = copied("bart")
    change_json(folder / "config.json", colour="red", rope_scaling={"factor": 2.0}, nothing=[], normalize_before=False)
    halves = [f"model.{side}.layers.0.fc1.weight" for side in ("encoder", "decoder")]
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name].half() for name in halves}))
    _, report = imported(folder)
    (unknown,) = [line for line in report.ignored if line.endswith(": not known here")]
    assert unknown == "config.json: colour 'red', rope_scaling {'factor': 2.0}: not known here"
    assert "config.json: nothing []: says nothing" in report.ignored
    assert any("normalize_before false" in line and "old versions" in line for line in report.ignored)
    (line,) = [line for line in report.found if line.startswith("weights")]
    assert line.endswith(" tensors of F16 and F32, read into single precision")


def test_groups_come_in_order_and_empty_ones_not_at_all() -> None:
    report = Report(checked=["c"], found=["a", "b"])
    report.ignore("config.json", [], "no reason")
    assert report.lines() == ["found:      a", "found:      b", "checked:    c"]
    report.ignore("config.json", [("x", None), ("y", True), ("z", "0123456789" * 10)], "of training")
    assert report.ignored == ["config.json: x null, y true, z '012345678901234567890123456789012345...: of training"]
