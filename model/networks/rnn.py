"""Recurrent encoder–decoder, with attention between the two (Bahdanau et al., 2015) and without (Cho et al., 2014).

The encoder reads a source in both directions, each with half of the width. The decoder's state begins with a projection of the
encoder's two last states; before each step it attends, with that state, to the encoder's output for every source token. Without
attention the state is all that it has. Scores are additive, vᵀ tanh(W q + U k) (Bahdanau et al., 2015), dot, q · k (Luong et al.,
2015), or scaled dot, q · k / √d (Vaswani et al., 2017).

A step is defined once, `RnnDecoder.step`: training runs it over whole targets, the oracle token by token, and export records it.
A `Recurrence` runs the encoder, as an attention backend does for a Transformer.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import AdditiveAttention, padding_mask
from dragoman.model.networks.layers import Dropout, Predictor, embedding_scale, linear, token_tables
from dragoman.model.networks.network import Network, Observation


class DotAlignment(nn.Module):
    """Scores are products of queries and values, times a factor; keys are the values themselves."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def keys(self, values: Tensor) -> Tensor:
        """Return the values themselves: `[N, S, d_model]`."""
        return values

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Queries `[N, T, d_model]` and keys `[N, S, d_model]` → scores `[N, T, S]`."""
        return (query * self.scale) @ keys.transpose(1, 2)


Alignment = AdditiveAttention | DotAlignment


def alignment(config: ModelConfig) -> Alignment | None:
    """Return the configuration's, None where there is no attention."""
    width = config.d_model
    match config.attention:
        case "additive":
            return AdditiveAttention(width, width, config.attention_dim or width)
        case "dot":
            return DotAlignment(1.0)
        case "scaled_dot":
            return DotAlignment(width**-0.5)
        case "none":
            return None


def masked_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores `[..., S]` → weights that sum to 1 over the tokens that there are, at least one, and are 0 elsewhere."""
    return scores.masked_fill(~mask, -math.inf).softmax(-1)


class Recurrence(Protocol):
    """Run of one layer of the encoder."""

    def run(self, layer: nn.GRU, x: Tensor) -> tuple[Tensor, Tensor]:
        """Read `[B, S, d_model]` in both directions → `[B, S, d_model]`, and both last states side by side, `[B, d_model]`."""
        ...


class PackedRecurrence:
    """Recurrence over right-padded sources, by PyTorch."""

    def __init__(self, lengths: Tensor) -> None:
        """Take the tokens of each source, `[B]`."""
        self.lengths = lengths.cpu()

    def run(self, layer: nn.GRU, x: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, self.lengths, batch_first=True, enforce_sorted=False)
        outputs, last = layer(packed)
        rows, _ = pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[1])
        return rows, last.transpose(0, 1).flatten(1)


class RnnEncoder(nn.Module):
    """Bidirectional gated recurrent units, layer on layer."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.scale = embedding_scale(config)
        half = config.d_model // 2
        layers = (nn.GRU(config.d_model, half, batch_first=True, bidirectional=True) for _ in range(config.num_encoder_layers))
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(config.dropout)

    def forward(self, ids: Tensor, recurrence: Recurrence) -> tuple[Tensor, Tensor]:
        """Source ids → what the last layer gives for each, and its last states side by side `[B, d_model]`."""
        x: Tensor = self.tokens(ids) * self.scale
        last = x
        for layer in self.layers:
            assert isinstance(layer, nn.GRU)
            x, last = recurrence.run(layer, self.dropout(x))
        return x, last


class Looked(Protocol):
    """Encoded source that a decoder's state attends to."""

    def look(self, query: Tensor) -> Tensor:
        """Mix what the encoder gave for the source's tokens, as a state `[N, d_model]` weighs them → `[N, d_model]`."""
        ...


