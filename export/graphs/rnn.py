"""Graphs of the recurrent encoder–decoder: encoder, decode step and scorer, computed with the code of `model/networks/rnn.py`.

The encoder's recurrence becomes one ONNX GRU a layer, which takes a length for each row; the decoder's step is written once in the
decode graph, and once in the scorer as the body of an ONNX Scan over the positions of the targets.

A step at an even position reads the state of even positions and writes that of odd ones, and the other way round: its inputs stay
unchanged, so the same step can be run again. At position 0 it reads the encoder's output.

Attention to the source is one node of the Transformer's operator, with one head as wide as a state. Its sums run over a row's own
source only, so a row has the same bits however long the cache is; a product of plain matrices would sum over the whole cache. Dot
products are the operator's own; scores of another kind are added to products with a query of zeros.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.export.functions import scan
from dragoman.export.graphs.attention import Heads, group_query_attention
from dragoman.export.graphs.kinds import PACKED_AXES, PAIR_AXES, Layout, Packed, Padded, Stepping
from dragoman.export.recording import Recorder, axis_size, write_node
from dragoman.export.shortlist import shortened
from dragoman.export.tensors import Cache, Tensors
from dragoman.export.tracing import GraphModule
from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import AdditiveAttention, padding_mask
from dragoman.model.networks.rnn import DotAlignment, Rnn, RnnDecoder, Source

LANES = 8
"""The operator takes heads of a multiple of so many numbers."""
GATES = (1, 0, 2)
"""PyTorch's order of a unit's gates is reset, update, new; ONNX's is update, reset, new."""


class CachedSource:
    """Encoded sources in caches with room to spare; see `rnn.Looked`."""

    def __init__(self, alignment: AdditiveAttention | DotAlignment, keys: Tensor, values: Tensor, source_lengths: Tensor) -> None:
        """Take the caches `[N, S, A]` and `[N, S, padded_width(d_model)]`, and the tokens of each row's source, `[N]`."""
        self.alignment, self.keys = alignment, keys
        self.values = values.unsqueeze(1)
        self.last_positions = (source_lengths - 1).to(torch.int32)
        self.capacity = axis_size(values, 1)

    def look(self, query: Tensor) -> Tensor:
        bias, scale, asked = None, 1.0, pad_columns(query).unsqueeze(1)
        if isinstance(self.alignment, DotAlignment):
            scale = self.alignment.scale
        else:
            bias = self.alignment.scores(query.unsqueeze(1), self.keys).unsqueeze(1)
            asked = asked * 0.0
        nothing, past = asked[:, :0], (self.values, self.values)
        added = nothing, nothing
        mixed = group_query_attention(asked, added, past, self.last_positions, self.capacity, Heads(1, scale), bias)[0]
        return drop_columns(mixed.squeeze(1), query.shape[-1])


