"""Every family and variant: what is imported computes what Transformers computes of the same folder, and the report says all.

Sharing and tying of tables are read off the tensors; a configuration that says otherwise is reported.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.importers.families import family_of
from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.mapping import lay_out, load
from dragoman.model.importers.report import Report
from dragoman.model.importers.weights import Foreign, Limits
from dragoman.model.networks.transformer import Transformer
from tests.model.importers.conftest import change_json, change_weights
from tests.oracles.checkpoints import load_tokenizer
from tests.oracles.texts import lines
from tests.oracles.variants import VARIANTS

# Activation and norms of T5 are ONNX Runtime's and PyTorch's own here, and spelt out there: they differ in the last bits.
T5_TOLERANCE = 2e-5
# Of every family: names of tokens that begin, end or fill a sequence, of the unknown one, of languages and sentinels.
NAMES = ("</s>", "<pad>", "<unk>", "<s>", "<extra_id_0>", "<2de>", ">>fra<<", "__de__", "deu_Latn", "de_DE")
# Fields of config.json that are read, and covered by the report's line on the network, the tables or the lengths.
USED = """
    model_type vocab_size decoder_vocab_size share_encoder_decoder_embeddings tie_word_embeddings scale_embedding d_model
    d_kv d_ff num_heads num_layers num_decoder_layers encoder_layers decoder_layers encoder_attention_heads
    decoder_attention_heads encoder_ffn_dim decoder_ffn_dim max_position_embeddings activation_function feed_forward_proj
    dense_act_fn is_gated_act layer_norm_epsilon relative_attention_num_buckets relative_attention_max_distance
    scale_decoder_outputs is_encoder_decoder is_decoder n_positions pad_token_id eos_token_id
