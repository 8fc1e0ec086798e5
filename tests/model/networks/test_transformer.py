"""The Transformer against PyTorch's own modules, and the promises of its switches; rotary positions."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import causal_mask, padding_mask
from dragoman.model.networks.rotary import angles, rotated
from dragoman.model.networks.transformer import DecoderLayer, EncoderLayer, Transformer, sinusoids

B, S, T = 3, 7, 6
ACTIVATION = {"relu": "relu", "gelu": "gelu", "silu": F.silu}
LENGTHS = torch.tensor([7, 2, 5])


def layer_weights(ours: EncoderLayer | DecoderLayer) -> dict[str, Tensor]:
    """Our layer's weights under PyTorch's names."""
    attentions, residuals = {"self_attn": ours.self_attention}, [ours.self_residual, ours.feed_residual]
    if isinstance(ours, DecoderLayer):
        attentions["multihead_attn"] = ours.cross_attention
        residuals.insert(1, ours.cross_residual)
    weights = {}
    for name, attention in attentions.items():
        weights |= {f"{name}.in_proj_weight": attention.input.weight, f"{name}.in_proj_bias": attention.input.bias}
        weights |= {f"{name}.out_proj.{part}": value for part, value in attention.output.named_parameters()}
    for number, residual in enumerate(residuals, start=1):
        weights |= {f"norm{number}.{part}": value for part, value in residual.norm.named_parameters()}
    for number, linear in enumerate((ours.feed_forward.inner, ours.feed_forward.outer), start=1):
        weights |= {f"linear{number}.{part}": value for part, value in linear.named_parameters()}
    return weights


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_whole_model_equals_pytorch(make_model, norm, activation) -> None:
    epsilon = 1e-3 if activation == "silu" else 1e-5
    model = make_model(norm=norm, activation=activation, num_encoder_layers=3, num_decoder_layers=2, norm_epsilon=epsilon)
    config = model.config
    stacks = []
    for side, kind, stack in (
        (model.encoder, nn.TransformerEncoderLayer, nn.TransformerEncoder),
        (model.decoder, nn.TransformerDecoderLayer, nn.TransformerDecoder),
    ):
        layer = kind(
            config.d_model,
            config.num_heads,
            config.encoder_ffn_dim if side is model.encoder else config.decoder_ffn_dim,
            dropout=0.0,
            activation=ACTIVATION[activation],
            layer_norm_eps=epsilon,
            batch_first=True,
            norm_first=norm == "pre",
        )
        options = {"enable_nested_tensor": False} if stack is nn.TransformerEncoder else {}
        stacks.append(stack(layer, len(side.layers), norm=side.norm if norm == "pre" else None, **options))
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
            assert table[p, 2 * i : 2 * i + 2].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize(("is_scaled", "has_norm"), [(False, False), (True, True)])
def test_embedding_follows_its_switches(make_model, positions, offset, is_scaled, has_norm) -> None:
    switches = {"is_embedding_scaled": is_scaled, "has_embedding_norm": has_norm, "norm_epsilon": 0.01}
    embedding = make_model(positions=positions, position_offset=offset, **switches).decoder.embedding
    ids, at = torch.tensor([[4, 9, 4], [1, 2, 3]]), torch.tensor([[0, 1, 2], [5, 39, 0]])
    rows = embedding.positions
    assert rows.shape == (40 + offset, 16) and isinstance(rows, nn.Parameter) == (positions == "learned")
    expected = embedding.tokens.weight[ids] * (4.0 if is_scaled else 1.0) + rows[at + offset]
    if has_norm:
        variance = expected.var(-1, unbiased=False, keepdim=True)
        normal = (expected - expected.mean(-1, keepdim=True)) / torch.sqrt(variance + 0.01)
        expected = normal * embedding.norm.weight + embedding.norm.bias
    torch.testing.assert_close(embedding(ids, at), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_projection_follows_its_switches(make_model, is_tied, has_bias) -> None:
    model = make_model(is_projection_tied=is_tied, has_output_bias=has_bias, is_embedding_shared=False, source_vocab_size=30)
    decoder, hidden = model.decoder, torch.randn(2, 16)
    weight = decoder.embedding.tokens.weight if is_tied else decoder.projection.weight
    expected = hidden @ weight.T + (decoder.output_bias if has_bias else 0.0)
    torch.testing.assert_close(decoder.logits(hidden), expected, atol=1e-6, rtol=0)
    assert (decoder.output_weight is decoder.embedding.tokens.weight) == is_tied


def test_tables_depths_and_widths_are_each_sides_own(make_model) -> None:
    sizes = {"num_encoder_layers": 3, "num_decoder_layers": 1, "encoder_ffn_dim": 20, "decoder_ffn_dim": 40}
    shared, separate = make_model(), make_model(is_embedding_shared=False, source_vocab_size=30, **sizes)
    assert shared.encoder.embedding.tokens is shared.decoder.embedding.tokens
    assert [side.embedding.tokens.weight.shape for side in (separate.encoder, separate.decoder)] == [(30, 16), (23, 16)]
    assert [layer.feed_forward.inner.out_features for layer in separate.encoder.layers] == [20] * 3
    assert [layer.feed_forward.inner.out_features for layer in separate.decoder.layers] == [40]


def test_padding_is_excluded_masked_or_predicted(any_model: Transformer) -> None:
    decoder, config = any_model.decoder, any_model.config
    hidden = torch.randn(2, 3, 16)
    log_probs, logits = decoder.log_probs(hidden), decoder.logits(hidden)
    others = torch.arange(logits.shape[-1]) != config.pad_id
    is_excluded = config.padding == "excluded"
    expected = logits[..., others].log_softmax(-1) if is_excluded else logits.log_softmax(-1)[..., others]
    torch.testing.assert_close(log_probs[..., others], expected, atol=1e-5, rtol=0)
    if config.padding == "predicted":
        assert torch.equal(log_probs, logits.log_softmax(-1))
    else:
        assert (log_probs[..., config.pad_id] == -math.inf).all()


def test_targets_see_only_the_past_padding_is_never_seen_and_every_parameter_learns(any_model: Transformer) -> None:
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    logits = any_model(source, LENGTHS, target)
    changed = target.clone()
    changed[:, 3] += 1
    later = any_model(source, LENGTHS, changed)
    torch.testing.assert_close(later[:, :3], logits[:, :3], atol=1e-6, rtol=0)
    assert (later[:, 3] - logits[:, 3]).abs().max() > 1e-3
    other = torch.where(padding_mask(LENGTHS, S), source, source.flip(1) + 1)
    torch.testing.assert_close(any_model(other, LENGTHS, target), logits, atol=1e-6, rtol=0)
    logits.square().mean().backward()
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
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1, "norm": "pre", "positions": "learned"}
    model = make_model(**layers, has_embedding_norm=True, has_output_bias=True, is_projection_tied=False)
    expected = {"decoder.projection.weight", "decoder.output_bias"}
    for side, kinds in (("encoder", ["self"]), ("decoder", ["self", "cross"])):
        attentions = [f"{kind}_{part}" for kind in kinds for part in ("attention.input", "attention.output", "residual.norm")]
        parts = [f"layers.0.{part}" for part in (*attentions, "feed_forward.inner", "feed_forward.outer", "feed_residual.norm")]
        names = [f"{part}.{kind}" for part in ("embedding.norm", "norm", *parts) for kind in ("weight", "bias")]
        expected |= {f"{side}.{name}" for name in ("embedding.tokens.weight", "embedding.positions", *names)}
    assert set(model.state_dict()) == expected


SIZES = {"source_vocab_size": 23, "target_vocab_size": 23, "max_target_positions": 64, "max_source_positions": 64}
ROTARY = ModelConfig(architecture="decoder", d_model=64, num_heads=4, positions="rotary", rotary_base=100.0, **SIZES)


def test_pairs_of_numbers_are_turned_like_complex_ones() -> None:
    x, positions = torch.randn(2, 4, 5, 16), torch.tensor([0, 3, 1, 40, 41])
    frequencies = torch.tensor([100.0 ** (-i / 8) for i in range(8)], dtype=torch.float64)
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double())
    turned = turned * torch.polar(torch.ones(5, 8, dtype=torch.float64), positions[:, None] * frequencies)
    found = rotated(x, positions, ROTARY)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1).float(), atol=1e-5, rtol=0)
    assert torch.equal(found[:, :, 0], x[:, :, 0]), "position 0 is left as it is"
    assert rotated(torch.randn(1, 4, 0, 16), torch.arange(0), ROTARY).shape == (1, 4, 0, 16)


@pytest.mark.parametrize("position", [1, 1000, 100_000])
def test_angles_of_far_positions_are_precise(position: int) -> None:
    """In single precision the angle of a far position would be off by more than its cosine shows."""
    cos, sin = angles(position + 1, 16, 10000.0)
    assert cos.shape == sin.shape == (position + 1, 8)
    for i in range(8):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / 16), dtype=torch.float64)
        assert float(cos[position, i]) == pytest.approx(float(angle.cos()), abs=1e-7)
        assert float(sin[position, i]) == pytest.approx(float(angle.sin()), abs=1e-7)