class Source:
    """Encoded sources, and how a state weighs their tokens.

    Attributes:
        weights: Of each look so far, `[N, S]`; kept if asked for.
    """

    def __init__(self, scorer: Alignment, keys: Tensor, values: Tensor, mask: Tensor, is_observed: bool = False) -> None:
        """Take keys `[N, S, A]` and values `[N, S, d_model]` of tokens, and which of them there are, `[N, S]`."""
        self.scorer, self.keys, self.values, self.mask = scorer, keys, values, mask
        self.is_observed = is_observed
        self.weights: list[Tensor] = []

    def look(self, query: Tensor) -> Tensor:
        weights = masked_weights(self.scorer.scores(query.unsqueeze(1), self.keys), self.mask.unsqueeze(1))
        if self.is_observed:
            self.weights.append(weights.squeeze(1))
        return (weights @ self.values).squeeze(1)


class RnnDecoder(Predictor):
    """Gated recurrent units, layer on layer, that look at the source before each step."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding) -> None:
        super().__init__(config)
        self.embedding = tokens
        self.scale = embedding_scale(config)
        self.alignment = alignment(config)
        width = config.d_model
        num_read = 1 if self.alignment is None else 2  # the token, and what was seen of the source
        self.layers = nn.ModuleList(
            nn.GRUCell(width * (num_read if layer == 0 else 1), width) for layer in range(config.num_decoder_layers)
        )
        self.bridge = linear(width, config.num_decoder_layers * width)
        self.readout = linear((num_read + 1) * width, width)
        self.dropout = Dropout(config.dropout)
        self.num_layers = config.num_decoder_layers

    @property
    def tokens(self) -> nn.Embedding:
        return self.embedding

    def start(self, last: Tensor) -> list[Tensor]:
        """The encoder's last states `[B, d_model]` → what each layer's state is at first, `[B, d_model]`."""
        return list(self.starts(last).chunk(self.num_layers, -1))

    def starts(self, last: Tensor) -> Tensor:
        """The same, the layers' side by side: `[B, d_model]` → `[B, L·d_model]`."""
        return torch.tanh(self.bridge(last))

    def embed(self, ids: Tensor) -> Tensor:
        """Target ids → their embeddings."""
        return self.dropout(self.embedding(ids) * self.scale)  # type: ignore[no-any-return]

    def read(self, embedded: Tensor) -> Tensor:
        """Project embeddings to their part of the first layer's gates: `[..., d_model]` → `[..., 3·d_model]`."""
        first = self.layers[0]
        assert isinstance(first, nn.GRUCell)
        return F.linear(embedded, first.weight_ih[:, : embedded.shape[-1]], first.bias_ih)

    def step(self, embedded: Tensor, gates: Tensor, states: Sequence[Tensor], source: Looked | None) -> tuple[Tensor, list[Tensor]]:
        """Read one token.

        Args:
            embedded: Its embedding, `[N, d_model]`.
            gates: What `read` makes of that.
            states: Of each layer, `[N, d_model]`.
            source: What to look at; None where there is no attention.

        Returns:
            The hidden state that the output projection takes, `[N, d_model]`, and the layers' new states.
        """
        parts = [embedded]
        if source is not None:
            seen = source.look(states[-1])
            parts.append(seen)
            first = self.layers[0]
            assert isinstance(first, nn.GRUCell)
            gates = gates + F.linear(seen, first.weight_ih[:, embedded.shape[-1] :])
        updated: list[Tensor] = []
        for layer, state in zip(self.layers, states, strict=True):
            assert isinstance(layer, nn.GRUCell)
            if updated:
                gates = F.linear(self.dropout(updated[-1]), layer.weight_ih, layer.bias_ih)
            updated.append(gated(layer, gates, state))
        return self.dropout(torch.tanh(self.readout(torch.cat((updated[-1], *parts), -1)))), updated


