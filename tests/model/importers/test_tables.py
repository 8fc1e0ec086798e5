"""Sharing and tying are read off the tensors; what a configuration says otherwise is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.importers.errors import ForeignError
from tests.model.importers.conftest import change_json, change_weights
from tests.model.importers.test_families import logits, network

SHARED, ENCODER, DECODER = "model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


@pytest.mark.parametrize("kept", [SHARED, ENCODER, DECODER, "lm_head.weight"])
def test_a_tied_table_may_have_any_of_its_names(kept: str, copied: Callable[..., Path], foreign: Callable[..., Path]) -> None:
    folder = copied("bart")
    change_weights(folder, lambda tensors: tensors.update({kept: tensors.pop(SHARED)}))
    ours, expected = network(folder), network(foreign("bart"))
    assert (ours.config.is_embedding_shared, ours.config.is_projection_tied) == (True, True)
    assert torch.equal(ours.encoder.embedding.tokens.weight, expected.encoder.embedding.tokens.weight)


def test_copies_of_one_table_are_one(copied: Callable[..., Path], imported: Any) -> None:
    """`pytorch_model.bin` has a table by all its names."""
    folder = copied("bart")
    copies = (ENCODER, DECODER, "lm_head.weight")
    change_weights(folder, lambda tensors: tensors.update({name: tensors[SHARED].clone() for name in copies}))
    output, report = imported(folder)
    model = Checkpoint.load(output).model
    assert model.encoder.embedding.tokens is model.decoder.embedding.tokens
    assert model.decoder.projection is None
    assert "one token table for both sides, the output projection is the decoder’s" in report.translated


def test_a_projection_that_differs_is_kept_though_called_tied(copied: Callable[..., Path], imported: Any) -> None:
    """As Transformers keeps it."""
    folder = copied("bart")
    change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[SHARED] + 0.1}))
    ours, theirs = logits(network(folder), folder, "BartForConditionalGeneration")
    assert torch.equal(ours, theirs)
    _, report = imported(folder)
    assert any("is tied to the token table, but lm_head.weight and" in line for line in report.translated)


def test_equal_tables_are_tied_though_called_untied(copied: Callable[..., Path], imported: Any) -> None:
    folder = copied("bart-untied")
    change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[DECODER].clone()}))
    output, report = imported(folder)
    assert Checkpoint.load(output).model.config.is_projection_tied
    assert any("not tied to the token table, but the tensors are equal" in line for line in report.translated)
    ours, theirs = logits(network(folder), folder, "BartForConditionalGeneration")
    assert torch.equal(ours, theirs)


def test_sides_without_tables_of_their_own_share_one_though_untied(copied: Callable[..., Path]) -> None:
    """So Transformers before 5 wrote a model whose projection alone is untied."""
    folder = copied("bart-untied")
    change_weights(folder, lambda tensors: [tensors.pop(name) for name in (ENCODER, DECODER)])
    config = network(folder).config
    assert (config.is_embedding_shared, config.is_projection_tied) == (True, False)


def test_a_table_of_one_side_does_not_stand_in_for_the_other_untied(copied: Callable[..., Path]) -> None:
    folder = copied("bart-untied")
    change_weights(folder, lambda tensors: [tensors.pop(name) for name in (SHARED, ENCODER)])
    with pytest.raises(ForeignError, match=r"model\.encoder\.embed_tokens\.weight is missing"):
        network(folder)


def test_t5_without_a_projection_is_tied_whatever_it_says(copied: Callable[..., Path], imported: Any) -> None:
    """As Transformers 5 ties it; the flag still says that outputs are not scaled."""
    folder = copied("t5-v1.1")
    change_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    ours, theirs = logits(network(folder), folder, "T5ForConditionalGeneration")
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    output, report = imported(folder)
    config = Checkpoint.load(output).model.config
    assert (config.is_projection_tied, config.is_output_scaled) == (True, False)
    assert any("not tied to the token table, but there is no projection of its own" in line for line in report.translated)


@pytest.mark.parametrize(
    ("variant", "fields", "is_scaled"),
    [
        ("t5", {}, True),
        ("t5", {"tie_word_embeddings": None}, True),
        ("t5", {"tie_word_embeddings": False}, True),  # its scale_decoder_outputs is true
        ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": None}, False),
        ("t5", {"tie_word_embeddings": None, "scale_decoder_outputs": None}, True),
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ("t5-v1.1", {}, False),
        ("mt5", {"tie_word_embeddings": True}, False),
        ("umt5", {"tie_word_embeddings": False}, True),
    ],
)
def test_outputs_are_scaled_as_transformers_does(
    variant: str, fields: dict[str, Any], is_scaled: bool, copied: Callable[..., Path]
) -> None:
    folder = copied(variant)
    change_json(folder / "config.json", **fields)
    model = network(folder)
    assert model.config.is_output_scaled == is_scaled
    kind = {"mt5": "MT5", "umt5": "UMT5"}.get(variant, "T5") + "ForConditionalGeneration"
    ours, theirs = logits(model, folder, kind)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_a_scale_that_versions_disagree_on_is_told(copied: Callable[..., Path], imported: Any) -> None:
    folder = copied("umt5")
    change_json(folder / "config.json", tie_word_embeddings=False)
    _, report = imported(folder)
    assert any("Transformers 4 did not" in line for line in report.translated)


def test_a_bias_of_zeros_is_left_out(copied: Callable[..., Path], imported: Any) -> None:
    folder = copied("bart")
    change_weights(folder, lambda tensors: tensors["final_logits_bias"].zero_())
    output, report = imported(folder)
    assert not Checkpoint.load(output).model.config.has_output_bias
    assert "final_logits_bias is zero everywhere: left out" in report.translated
    ours, theirs = logits(network(folder), folder, "BartForConditionalGeneration")
    assert torch.equal(ours, theirs)


def test_names_without_a_prefix_are_known(copied: Callable[..., Path], foreign: Callable[..., Path]) -> None:
    """So the network is written without its head, as BART's own checkpoints are."""
    folder = copied("bart")
    kind = transformers.BartModel
    kind.from_pretrained(folder).save_pretrained(folder)
    weights = folder / "model.safetensors"
    model = network(folder)
    assert weights.exists() and not model.config.has_output_bias
    expected = network(foreign("bart"))
    inner = "encoder.layers.1.self_attention.input.weight"
    assert torch.equal(model.get_parameter(inner), expected.get_parameter(inner))