"""


def network(folder: Path, **limits: Any) -> Transformer:
    foreign = Foreign.open(folder)
    return load(lay_out(family_of(foreign.config), foreign, Limits(**limits), Report()), foreign.weights)


def check_logits(model: Transformer, folder: Path, variant: str, size: int = 13, tolerance: float | None = None) -> None:
    config, chosen, kind = model.config, torch.Generator().manual_seed(1), VARIANTS[variant].model
    usable = min(config.source_vocab_size, config.target_vocab_size)
    lengths = torch.tensor([size, 1, 5, size - 1])
    sources = torch.randint(3, usable, (4, size), generator=chosen)
    mask = torch.arange(size) < lengths[:, None]
    others = (sources == config.pad_id) & mask
    sources = sources.where(mask & ~others, config.pad_id).where(~others, config.eos_id)
    targets = torch.randint(3, usable, (4, 9), generator=chosen)
    targets = targets.where(targets != config.pad_id, config.eos_id)
    targets[:, 0] = config.decoder_start_id
    theirs = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    given = {"input_ids": sources, "attention_mask": mask.long(), "decoder_input_ids": targets}
    with torch.no_grad():
        expected: Tensor = theirs(**given, decoder_attention_mask=torch.ones_like(targets)).logits
        found = model(sources, lengths, targets)
    assert expected.std() > 0.5  # answers that say nothing would agree, too
    torch.testing.assert_close(found, expected, atol=tolerance or T5_TOLERANCE * ("T5" in kind), rtol=1e-5 if tolerance else 0)


@pytest.mark.parametrize("layout", ["hub", "transformers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_imported_checkpoint_computes_and_encodes_as_transformers_does(variant: str, layout: str, foreign, imported) -> None:
    folder = foreign(variant, layout)
    output, report = imported(folder)
    checkpoint, told = Checkpoint.load(output), report.lines()
    assert checkpoint.name == folder.name
    check_logits(checkpoint.model, folder, variant)
    theirs = load_tokenizer(folder)
    texts = list(lines()[:200])
    expected_ids = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    if (variant, layout) == ("madlad", "hub"):  # Transformers' class of T5 takes token 2 for the unknown one, which here is 0
        texts = [text for text, ids in zip(texts, expected_ids, strict=True) if 2 not in ids]
        expected_ids = [ids for ids in expected_ids if 2 not in ids]
    assert checkpoint.tokenizers.source.encode_batch(texts) == expected_ids
    source, target = checkpoint.tokenizers.source, checkpoint.tokenizers.target
    said = json.loads((folder / "tokenizer_config.json").read_text()).get("added_tokens_decoder", {})
    vocabulary = json.loads((folder / "vocab.json").read_text()) if (folder / "vocab.json").exists() else {}
    named = vocabulary | {token["content"]: int(token_id) for token_id, token in said.items()}
    # No text makes a token that means something to the model or ends it, except where Transformers takes that for the unknown one.
    for name in NAMES if (variant, layout) != ("madlad", "transformers") else ():
        for ids in map(source.encode, (name, f"a {name} b", f"{name}{name}", f"{name} ")):
            assert len(ids) > 1 and source.eos_id not in ids and (name == "<unk>" or named.get(name) not in ids), name
    assert (target is checkpoint.tokenizers.source) == (not variant.startswith("marian"))
    unknown = target.encode("\ue000")[-1]  # which no vocabulary has
    known = [text for text in texts if unknown not in target.encode(text) and "⁇" not in target.decode(target.encode(text))]
    assert len(known) > 10
    assert [target.decode(target.encode(text)) for text in known] == known
    # Every field is used or named in the report; tasks are something to choose, not something without effect.
    assert any(line.startswith(family_of(Foreign.open(folder).config).name) for line in report.found)
    fields = json.loads((folder / "config.json").read_text())
    unnamed = [name for name in fields if name not in USED.split()] + [*json.loads((folder / "generation_config.json").read_text())]
    assert [name for name in unnamed if name not in "\n".join(told)] == []
    assert sum("task_specific_params" in line for line in told) == ("task_specific_params" in fields)


@pytest.mark.parametrize(("variant", "most"), [("marian", 160), ("m2m100", 160), ("bart", 160), ("t5", 400)])
def test_the_last_position_is_right(variant: str, most: int, copied: Callable[..., Path]) -> None:
    folder = copied(variant)
    check_logits(network(folder), folder, variant, most, tolerance=1e-4)
    if variant == "m2m100":  # positions begin behind the padding of config.json, not that of generation_config.json
        change_json(folder / "generation_config.json", pad_token_id=network(folder).config.eos_id)
        model = network(folder, max_source_tokens=700, max_target_tokens=20)
        assert (model.config.max_source_positions, model.config.max_target_positions) == (700, 20)
        check_logits(model, folder, variant, 700, tolerance=1e-4)  # which makes a longer table when it needs one
    if variant == "bart":
        assert network(folder, max_source_tokens=20).encoder.embedding.positions.shape[0] == 22


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
    report.ignore("config.json", [("x", None), ("y", True), ("z", "0123456789" * 10)], "of training")
    assert report.ignored[-1] == "config.json: x null, y true, z '012345678901234567890123456789012345...: of training"


SHARED, ENCODER, DECODER = "model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
HEAD = "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def test_a_tied_table_may_have_any_of_its_names_and_names_may_lack_a_prefix(copied, foreign) -> None:
    folder, expected, last = copied("bart"), network(foreign("bart")), SHARED
    for kept in (ENCODER, DECODER, HEAD):
        change_weights(folder, lambda tensors, old=last, new=kept: tensors.update({new: tensors.pop(old)}))
        ours, last = network(folder), kept
        assert (ours.config.is_embedding_shared, ours.config.is_projection_tied) == (True, True)
        assert torch.equal(ours.encoder.embedding.tokens.weight, expected.encoder.embedding.tokens.weight)
    transformers.BartModel.from_pretrained(foreign("bart")).save_pretrained(folder)
    ours, inner = network(folder), "encoder.layers.1.self_attention.input.weight"
    assert not ours.config.has_output_bias and torch.equal(ours.get_parameter(inner), expected.get_parameter(inner))


def copies(tensors: Tensors) -> None:
    tensors |= {name: tensors[SHARED].clone() for name in (ENCODER, DECODER, HEAD)}


UNTIED = "not tied to the token table, but"


@pytest.mark.parametrize(
    ("variant", "change", "is_tied", "line"),
    [
        ("bart", copies, True, "one token table for both sides, the output projection is the decoder’s"),
        ("bart", lambda t: t.update({HEAD: t[SHARED] + 0.1}), False, "is tied to the token table, but lm_head.weight and"),
        ("bart-untied", lambda t: t.update({HEAD: t[DECODER].clone()}), True, f"{UNTIED} the tensors are equal"),
        ("t5-v1.1", lambda t: t.pop(HEAD), True, f"{UNTIED} there is no projection of its own"),
        ("bart", lambda t: t["final_logits_bias"].zero_(), True, "final_logits_bias is zero everywhere: left out"),
    ],
)
def test_tensors_decide_whatever_the_configuration_says(
    variant: str, change: Callable[[Tensors], Any], is_tied: bool, line: str, copied: Callable[..., Path], imported: Any
) -> None:
    folder = copied(variant)
    change_weights(folder, change)
    output, report = imported(folder)
    model = Checkpoint.load(output).model
    check_logits(model, folder, variant, tolerance=5e-5 if variant == "t5-v1.1" else None)
    assert any(line in told for told in report.translated)
    assert model.config.is_projection_tied == is_tied == (model.decoder.projection is None)
    if variant == "bart":
        assert model.encoder.embedding.tokens is model.decoder.embedding.tokens
        assert model.config.has_output_bias == ("zero" not in line)
    assert not model.config.is_output_scaled  # t5-v1.1's flag still says so


def test_sides_without_tables_of_their_own_share_one_though_untied(copied: Callable[..., Path]) -> None:
    """So Transformers before 5 wrote a model whose projection alone is untied; the decoder's table does not do for the encoder."""
    folder, tables = copied("bart-untied"), dict[str, Tensor]()
    change_weights(folder, lambda tensors: tables.update({name: tensors.pop(name) for name in (ENCODER, DECODER)}))
    config = network(folder).config
    assert (config.is_embedding_shared, config.is_projection_tied) == (True, False)
    change_weights(folder, lambda tensors: [tensors.update({DECODER: tables[DECODER]}), tensors.pop(SHARED)])
    with pytest.raises(ForeignError, match=r"model\.encoder\.embed_tokens\.weight is missing"):
        network(folder)