def gated(cell: nn.GRUCell, gates: Tensor, state: Tensor) -> Tensor:
    """Update a state `[N, H]` (Cho et al., 2014): what is new of it is weighed against what was, number by number.

    Args:
        cell: The weights of what is made of the state.
        gates: W x + b of the input: reset, update and new, `[N, 3·H]`.
        state: As it was.
    """
    given = gates.chunk(3, -1)
    own = F.linear(state, cell.weight_hh, cell.bias_hh).chunk(3, -1)
    reset = torch.sigmoid(given[0] + own[0])
    update = torch.sigmoid(given[1] + own[1])
    new = torch.tanh(given[2] + reset * own[2])
    return new + update * (state - new)


class Rnn(Network):
    """See the module."""

    decoder: RnnDecoder

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        source, target = token_tables(config)
        self.encoder = RnnEncoder(config, source)
        self.decoder = RnnDecoder(config, target)

    def encode(self, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Network` → values `[B, S, d_model]`, their mask `[B, S]`, and the encoder's last states `[B, d_model]`."""
        values, last = self.encoder(source_ids, PackedRecurrence(source_lengths))
        return values, padding_mask(source_lengths, source_ids.shape[1]), last

    def decode(self, target_ids: Tensor, *encoded: Tensor) -> Tensor:
        values, mask, last = encoded
        return self._decode(target_ids, self.decoder.start(last), self._source(values, mask))[0]

    def stepper(self, source_ids: Tensor, source_lengths: Tensor) -> "RnnSteps":
        values, mask, last = self.encode(source_ids, source_lengths)
        return RnnSteps(self.decoder, self.decoder.start(last), self._source(values, mask))

    def observe(self, source: Sequence[int], inputs: Sequence[int], has_maps: bool = False) -> Observation:
        """See `Network`. A step keeps the states of even positions in one cache a layer and those of odd ones in another."""
        values, mask, last = self.encode(torch.tensor([source]), torch.tensor([len(source)]))
        seen = self._source(values, mask, is_observed=True)
        hidden, states = self._decode(torch.tensor([inputs]), self.decoder.start(last), seen)
        attention = torch.stack(seen.weights, 1) if seen is not None else hidden.new_zeros(0, len(inputs), len(source))

        def caches(stop: int) -> list[Tensor]:
            """Tell each layer's states before the steps at `stop` and at the position before it, that of the even one first."""
            order = (stop, stop - 1) if stop % 2 == 0 else (stop - 1, stop)
            return [states[max(place, 0)][layer][0] for layer in range(self.decoder.num_layers) for place in order]

        maps = {"cross": attention[:, None]} if has_maps and seen is not None else {}
        return Observation(hidden[0], attention, caches, maps)

    def _source(self, values: Tensor, mask: Tensor, is_observed: bool = False) -> Source | None:
        scorer = self.decoder.alignment
        return None if scorer is None else Source(scorer, scorer.keys(values), values, mask, is_observed)

    def _decode(self, target_ids: Tensor, states: list[Tensor], source: Source | None) -> tuple[Tensor, list[list[Tensor]]]:
        """Decode whole targets → hidden states `[B, T, d_model]`, and the states before each position and after the last."""
        embedded = self.decoder.embed(target_ids)
        gates = self.decoder.read(embedded)
        hidden: list[Tensor] = []
        before = [states]
        for position in range(target_ids.shape[1]):
            out, states = self.decoder.step(embedded[:, position], gates[:, position], states, source)
            hidden.append(out)
            before.append(states)
        return torch.stack(hidden, 1), before


class RnnSteps:
    """Decodes token by token; see `Stepper`."""

    def __init__(self, decoder: RnnDecoder, states: list[Tensor], source: Source | None) -> None:
        self.decoder, self.states, self.source = decoder, states, source

    def step(self, previous: Tensor) -> Tensor:
        embedded = self.decoder.embed(previous)
        hidden, self.states = self.decoder.step(embedded, self.decoder.read(embedded), self.states, self.source)
        return self.decoder.log_probs(hidden)

    def select(self, rows: Tensor) -> None:
        self.states = [state[rows] for state in self.states]
        if self.source is not None:
            known = self.source
            self.source = Source(known.scorer, known.keys[rows], known.values[rows], known.mask[rows])
