"""The graphs of a language model: a piece of a prompt, the decode step, and the one that scores.

All three are `model/networks/language_model.py`'s decoder on rows without a time axis, with an attention backend that emits one
`com.microsoft.GroupQueryAttention` a layer. The operator turns queries and keys itself where positions are rotary; it knows where a
row's tokens stand, for they are the last of it.

A row's cache holds its prompt and right after it its answer. A prompt may be read in pieces of any size: what the caches hold of
it then is the same to the bit. The operator takes queries in blocks, of 2·Dh or what the processor's cache has room for, and a
block of one query gives other bits than it does among others. All blocks are even, so pieces are made even, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.export.graphs.attention import Heads, KeyValue, group_query_attention
from dragoman.export.graphs.kinds import PAIR_AXES, Stepping
from dragoman.export.recording import Recorder, axis_size, write_node
from dragoman.export.shortlist import shortened
from dragoman.export.tensors import PROMPT_INPUTS, Tensors, self_kv_names, text_caches
from dragoman.export.tracing import GraphModule
from dragoman.model.config import ModelConfig
from dragoman.model.networks.language_model import LanguageModel, joined
from dragoman.model.networks.positions import RelativeBias, angles


class Rotation(nn.Module):
    """The angles of rotary positions, one table for all graphs: a scorer has room for the longest prompt and the longest text."""

    cos: Tensor  # of every position's angles, `[positions, Dh / 2]`
    sin: Tensor  # the same

    def __init__(self, config: ModelConfig) -> None:
        """Make the table."""
        super().__init__()
        num_positions = config.max_source_positions + config.max_target_positions
        for name, table in zip(("cos", "sin"), angles(num_positions, config.head_dim, config.rotary_base), strict=True):
            self.register_buffer(name, table, persistent=False)


class TextAttention:
    """Backend of the decoder: rows `[P, …]` are put apart, `[N, T, …]`, for one node a layer, and together again.

    Attributes:
        caches: Per layer, with what has been written so far.
    """

    def __init__(
        self,
        heads: Heads,
        rotation: Rotation | None,
        caches: Sequence[tuple[Tensor | None, Tensor | None]],
        last_positions: Tensor,
        capacity: Tensor,
        apart: Callable[[Tensor], Tensor],
        together: Callable[[Tensor], Tensor],
    ) -> None:
        """Take how tokens lie, and where they go.

        Args:
            heads: Of the model.
            rotation: If positions are rotary.
            caches: Per layer, keys and values `[N, H, T, Dh]`; or none of them, where rows are whole texts.
            last_positions: Where each row's last new token stands, `[N]`.
            capacity: Keys there is room for, `[1]` int32.
            apart: Puts rows `[P, …]` side by side, `[N, T, …]`.
            together: Undoes it.
        """
        self.heads = heads
        self.rotation = None if rotation is None else (rotation.cos, rotation.sin)
        self.caches = list(caches)
        self.last_positions, self.capacity = last_positions.to(torch.int32), capacity
        self.apart, self.together = apart, together

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Write the new tokens' keys and values and attend up to each of them: `[P, 3·H·Dh]` → `[P, H·Dh]`."""
        assert bias is None, "a language model has no relative positions"
        attended, key, value = group_query_attention(
            self.apart(qkv),
            (None, None),
            self.caches[layer],
            self.last_positions,
            self.capacity,
            self.heads,
            rotation=self.rotation,
        )
        self.caches[layer] = key, value
        return self.together(attended)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        raise AssertionError("a language model has no encoder")


class TextGraph(GraphModule):
    """Common parts of the three graphs."""

    def __init__(self, model: LanguageModel, shortlist: Sequence[int] | None = None) -> None:
        """Use a model's own layers; with a shortlist, rising, log-probabilities are of its ids alone, see `shortlist`."""
        super().__init__()
        self.decoder = model.decoder if shortlist is None else shortened(model.decoder, shortlist)
        self.config: ModelConfig = model.config
        self.heads = Heads.of(model.config)
        self.rotation = Rotation(model.config) if model.config.positions == "rotary" else None
        caches = text_caches(model.config.num_decoder_layers, model.config.num_heads, model.config.head_dim)
        self.tensors = Tensors.of_caches(caches, has_prompts=True, has_attention=False)

    def _caches(self, recorder: Recorder, num_rows: int | str) -> list[KeyValue]:
        """Add caches `[num_rows, H, T, Dh]` as inputs; return them layer by layer."""
        axes = num_rows, self.config.num_heads, "T", self.config.head_dim
        values: list[Any] = [recorder.input(name, axes, torch.float32) for name in self_kv_names(self.config.num_decoder_layers)]
        return list(zip(values[::2], values[1::2], strict=True))


