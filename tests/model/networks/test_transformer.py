import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import causal_mask, padding_mask
from dragoman.model.networks.backend import FullAttention
from dragoman.model.networks.transformer import DecoderLayer, EncoderLayer, Transformer, sinusoids

B, S, T = 3, 7, 6
ACTIVATION = {"relu": "relu", "gelu": "gelu", "silu": F.silu}
LENGTHS = torch.tensor([7, 2, 5])


def attention_weights(ours: nn.Module, theirs: str) -> dict[str, Tensor]:
    return {
        f"{theirs}.in_proj_weight": ours.input.weight,
        f"{theirs}.in_proj_bias": ours.input.bias,
        f"{theirs}.out_proj.weight": ours.output.weight,
        f"{theirs}.out_proj.bias": ours.output.bias,
    }


def layer_weights(ours: EncoderLayer | DecoderLayer) -> dict[str, Tensor]:
    """Our layer's weights under PyTorch's names."""
    weights = attention_weights(ours.self_attention, "self_attn")
    residuals = [ours.self_residual, ours.feed_residual]
    if isinstance(ours, DecoderLayer):
        weights |= attention_weights(ours.cross_attention, "multihead_attn")
        residuals.insert(1, ours.cross_residual)
    for number, residual in enumerate(residuals, start=1):
        weights |= {f"norm{number}.weight": residual.norm.weight, f"norm{number}.bias": residual.norm.bias}
    for number, linear in enumerate((ours.feed_forward.inner, ours.feed_forward.outer), start=1):
        weights |= {f"linear{number}.weight": linear.weight, f"linear{number}.bias": linear.bias}
    return weights