@pytest.mark.parametrize(
    ("variant", "name", "shape"),
    [
        ("m2m100", "model.encoder.embed_positions.weights", (4, 4)),
        ("bart", "model.encoder.version", (1,)),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (8, 4)),
    ],
)
def test_what_old_files_have_and_nobody_reads_is_passed_over(
    variant: str, name: str, shape: tuple[int, ...], copied: Callable[..., Path], foreign: Callable[..., Path]
) -> None:
    folder = copied(variant)
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    ours, expected = network(folder).state_dict(), network(foreign(variant)).state_dict()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


@pytest.mark.parametrize("variant", ["marian", "pegasus"])
def test_a_fixed_table_is_taken_from_the_file_or_made(variant: str, copied: Callable[..., Path]) -> None:
    """Newer files leave it out; a table that a file has is the one that counts."""
    folder = copied(variant)
    made = change_weights(
        folder, lambda tensors: [tensors.pop(f"model.{side}.embed_positions.weight", 0) for side in ("encoder", "decoder")]
    )
    model = network(folder)
    kind = {"marian": "MarianMTModel", "pegasus": "PegasusForConditionalGeneration"}[variant]
    ours, theirs = logits(model, folder, kind)
    assert torch.equal(ours, theirs)
    table = model.encoder.embedding.positions.detach()
    change_weights(folder, lambda tensors: tensors.update({"model.encoder.embed_positions.weight": table * 2}))
    assert torch.equal(network(folder).encoder.embedding.positions, table * 2)
    assert made.exists()