def padded_width(width: int) -> int:
    """Return how wide states and values are for the operator."""
    return -(-width // LANES) * LANES


def pad_columns(x: Tensor) -> Tensor:
    """Fill rows `[…, d]` up with zeros, where the operator wants them wider."""
    width = x.shape[-1]
    missing = padded_width(width) - width
    if not missing:
        return x
    pads = torch.tensor([0] * len(x.shape) + [0] * (len(x.shape) - 1) + [missing])
    (wider,) = write_node("Pad", (x, pads), ((*x.shape[:-1], width + missing),), (x.dtype,))
    return wider  # type: ignore[no-any-return]


def drop_columns(x: Tensor, width: int) -> Tensor:
    """Undo it: rows `[N, …]` → `[N, width]`."""
    return x if x.shape[-1] == width else x[:, :width]


def rnn_caches(config: ModelConfig) -> list[Cache]:
    """Return the caches of a decoder: each layer's states, what they begin with, and what attention reads of the source."""
    width, layers = config.d_model, range(config.num_decoder_layers)
    states = [Cache(f"state_{parity}_{layer}", "self", [width]) for layer in layers for parity in ("even", "odd")]
    starts = [Cache(f"start_{layer}", "cross", [width]) for layer in layers]
    keys = [Cache("keys", "cross", ["S", config.attention_dim or width])] if config.attention == "additive" else []
    values = [Cache("values", "cross", ["S", padded_width(width)])] if config.attention != "none" else []
    return [*states, *starts, *keys, *values]


class GatedRecurrence:
    """Recurrence on rows `[P, d_model]`, by one node a layer."""

    def __init__(self, layout: Layout, source_lengths: Tensor) -> None:
        """Take how sources lie, and their lengths `[B]`."""
        self.layout = layout
        self.lengths = source_lengths.to(torch.int32)

    def run(self, layer: nn.GRU, x: Tensor) -> tuple[Tensor, Tensor]:
        """Read every source in both directions: `[P, d_model]` → `[P, d_model]`, and both last states, `[B, d_model]`."""
        steps = self.layout.apart(x).transpose(0, 1)
        size, rows, half = steps.shape[0], steps.shape[1], layer.hidden_size
        outputs, last = write_node(
            "GRU",
            (steps, *_weights(layer), self.lengths),
            ((size, 2, rows, half), (2, rows, half)),
            (x.dtype, x.dtype),
            direction="bidirectional",
            hidden_size=half,
            linear_before_reset=1,
        )
        return self.layout.together(outputs.permute(2, 0, 1, 3).flatten(2)), last.transpose(0, 1).flatten(1)


def _weights(layer: nn.GRU) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's weights as ONNX has them: of inputs `[2, 3·H, d]`, of states `[2, 3·H, H]`, and all biases `[2, 6·H]`."""

    def both(name: str) -> Tensor:
        parts = (getattr(layer, f"{name}_l0{direction}").chunk(3) for direction in ("", "_reverse"))
        return torch.stack([torch.cat([gates[place] for place in GATES]) for gates in parts])

    return both("weight_ih"), both("weight_hh"), torch.cat((both("bias_ih"), both("bias_hh")), 1)


def _remembered(decoder: RnnDecoder, values: Tensor) -> list[Tensor]:
    """Return what the caches keep of the encoder's rows `[P, d_model]`: keys where they are not the values, and those."""
    if decoder.alignment is None:
        return []
    keys = decoder.alignment.keys(values)
    return [*([] if keys is values else [keys]), pad_columns(values)]


class RnnGraph(GraphModule):
    """Common parts of the three graphs."""

    def __init__(self, model: Rnn) -> None:
        """Use a model's own layers."""
        super().__init__()
        self.config = model.config
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.tensors = Tensors.of_caches(rnn_caches(model.config), has_attention=model.config.attention != "none")


class RnnEncoderGraph(RnnGraph):
    """Sources to what a decoder begins with and what it looks at."""

    part, axes = "encoder", PACKED_AXES

    def forward(self, src_ids: Tensor, src_lens: Tensor, positions: Tensor, grid: Tensor, cells: Tensor) -> list[Tensor]:
        """Encode.

        Args:
            src_ids: Tokens of all sources `[P]`, one source after the other.
            src_lens: Tokens of each source, `[B]`.
            positions: Of each token in its source, `[P]`; a recurrence needs none.
            grid: Which of the tokens stands where, `[B, S]`; any beyond the end of a source.
            cells: Where each token stands, as an index into `[B·S]`, `[P]`.

        Returns:
            With attention, keys and values side by side, `[P, A + d_model]`, or values alone; and each layer's first state side by
            side, `[B, L·d_model]`.
        """
        values, last = self.encoder(src_ids, GatedRecurrence(Packed(grid, cells), src_lens))
        rows = _remembered(self.decoder, values)
        return [*([torch.cat(rows, -1)] if rows else []), self.decoder.starts(last)]


class RnnStepGraph(Stepping, RnnGraph):
    """One token for each of N rows, every row at its own position, to the likeliest next tokens."""

    def __init__(self, model: Rnn, shortlist: Sequence[int] | None = None) -> None:
        """Use a model's own layers; with a shortlist, rising, candidates are its ids alone, see `shortlist`."""
        super().__init__(model)
        self.decoder = model.decoder if shortlist is None else shortened(model.decoder, shortlist)
        self.shortlist = None if shortlist is None else torch.tensor(shortlist)

    def forward(
        self, prev_ids: Tensor, positions: Tensor, src_lens: Tensor, num_candidates: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Decode one step.

        Args:
            prev_ids: Each row's last token, `[N]`.
            positions: Where it stands, `[N]`.
            src_lens: Real tokens of each row's source, `[N]`.
            num_candidates: K, `[1]`.
            caches: As `rnn_caches` has them, with an axis of rows before.

        Returns:
            The K likeliest ids `[N, K]`, likeliest first and of equals the lower id; their log-probabilities `[N, K]`; and the
            layers' states of even and of odd positions, one of the two as it was.
        """
        num_layers = self.config.num_decoder_layers
        kept, starts, remembered = caches[: 2 * num_layers], caches[2 * num_layers : 3 * num_layers], caches[3 * num_layers :]
        pairs = list(zip(kept[::2], kept[1::2], strict=True))
        is_first, is_even = positions[:, None] < 1, (positions % 2)[:, None] < 1
        states = [torch.where(is_first, start, torch.where(is_even, *pair)) for start, pair in zip(starts, pairs, strict=True)]
        embedded = self.decoder.embed(prev_ids)
        alignment = self.decoder.alignment
        source = None if alignment is None else CachedSource(alignment, remembered[0], remembered[-1], src_lens)
        hidden, updated = self.decoder.step(embedded, self.decoder.read(embedded), states, source)
        log_probs = self.decoder.log_probs(hidden)
        written = (
            part
            for new, (even, odd) in zip(updated, pairs, strict=True)
            for part in (torch.where(is_even, even, new), torch.where(is_even, new, odd))
        )
        return *self.likeliest(log_probs, num_candidates), *written

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        dtype = self.decoder.output_weight.dtype
        return {
            **self.rows(recorder),
            "caches": [recorder.input(cache.name, ("N", *cache.shape), dtype) for cache in rnn_caches(self.config)],
        }


class RnnScorerGraph(RnnGraph):
    """Pairs of source and target to the log-probabilities of the targets' tokens and the attention between the two.

    What does not depend on a position's state runs on rows `[B·S, …]` and `[B·T, …]`, as the other graphs do on theirs.
    """

    part, axes = "scorer", PAIR_AXES

    def forward(self, src_ids: Tensor, src_lens: Tensor, tgt_ids: Tensor, tgt_lens: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Score right-padded pairs.

        Args:
            src_ids: Sources `[B, S]`.
            src_lens: Their real tokens, `[B]`.
            tgt_ids: What the decoder reads, `[B, T]`: the start token, then the target without its last token.
            tgt_lens: Its real tokens, `[B]`; what comes after them changes nothing before.
            labels: The target, `[B, T]`.

        Returns:
            The labels' log-probabilities `[B, T]`, and with attention its weights `[B, 1, T, S]`, whose rows sum to 1 over the
            source. Both mean nothing beyond a row's target.
        """
        decoder, layout = self.decoder, Padded(src_ids)
        values, last = self.encoder(src_ids.flatten(), GatedRecurrence(layout, src_lens))
        source = None
        if decoder.alignment is not None:
            keys, seen = layout.apart(decoder.alignment.keys(values)), layout.apart(values)
            source = Source(decoder.alignment, keys, seen, padding_mask(src_lens, src_ids.shape[1]), is_observed=True)

        def step(states: list[Tensor], read: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            token, gates = read
            hidden, updated = decoder.step(token, gates, states, source)
            return updated, [hidden, *(source.weights if source is not None else ())]

        embedded = decoder.embed(tgt_ids.flatten())
        read = embedded, decoder.read(embedded)
        sequences = [rows.unflatten(0, tgt_ids.shape) for rows in read]  # type: ignore[no-untyped-call]
        hidden, *weights = scan(step, decoder.start(last), sequences)
        log_probs = decoder.log_probs(hidden.flatten(0, 1)).gather(-1, labels.flatten()[:, None])
        return log_probs.view(labels.shape), *(x.unsqueeze(1) for x in weights)
