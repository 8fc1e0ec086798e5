"""Attention maps of every architecture, against PyTorch's own module and against arithmetic by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dragoman.model.attention_maps import answer, attention_maps, fed, target
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import greedy_search
from dragoman.model.errors import InputError
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizer import SpecialToken
from dragoman.model.text.tokenizers import Tokenizers
from tests.model.conftest import small_network

TEXT = "the dog runs through snow ."
# Of each architecture: switches, and layers and heads of each kind of map.
NETWORKS: dict[str, dict[str, Any]] = {
    "transformer": {"num_encoder_layers": 3},
    "rnn": {"architecture": "rnn", "num_encoder_layers": 1},
    "decoder": {"architecture": "decoder"},
}
ENCODED = {"encoder": (3, 4), "decoder": (2, 4), "cross": (2, 4)}
SHAPES = {"transformer": ENCODED, "rnn": {"cross": (1, 1)}, "decoder": {"decoder": (2, 4)}}


def make(tokenizer: ByteLevelTokenizer, kind: str, **switches: Any) -> Checkpoint:
    sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), tokenizer.vocab_size) | {"is_projection_tied": False}
    model = small_network(3, **sizes | NETWORKS[kind] | switches)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.3)
    return Checkpoint("small", model, Tokenizers.shared(tokenizer))


@pytest.fixture(params=NETWORKS)
def checkpoint(request: pytest.FixtureRequest, tokenizer: ByteLevelTokenizer) -> Checkpoint:
    return make(tokenizer, request.param)


def heads_of(module: Any, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """Work out attention with PyTorch's own module and our weights: `[1, T, d]` and `[1, S, d]` → `[H, T, S]`."""
    theirs = nn.MultiheadAttention(query.shape[-1], module.num_heads, batch_first=True).eval()
    weights = {"in_proj_weight": module.input.weight, "in_proj_bias": module.input.bias}
    theirs.load_state_dict(weights | {f"out_proj.{part}": getattr(module.output, part) for part in ("weight", "bias")})
    return theirs(query, key, key, attn_mask=mask, average_attn_weights=False)[1][0]


def later(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def test_every_layer_and_head_has_a_map_whose_rows_sum_to_one(checkpoint: Checkpoint) -> None:
    of = fed(checkpoint, TEXT)
    seen = attention_maps(checkpoint.model, of, target(checkpoint, of, "a dog"))
    assert {name: tuple(maps.shape[:2]) for name, maps in seen.maps.items()} == SHAPES[checkpoint.model.config.architecture]
    axes = {"encoder": (seen.source, seen.source), "decoder": (seen.read, seen.read), "cross": (seen.said, seen.source)}
    for kind, maps in seen.maps.items():
        assert maps.shape[2:] == tuple(map(len, axes[kind])), kind
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:3]))
        assert maps.shape[-1] >= 3 and maps.min() >= 0
    if checkpoint.model.config.architecture == "decoder":
        assert [*of.source, of.first] == [2, *checkpoint.tokenizers.source.encode(TEXT)] == seen.read[: len(of.source) + 1]
    if "decoder" in seen.maps:
        assert (seen.maps["decoder"][..., later(len(seen.read))] == 0).all()


@torch.inference_mode()
def test_a_transformers_heads_are_those_of_pytorchs_module(tokenizer: ByteLevelTokenizer) -> None:
    checkpoint = make(tokenizer, "transformer")
    model: Any = checkpoint.model
    of = fed(checkpoint, TEXT)
    said = target(checkpoint, of, "a dog")
    inputs: dict[Any, Tensor] = {}
    for name, layers in (("encoder", model.encoder.layers), ("decoder", model.decoder.layers)):
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, given, key=(name, index): inputs.update({key: given[0]}))
        layers[-1].self_residual.register_forward_hook(lambda _, __, out, key=(name, "between"): inputs.update({key: out}))
    maps = attention_maps(model, of, said).maps
    memory, _ = model.encode(torch.tensor([of.source]), torch.tensor([len(of.source)]))
    for name, layers, mask in (("encoder", model.encoder.layers, None), ("decoder", model.decoder.layers, later(len(said)))):
        for index, layer in enumerate(layers):
            x = inputs[name, index]
            torch.testing.assert_close(maps[name][index], heads_of(layer.self_attention, x, x, mask))
    expected = heads_of(model.decoder.layers[-1].cross_attention, inputs["decoder", "between"], memory)
    torch.testing.assert_close(maps["cross"][-1], expected)
    table = model.encoder.embedding  # the first layer reads embeddings
    x = (table.tokens.weight[of.source] * 4.0 + table.positions[: len(of.source)])[None]
    torch.testing.assert_close(maps["encoder"][0], heads_of(model.encoder.layers[0].self_attention, x, x))


