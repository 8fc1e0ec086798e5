"""The recurrent encoder–decoder against loops in NumPy with nothing of ours."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.model.networks.rnn import Rnn
from tests.model.conftest import small_network

S, T = 7, 6
LENGTHS = torch.tensor([7, 2, 5])
V = 23
SWITCHES: list[dict[str, Any]] = [
    {"attention": "additive", "attention_dim": 10},
    {"attention": "additive", "num_encoder_layers": 1, "num_decoder_layers": 1, "is_projection_tied": False},
    {"attention": "dot", "has_output_bias": True},
    {"attention": "scaled_dot", "is_embedding_scaled": False},
    {"attention": "scaled_dot", "num_encoder_layers": 3, "num_decoder_layers": 1, "padding": "masked"},
    {"attention": "none", "num_encoder_layers": 1, "num_decoder_layers": 3},
    {"attention": "none", "is_embedding_shared": False, "source_vocab_size": 31, "padding": "predicted"},
]
KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def make(**switches: Any) -> Rnn:
    model: Rnn = small_network(architecture="rnn", **switches)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4)
    return model


@pytest.fixture(params=SWITCHES, ids=lambda switches: "-".join(map(str, switches.values())))
def any_rnn(request: pytest.FixtureRequest) -> Rnn:
    return make(**request.param)


def pairs(model: Rnn, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, V, (3, S), generator=generator), torch.randint(3, V, (3, T), generator=generator)


class Oracle:
    """The model in NumPy, one token after the other, in double precision."""

    def __init__(self, model: Rnn) -> None:
        self.config = model.config
        self.w = {name: value.double().numpy() for name, value in model.state_dict().items()}
        self.scale = math.sqrt(self.config.d_model) if self.config.is_embedding_scaled else 1.0

    def unit(self, x: Any, h: Any, names: tuple[str, str, str, str]) -> Any:
        """One update of a gated recurrent unit, as Cho et al. and PyTorch's documentation have it."""
        w, u, b, c = (self.w[name] for name in names)
        (reset, update, new), (r, z, n) = np.split(w @ x + b, 3), np.split(u @ h + c, 3)
        update = 1 / (1 + np.exp(-(update + z)))
        return (1 - update) * np.tanh(new + n / (1 + np.exp(-(reset + r)))) + update * h

    def encode(self, source: list[int]) -> tuple[list[Any], Any]:
        xs = [self.w["encoder.tokens.weight"][token] * self.scale for token in source]
        last: Any = None
        for layer in range(self.config.num_encoder_layers):
            sides, ends = [], []
            for direction in ("", "_reverse"):
                names = tuple(f"encoder.layers.{layer}.{kind}_l0{direction}" for kind in KINDS)
                h, outputs = np.zeros(self.config.d_model // 2), {}
                order = range(len(xs)) if not direction else reversed(range(len(xs)))
                for place in order:
                    h = outputs[place] = self.unit(xs[place], h, names)  # type: ignore[arg-type]
                sides.append(outputs)
                ends.append(h)
            xs = [np.concatenate([side[place] for side in sides]) for place in range(len(xs))]
            last = np.concatenate(ends)
        return xs, last

    def score(self, state: Any, value: Any) -> float:
        w, kind = self.w, self.config.attention
        if kind == "additive":
            hidden = w["decoder.alignment.query.weight"] @ state + w["decoder.alignment.key.weight"] @ value
            return float(w["decoder.alignment.energy.weight"][0] @ np.tanh(hidden + w["decoder.alignment.key.bias"]))
        return float(state @ value) / (math.sqrt(self.config.d_model) if kind == "scaled_dot" else 1.0)

    def decode(self, source: list[int], target: list[int]) -> Any:
        values, last = self.encode(source)
        width, layers = self.config.d_model, self.config.num_decoder_layers
        start = np.tanh(self.w["decoder.bridge.weight"] @ last + self.w["decoder.bridge.bias"])
        states = [start[width * layer : width * (layer + 1)] for layer in range(layers)]
        logits = []
        for token in target:
            embedded = self.w["decoder.embedding.weight"][token] * self.scale
            parts = [embedded]
            if self.config.attention != "none":
                weights = np.exp([self.score(states[-1], value) for value in values])
                weights /= weights.sum()
                parts.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
            x, updated = np.concatenate(parts), []
            for layer in range(layers):
                names = tuple(f"decoder.layers.{layer}.{kind}" for kind in KINDS)
                x = self.unit(x, states[layer], names)  # type: ignore[arg-type]
                updated.append(x)
            states = updated
            out = np.tanh(self.w["decoder.readout.weight"] @ np.concatenate([x, *parts]) + self.w["decoder.readout.bias"])
            projection = self.w["decoder.embedding.weight" if self.config.is_projection_tied else "decoder.projection.weight"]
            logits.append(projection @ out + (self.w["decoder.output_bias"] if self.config.has_output_bias else 0.0))
        return np.array(logits)


def test_whole_model_and_steps_are_what_loops_in_numpy_say(any_rnn: Rnn) -> None:
    """The loops see no padding and no later token of a target; every parameter learns."""
    source, target = pairs(any_rnn)
    logits = any_rnn(source, LENGTHS, target)
    oracle = Oracle(any_rnn)
    for row, length in enumerate(LENGTHS.tolist()):
        expected = oracle.decode(source[row, :length].tolist(), target[row].tolist())
        np.testing.assert_allclose(logits[row].detach().numpy(), expected, atol=2e-5)
    with torch.inference_mode():
        whole = any_rnn.decoder.log_probs(any_rnn.decode(target, *any_rnn.encode(source, LENGTHS)))
        steps, rows = any_rnn.stepper(source, LENGTHS), torch.arange(3)
        for position in range(T):
            torch.testing.assert_close(steps.step(target[rows, position]), whole[rows, position], atol=1e-5, rtol=0)
            if position == 2:
                chosen = torch.tensor([2, 0, 2, 1])
                steps.select(chosen)
                rows = rows[chosen]
    logits.square().mean().backward()
    assert [name for name, parameter in any_rnn.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


def test_dropout_acts_in_training_only_and_tables_are_shared() -> None:
    model, separate = make(attention="dot", dropout=0.5), make(is_embedding_shared=False, source_vocab_size=31)
    source, target = pairs(model)
    assert torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))
    model.train()
    assert not torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))
    assert model.encoder.tokens is model.decoder.tokens and separate.encoder.tokens.weight.shape == (31, 16)