def pytorch_layer(ours: EncoderLayer | DecoderLayer, config: ModelConfig) -> nn.Module:
    """PyTorch's own layer with our weights."""
    is_decoder = isinstance(ours, DecoderLayer)
    layer = (nn.TransformerDecoderLayer if is_decoder else nn.TransformerEncoderLayer)(
        config.d_model,
        config.num_heads,
        config.decoder_ffn_dim if is_decoder else config.encoder_ffn_dim,
        dropout=0.0,
        activation=ACTIVATION[config.activation],
        layer_norm_eps=config.norm_epsilon,
        batch_first=True,
        norm_first=config.norm == "pre",
    )
    layer.load_state_dict(layer_weights(ours))
    return layer


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_layers_equal_pytorch(make_model, norm, activation) -> None:
    model = make_model(norm=norm, activation=activation, norm_epsilon=1e-3)
    config = model.config
    source, target = torch.randn(B, S, config.d_model), torch.randn(B, T, config.d_model)
    mask = padding_mask(LENGTHS, S)
    ours, theirs = model.encoder.layers[0], pytorch_layer(model.encoder.layers[0], config)
    memory = ours(source, FullAttention(config, mask))
    expected = theirs(source, src_key_padding_mask=~mask)
    torch.testing.assert_close(memory[mask], expected[mask], atol=1e-5, rtol=0)

    ours, theirs = model.decoder.layers[0], pytorch_layer(model.decoder.layers[0], config)
    backend = FullAttention(config, mask, model.decoder.project_memory(memory))
    expected = theirs(target, memory, tgt_mask=~causal_mask(T), memory_key_padding_mask=~mask)
    torch.testing.assert_close(ours(target, backend), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_whole_model_equals_pytorch(make_model, norm, activation) -> None:
    model = make_model(norm=norm, activation=activation, num_encoder_layers=3, num_decoder_layers=2)
    config = model.config
    stacks = []
    for side, stack in ((model.encoder, nn.TransformerEncoder), (model.decoder, nn.TransformerDecoder)):
        options = {"enable_nested_tensor": False} if stack is nn.TransformerEncoder else {}
        copies = [pytorch_layer(layer, config) for layer in side.layers]
        theirs = stack(copies[0], len(copies), norm=side.norm if norm == "pre" else None, **options)
        theirs.layers = nn.ModuleList(copies)
        stacks.append(theirs)
    reference = nn.Transformer(
        config.d_model, config.num_heads, custom_encoder=stacks[0], custom_decoder=stacks[1], batch_first=True
    )
    for side, stack in zip((model.encoder, model.decoder), stacks, strict=True):  # nn.Transformer has initialised them afresh
        for ours, theirs in zip(side.layers, stack.layers, strict=True):
            theirs.load_state_dict(layer_weights(ours))
    source_ids, target_ids = torch.randint(3, 23, (B, S)), torch.randint(3, 23, (B, T))
    mask = padding_mask(LENGTHS, S)
    table, position = model.encoder.embedding.tokens.weight, sinusoids(S, config.d_model)
    expected = reference(
        table[source_ids] * math.sqrt(config.d_model) + position,
        table[target_ids] * math.sqrt(config.d_model) + position[:T],
        tgt_mask=~causal_mask(T),
        src_key_padding_mask=~mask,
        memory_key_padding_mask=~mask,
    )
    torch.testing.assert_close(model(source_ids, LENGTHS, target_ids), expected @ table.T, atol=3e-5, rtol=0)


def test_sinusoids_follow_the_paper() -> None:
    table = sinusoids(30, 8)
    for p in range(30):
        for i in range(4):
            angle = p / 10000 ** (2 * i / 8)
            assert float(table[p, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(table[p, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_embedding_follows_its_switches(make_model, positions, offset, is_scaled, has_norm) -> None:
    model = make_model(
        positions=positions, position_offset=offset, is_embedding_scaled=is_scaled, has_embedding_norm=has_norm, norm_epsilon=0.01
    )
    embedding = model.decoder.embedding
    ids, at = torch.tensor([[4, 9, 4], [1, 2, 3]]), torch.tensor([[0, 1, 2], [5, 39, 0]])
    rows = embedding.positions
    assert rows.shape == (40 + offset, 16)
    expected = torch.stack(
        [
            torch.stack(
                [embedding.tokens.weight[i] * (4.0 if is_scaled else 1.0) + rows[p + offset] for i, p in zip(*pair, strict=True)]
            )
            for pair in zip(ids.tolist(), at.tolist(), strict=True)
        ]
    )
    if has_norm:
        variance = expected.var(-1, unbiased=False, keepdim=True)
        normal = (expected - expected.mean(-1, keepdim=True)) / torch.sqrt(variance + 0.01)
        expected = normal * embedding.norm.weight + embedding.norm.bias
    torch.testing.assert_close(embedding(ids, at), expected, atol=1e-5, rtol=0)
    assert isinstance(rows, nn.Parameter) == (positions == "learned")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_projection_follows_its_switches(make_model, is_tied, has_bias) -> None:
    model = make_model(is_projection_tied=is_tied, has_output_bias=has_bias, is_embedding_shared=False, source_vocab_size=30)
    decoder, hidden = model.decoder, torch.randn(2, 16)
    weight = decoder.embedding.tokens.weight if is_tied else decoder.projection.weight
    expected = hidden @ weight.T + (decoder.output_bias if has_bias else 0.0)
    torch.testing.assert_close(decoder.logits(hidden), expected, atol=1e-6, rtol=0)
    assert (decoder.output_weight is decoder.embedding.tokens.weight) == is_tied


def test_shared_embedding_is_one_table(make_model) -> None:
    shared, separate = make_model(), make_model(is_embedding_shared=False, source_vocab_size=30)
    assert shared.encoder.embedding.tokens is shared.decoder.embedding.tokens
    assert separate.encoder.embedding.tokens.weight.shape == (30, 16)
    assert separate.decoder.embedding.tokens.weight.shape == (23, 16)


def test_depths_and_widths_are_each_sides_own(make_model) -> None:
    model = make_model(num_encoder_layers=3, num_decoder_layers=1, encoder_ffn_dim=20, decoder_ffn_dim=40)
    assert [layer.feed_forward.inner.out_features for layer in model.encoder.layers] == [20] * 3
    assert [layer.feed_forward.inner.out_features for layer in model.decoder.layers] == [40]


def test_padding_is_excluded_masked_or_predicted(any_model: Transformer) -> None:
    decoder, config = any_model.decoder, any_model.config
    hidden = torch.randn(2, 3, 16)
    log_probs, logits = decoder.log_probs(hidden), decoder.logits(hidden)
    others = torch.arange(logits.shape[-1]) != config.pad_id
    expected = (logits[..., others] if config.padding == "excluded" else logits).log_softmax(-1)
    expected = expected if config.padding == "excluded" else expected[..., others]
    torch.testing.assert_close(log_probs[..., others], expected, atol=1e-5, rtol=0)
    if config.padding == "predicted":
        assert torch.equal(log_probs, logits.log_softmax(-1))
    else:
        assert (log_probs[..., config.pad_id] == -math.inf).all()


def test_target_tokens_see_only_the_past(any_model: Transformer) -> None:
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    logits = any_model(source, LENGTHS, target)
    changed = target.clone()
    changed[:, 3] += 1
    other = any_model(source, LENGTHS, changed)
    torch.testing.assert_close(other[:, :3], logits[:, :3], atol=1e-6, rtol=0)
    assert (other[:, 3] - logits[:, 3]).abs().max() > 1e-3


def test_source_padding_is_never_seen(any_model: Transformer) -> None:
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    other = torch.where(padding_mask(LENGTHS, S), source, source.flip(1) + 1)
    torch.testing.assert_close(any_model(other, LENGTHS, target), any_model(source, LENGTHS, target), atol=1e-6, rtol=0)


def test_every_parameter_learns(any_model: Transformer) -> None:
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    any_model(source, LENGTHS, target).square().mean().backward()
    assert [name for name, parameter in any_model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(make_model, name) -> None:
    model = make_model(**{name: 0.5})
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    assert torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))
    model.train()
    assert not torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))


def test_weights_keep_their_names(make_model) -> None:
    """Checkpoints in use have these names; a renamed weight could not be loaded."""
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = make_model(
        **layers, norm="pre", positions="learned", has_embedding_norm=True, has_output_bias=True, is_projection_tied=False
    )

    def both(*names: str) -> set[str]:
        return {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}

    expected = {"decoder.projection.weight", "decoder.output_bias"}
    for side, attentions in (("encoder", ["self"]), ("decoder", ["self", "cross"])):
        expected |= {f"{side}.embedding.tokens.weight", f"{side}.embedding.positions"}
        layer = f"{side}.layers.0"
        expected |= both(f"{side}.embedding.norm", f"{side}.norm", f"{layer}.feed_forward.inner", f"{layer}.feed_forward.outer")
        for kind in attentions:
            expected |= both(f"{layer}.{kind}_attention.input", f"{layer}.{kind}_attention.output", f"{layer}.{kind}_residual.norm")
        expected |= both(f"{layer}.feed_residual.norm")
    assert set(model.state_dict()) == expected
