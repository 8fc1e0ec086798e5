"""Sharing and tying are read off the tensors; a configuration that says otherwise is reported."""

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
HEAD, BART, T5 = "lm_head.weight", "BartForConditionalGeneration", "T5ForConditionalGeneration"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("kept", [SHARED, ENCODER, DECODER, HEAD])
def test_a_tied_table_may_have_any_of_its_names(kept: str, copied: Callable[..., Path], foreign: Callable[..., Path]) -> None:
    folder = copied("bart")
    change_weights(folder, lambda tensors: tensors.update({kept: tensors.pop(SHARED)}))
    ours, expected = network(folder), network(foreign("bart"))
    assert (ours.config.is_embedding_shared, ours.config.is_projection_tied) == (True, True)
    assert torch.equal(ours.encoder.embedding.tokens.weight, expected.encoder.embedding.tokens.weight)


@pytest.mark.parametrize(
    ("variant", "change", "is_tied", "line", "kind"),
    [
        (  # `pytorch_model.bin` has a table by all its names
            "bart",
            lambda tensors: tensors.update({name: tensors[SHARED].clone() for name in (ENCODER, DECODER, HEAD)}),
            True,
            "one token table for both sides, the output projection is the decoder’s",
            BART,
        ),
        ("bart", lambda t: t.update({HEAD: t[SHARED] + 0.1}), False, "is tied to the token table, but lm_head.weight and", BART),
        (
            "bart-untied",
            lambda tensors: tensors.update({HEAD: tensors[DECODER].clone()}),
            True,
            "not tied to the token table, but the tensors are equal",
            BART,
        ),
        ("t5-v1.1", lambda t: t.pop(HEAD), True, "not tied to the token table, but there is no projection of its own", T5),
        (
            "bart",
            lambda tensors: tensors["final_logits_bias"].zero_(),
            True,
            "final_logits_bias is zero everywhere: left out",
            BART,
        ),
    ],
    ids=["copies", "other-head", "equal-head", "no-head", "zero-bias"],
)
def test_tensors_decide_whatever_the_configuration_says(
    variant: str, change: Callable[[Tensors], Any], is_tied: bool, line: str, kind: str, copied: Callable[..., Path], imported: Any
) -> None:
    folder = copied(variant)
    change_weights(folder, change)
    ours, theirs = logits(network(folder), folder, kind)
    torch.testing.assert_close(ours, theirs, atol=5e-5 if kind == T5 else 0, rtol=0)
    output, report = imported(folder)
    model = Checkpoint.load(output).model
    assert any(line in told for told in report.translated)
    assert model.config.is_projection_tied == is_tied == (model.decoder.projection is None)
    if variant == "bart":
        assert model.encoder.embedding.tokens is model.decoder.embedding.tokens
        assert model.config.has_output_bias == ("zero" not in line)
    assert not model.config.is_output_scaled  # t5-v1.1's flag still says so


def test_sides_without_tables_of_their_own_share_one_though_untied(copied: Callable[..., Path]) -> None:
    """So Transformers before 5 wrote a model whose projection alone is untied; the decoder's table does not do for the encoder."""
    folder = copied("bart-untied")
    tables: Tensors = {}
    change_weights(folder, lambda tensors: tables.update({name: tensors.pop(name) for name in (ENCODER, DECODER)}))
    config = network(folder).config
    assert (config.is_embedding_shared, config.is_projection_tied) == (True, False)
    change_weights(folder, lambda tensors: [tensors.update({DECODER: tables[DECODER]}), tensors.pop(SHARED)])
    with pytest.raises(ForeignError, match=r"model\.encoder\.embed_tokens\.weight is missing"):
        network(folder)


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
    variant: str, fields: dict[str, Any], is_scaled: bool, copied: Callable[..., Path], imported: Any
) -> None:
    folder = copied(variant)
    change_json(folder / "config.json", **fields)
    model = network(folder)
    assert model.config.is_output_scaled == is_scaled
    kind = {"mt5": "MT5", "umt5": "UMT5"}.get(variant, "T5") + "ForConditionalGeneration"
    ours, theirs = logits(model, folder, kind)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    if variant == "umt5":
        assert any("Transformers 4 did not" in line for line in imported(folder)[1].translated)


def test_names_without_a_prefix_are_known(copied: Callable[..., Path], foreign: Callable[..., Path]) -> None:
    """So the network is written without its head, as BART's own checkpoints are."""
    folder = copied("bart")
    transformers.BartModel.from_pretrained(folder).save_pretrained(folder)
    model, expected = network(folder), network(foreign("bart"))
    inner = "encoder.layers.1.self_attention.input.weight"
    assert not model.config.has_output_bias and torch.equal(model.get_parameter(inner), expected.get_parameter(inner))


@pytest.mark.parametrize(
    ("variant", "name", "shape"),
    [
        ("m2m100", "model.encoder.embed_positions.weights", (4, 4)),
        ("bart", "model.encoder.version", (1,)),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (8, 4)),
    ],
)
def test_unused_tensors_of_old_files_are_passed_over(
    variant: str, name: str, shape: tuple[int, ...], copied: Callable[..., Path], foreign: Callable[..., Path]
) -> None:
    folder = copied(variant)
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    ours, expected = network(folder).state_dict(), network(foreign(variant)).state_dict()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("variant", "kind"), [("marian", "MarianMTModel"), ("pegasus", "PegasusForConditionalGeneration")])
def test_a_fixed_table_is_taken_from_the_file_or_made(variant: str, kind: str, copied: Callable[..., Path]) -> None:
    """Newer files leave it out; a table that a file has is the one that counts."""
    folder, name = copied(variant), "model.{}.embed_positions.weight"
    change_weights(folder, lambda tensors: [tensors.pop(name.format(side), 0) for side in ("encoder", "decoder")])
    model = network(folder)
    ours, theirs = logits(model, folder, kind)
    assert torch.equal(ours, theirs)
    table = model.encoder.embedding.positions.detach()
    change_weights(folder, lambda tensors: tensors.update({name.format("encoder"): table * 2}))
    assert torch.equal(network(folder).encoder.embedding.positions, table * 2)