class PromptGraph(TextGraph):
    """A piece of one prompt to what steps will read of it, written into the row's caches.

    It stands where other architectures encode. What nothing of that needs, the last feed-forward network and the logits, is not in
    it.
    """

    part = "encoder"

    def forward(self, src_ids: Tensor, positions: Tensor, src_lens: Tensor, self_kv: list[KeyValue]) -> tuple[Tensor, ...]:
        """Read a piece.

        Args:
            src_ids: Its tokens, `[P]`.
            positions: Where they stand in the prompt, one after the other, `[P]`.
            src_lens: Tokens that the row holds when they have been read, `[1]`.
            self_kv: Per layer the caches `[1, H, T, Dh]`, with room for one token more. Where P is odd, any keys and values are
                written there; the row's next piece, or its first step, overwrites them before it reads them.

        Returns:
            The updated caches, keys then values, layer by layer.
        """
        room, size = axis_size(self_kv[0][0], 2), axis_size(src_ids, 0)
        (num_added,) = write_node("Mod", (size, torch.tensor([2], dtype=torch.int32)), ((1,),), (torch.int32,))
        lying = (lambda x: x.unsqueeze(0), lambda x: x.squeeze(0))
        last = (src_lens - 1).to(torch.int32) + num_added
        backend = TextAttention(self.heads, self.rotation, self_kv, last, room, *lying)
        self.decoder(_with_first_again(src_ids, num_added), _with_first_again(positions, num_added), backend)
        return tuple(part for pair in backend.caches for part in pair if part is not None)

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        axes: dict[str, tuple[int | str]] = {"src_ids": ("P",), "positions": ("P",), "src_lens": (1,)}
        return {name: recorder.input(name, axes[name]) for name in PROMPT_INPUTS} | {"self_kv": self._caches(recorder, 1)}


class TextStepGraph(Stepping, TextGraph):
    """One token for each of N rows, every row at its own position of its own text, to the likeliest next tokens."""

    def __init__(self, model: LanguageModel, shortlist: Sequence[int] | None = None) -> None:
        """Use a model's own layers; with a shortlist, rising, candidates are its ids alone, see `shortlist`."""
        super().__init__(model, shortlist)
        self.shortlist = None if shortlist is None else torch.tensor(shortlist)

    def forward(
        self, prev_ids: Tensor, positions: Tensor, src_lens: Tensor, num_candidates: Tensor, self_kv: list[KeyValue]
    ) -> tuple[Tensor, ...]:
        """Decode one step.

        Args:
            prev_ids: Each row's last token, `[N]`.
            positions: Where it stands in what has been decoded, `[N]`: behind as many tokens and the prompt.
            src_lens: Tokens of each row's prompt, `[N]`.
            num_candidates: K, `[1]`.
            self_kv: Per layer the caches `[N, H, T, Dh]`.

        Returns:
            The K likeliest ids `[N, K]`, likeliest first and of equals the lower id; their log-probabilities `[N, K]`; and the
            updated caches, keys then values, layer by layer.
        """
        places, room = positions + src_lens, axis_size(self_kv[0][0], 2)
        lying = (lambda x: x.unsqueeze(1), lambda x: x.squeeze(1))
        backend = TextAttention(self.heads, self.rotation, self_kv, places, room, *lying)
        log_probs = self.decoder.log_probs(self.decoder(prev_ids, places, backend))
        return *self.likeliest(log_probs, num_candidates), *(part for pair in backend.caches for part in pair if part is not None)

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        return {**self.rows(recorder), "self_kv": self._caches(recorder, "N")}


class TextScorerGraph(TextGraph):
    """Prompts and what goes on with them to the log-probabilities of the latter's tokens."""

    part, axes = "scorer", PAIR_AXES

    def forward(self, src_ids: Tensor, src_lens: Tensor, tgt_ids: Tensor, tgt_lens: Tensor, labels: Tensor) -> tuple[Tensor]:
        """Score right-padded pairs, each put together as one text.

        Args:
            src_ids: Prompts but for their last tokens, `[B, S]`; S may be 0.
            src_lens: Their real tokens, `[B]`.
            tgt_ids: What the decoder reads, `[B, T]`: the prompt's last token, then the target without its last token.
            tgt_lens: Its real tokens, `[B]`.
            labels: The target, `[B, T]`.

        Returns:
            The labels' log-probabilities `[B, T]`, which mean nothing beyond a row's target.
        """
        ids, places = joined(src_ids, src_lens, tgt_ids)
        shape = ids.shape
        lying = (lambda x: x.unflatten(0, shape), lambda x: x.flatten(0, 1))
        absent: list[tuple[None, None]] = [(None, None)] * self.config.num_decoder_layers
        backend = TextAttention(self.heads, self.rotation, absent, src_lens + tgt_lens - 1, axis_size(ids, 1), *lying)
        # Padding may go on behind the last position that there is.
        positions = torch.arange(shape[1]).clamp(0, self.config.max_target_positions - 1)
        hidden = self.decoder(ids.flatten(), positions.expand(shape).flatten(), backend)
        inputs, of_target = (lying[0](hidden), places[:, :, None]), (*places.shape, hidden.shape[-1])
        (hidden,) = write_node("GatherND", inputs, (of_target,), (hidden.dtype,), batch_dims=1)
        log_probs = self.decoder.log_probs(hidden.flatten(0, 1)).gather(-1, labels.flatten()[:, None])
        return (log_probs.view(labels.shape),)


def _with_first_again(x: Tensor, num_added: Tensor) -> Tensor:
    """Append the first element once more, or nothing, as `num_added` `[1]` says: `[P]` → `[P or P + 1]`."""
    start, axis = (torch.tensor([0], dtype=torch.int32) for _ in range(2))
    (added,) = write_node("Slice", (x, start, num_added, axis), (("added",),), (x.dtype,))
    return torch.cat((x, added))