@pytest.mark.parametrize(
    ("variant", "fields", "is_scaled"),
    [
        ("t5", {"tie_word_embeddings": False}, True),  # its scale_decoder_outputs is true
        ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": None}, False),
        ("t5", {"tie_word_embeddings": None, "scale_decoder_outputs": None}, True),
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ("mt5", {"tie_word_embeddings": True}, False),
        ("umt5", {"tie_word_embeddings": False}, True),
    ],
)
def test_outputs_are_scaled_as_transformers_does(variant: str, fields: Any, is_scaled: bool, copied, imported: Any) -> None:
    folder = copied(variant)
    change_json(folder / "config.json", **fields)
    model = network(folder)
    assert model.config.is_output_scaled == is_scaled
    check_logits(model, folder, variant, tolerance=2e-5)
    if variant == "umt5":
        assert any("Transformers 4 did not" in line for line in imported(folder)[1].translated)


@pytest.mark.parametrize(
    ("variant", "name", "shape"),
    [
        ("m2m100", "model.encoder.embed_positions.weights", (4, 4)),
        ("bart", "model.encoder.version", (1,)),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (8, 4)),
    ],
)
def test_unused_tensors_of_old_files_are_passed_over(variant: str, name: str, shape: tuple[int, ...], copied, foreign) -> None:
    folder = copied(variant)
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    ours, expected = network(folder).state_dict(), network(foreign(variant)).state_dict()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


@pytest.mark.parametrize("variant", ["marian", "pegasus"])
def test_a_fixed_table_is_taken_from_the_file_or_made(variant: str, copied: Callable[..., Path]) -> None:
    folder, name = copied(variant), "model.{}.embed_positions.weight"
    change_weights(folder, lambda tensors: [tensors.pop(name.format(side), 0) for side in ("encoder", "decoder")])
    model = network(folder)
    check_logits(model, folder, variant)
    table = model.encoder.embedding.positions.detach()
    change_weights(folder, lambda tensors: tensors.update({name.format("encoder"): table * 2}))
    assert torch.equal(network(folder).encoder.embedding.positions, table * 2)