def test_an_answer_is_that_of_greedy_search_and_ends_where_the_models_positions_do(checkpoint: Checkpoint) -> None:
    model: Any = checkpoint.model
    of = fed(checkpoint, TEXT)
    (expected,) = greedy_search(model, [checkpoint.tokenizers.source.encode(TEXT)], 7)
    said = answer(checkpoint, of, 7)
    assert said[: len(expected.ids)] == expected.ids and len(said) == len(expected.log_probs)
    model.decoder.output_bias = nn.Parameter(-1e4 * torch.eye(model.config.target_vocab_size)[model.config.eos_id])
    said = answer(checkpoint, of, 1000)
    assert len(said) == model.config.room_after(len(of.source)) and attention_maps(model, of, said).said == said


def test_texts_that_do_not_fit_are_refused(checkpoint: Checkpoint, tokenizer: ByteLevelTokenizer) -> None:
    with pytest.raises(InputError, match=r"source: 41 tokens, (end-of-sequence|start token) included, where the model takes 40"):
        fed(checkpoint, " ".join(["dog"] * 40))
    of = fed(checkpoint, TEXT)
    left = checkpoint.model.config.room_after(len(of.source))
    assert len(target(checkpoint, of, " ".join(["dog"] * (left - 1)))) == left and len(target(checkpoint, of, "")) == 1
    with pytest.raises(InputError, match=f"target: {left + 1} tokens, end-of-sequence included, where the model takes {left}"):
        target(checkpoint, of, " ".join(["dog"] * left))
    if checkpoint.model.config.architecture == "decoder":
        of = fed(checkpoint, "")
        seen = attention_maps(checkpoint.model, of, target(checkpoint, of, "a dog"))
        assert (of.source, of.first) == ([], 2) and seen.maps["decoder"].shape[-1] == len(seen.read) == len(seen.said)
        return
    with pytest.raises(InputError, match="source: is empty"):
        fed(checkpoint, "")
    blind = make(tokenizer, "rnn", attention="none")
    with pytest.raises(InputError, match="the model has no attention to look at"):
        attention_maps(blind.model, of, target(blind, of, "a dog"))


def test_languages_go_to_the_model(tokenizer: ByteLevelTokenizer) -> None:
    plain = make(tokenizer, "transformer")
    german = Language(code="de", target_prefix=[12])
    targets = [german, Language(code="fr", target_prefix=[13], decoder_start_id=14)]
    languages = Languages(source=[Language(code="en", source_suffix=[11])], target=targets, default_target="de")
    checkpoint = Checkpoint("many", plain.model, plain.tokenizers, Template(task="to {target}: "), languages)
    of, french = fed(checkpoint, TEXT), fed(checkpoint, TEXT, "en", "fr")
    assert of.source == [*tokenizer.encode(f"to de: {TEXT}"), 1, 11] and (of.first, [*of.forced]) == (2, [12])
    assert answer(checkpoint, of, 5)[0] == 12 and target(checkpoint, of, "a")[0] == 12
    assert (french.first, [*french.forced]) == (14, [13])
    with pytest.raises(InputError, match=r"--to: 'fi' is no language of the model's; it has de, fr"):
        fed(checkpoint, TEXT, "", "fi")
    with pytest.raises(InputError, match=r"--from: 'en' is no language of the model's; it has none"):
        fed(plain, TEXT, "en")
    special = Tokenizers(tokenizer, tokenizer, (SpecialToken("<hl>", 11),))
    for defaults, ids in ((Defaults(special_tokens_in_text=True), [11]), (Defaults(), tokenizer.encode("<hl>"))):
        assert fed(Checkpoint("special", plain.model, special, defaults=defaults), "<hl>").source == [*ids, 1]
