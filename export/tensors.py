"""Inputs and outputs of the graphs: names, caches as a bundle declares them, and sources packed without padding.

The server imports this file, so it imports neither torch nor ONNX.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from dragoman.export.fields import (
    MAX_CACHE_AXES,
    MAX_CACHES,
    MAX_WIDTH,
    CachePrecision,
    Precision,
    TensorList,
    TensorName,
    Width,
    listed,
    shown,
)

STEP_INPUTS = ("prev_ids", "positions", "src_lens", "num_candidates")
STEP_OUTPUTS = ("candidate_ids", "candidate_log_probs")
LOG_PROBS_OUTPUT = "all_log_probs"
"""Output of a decode step with the log-probabilities that candidates are chosen from, `[N, V]`."""
QUERIES_OUTPUT = "alignment_queries"
"""Output of a decode step with the scaled queries of the manifest's `alignment` heads, side by side, `[N, 1, n·Dh]`."""
ALIGNMENT_FLOOR = 0.01
"""Added to weights of attention before their logarithms are summed over heads, so that no head has a veto."""
SCORER_INPUTS = ("src_ids", "src_lens", "tgt_ids", "tgt_lens", "labels")
SCORER_OUTPUTS = ("label_log_probs", "attention")
PROMPT_INPUTS = ("src_ids", "positions", "src_lens")
"""Inputs of what reads a piece of a prompt into the caches, but for these."""
PACKED_INPUTS = ("src_ids", "positions", "cells", "grid", "src_lens")
PACKED_OUTPUT = "cross_kv"
"""Inputs and output of an encoder that takes sources packed, see `pack`."""
STATES_OUTPUT = "source_states"
"""Second output of such an encoder: what it gives once a source, `[B, …]`, and not for each of its tokens."""
Role = Literal["self", "cross"]
Axis = Width | Literal["T", "S"]
AXES: dict[Role, str] = {"self": "T", "cross": "S"}
"""What the axis of positions is called: of the target in caches that steps write, of the source in those that the encoder gives."""
Ints = NDArray[np.int64]
HALVES: tuple[Precision, ...] = ("fp16", "bf16")


def self_kv_names(num_layers: int) -> list[str]:
    """Name the self-attention caches that the decode step reads, `[N, H, T, Dh]` each: keys, then values, layer by layer."""
    return [f"self_{part}_{layer}" for layer in range(num_layers) for part in "kv"]


def cross_kv_names(num_layers: int) -> list[str]:
    """Name the cross-attention keys and values, `[B, H, S, Dh]` each, which the encoder gives and the decode step reads."""
    return [f"cross_{part}_{layer}" for layer in range(num_layers) for part in "kv"]


def cross_key_name(layer: int) -> str:
    """Name the cross-attention keys of a layer."""
    return f"cross_k_{layer}"


def output_name(name: str) -> str:
    """Name a cache that the decode step writes, as an output."""
    return f"{name}_out"


class Cache(Struct, frozen=True, forbid_unknown_fields=True):
    """One cache of a decode step."""

    name: TensorName  # of the step's input; a cache that steps write is an output, too, which is called `NAME_out`
    role: Role  # whether steps write it ("self") or the encoder gives it and steps only read it ("cross")
    # Of one row: sizes, and at most once "T" (role "self") or "S" (role "cross"), the axis along which each position writes a place
    # of its own. A cache without that axis is a state, which belongs to the last position alone.
    shape: Annotated[list[Axis], Meta(min_length=1, max_length=MAX_CACHE_AXES)]
    # Of its numbers; None for the bundle's own, single precision in one of int8. A cache in 8 bits is an output of the step
    # whatever its role.
    precision: CachePrecision | None = None

    def __post_init__(self) -> None:
        """Refuse a shape that no cache has.

        Raises:
            ValueError: Naming the cache.
        """
        axis, names = AXES[self.role], [size for size in self.shape if isinstance(size, str)]
        if names and names != [axis]:
            raise ValueError(f"shape of {self.name} may have {axis!r} once, not {', '.join(map(repr, names))}")
        if self.elements_per_position > MAX_WIDTH:
            raise ValueError(f"shape of {self.name} has {self.elements_per_position} numbers a position, over {MAX_WIDTH}")

    @property
    def position_axis(self) -> int | None:
        """Axis of a row that is indexed by position; None for none."""
        return next((place for place, size in enumerate(self.shape) if isinstance(size, str)), None)

    @property
    def is_output(self) -> bool:
        """Whether it is an output of the decode step, too, bound where its input is."""
        return self.role == "self" or self.precision is not None

    @property
    def elements_per_position(self) -> int:
        """Numbers that a position takes; those of the whole row where no axis is indexed by position."""
        return math.prod(size for size in self.shape if isinstance(size, int))

    def row_shape(self, capacity: int) -> tuple[int, ...]:
        """Return the shape of a row with room for `capacity` positions."""
        return tuple(capacity if isinstance(size, str) else size for size in self.shape)


CacheList = Annotated[list[Cache], Meta(min_length=1, max_length=MAX_CACHES)]


def attention_caches(num_layers: int, num_heads: int, head_dim: int) -> list[Cache]:
    """Return the caches of a Transformer's decoder: `[H, T, Dh]` and `[H, S, Dh]`, keys, then values, layer by layer."""
    return [
        *text_caches(num_layers, num_heads, head_dim),
        *(Cache(name, "cross", [num_heads, "S", head_dim]) for name in cross_kv_names(num_layers)),
    ]


def text_caches(num_layers: int, num_heads: int, head_dim: int) -> list[Cache]:
    """Return the caches of a language model: `[H, T, Dh]`, keys, then values, layer by layer."""
    return [Cache(name, "self", [num_heads, "T", head_dim]) for name in self_kv_names(num_layers)]


def names_of(caches: Sequence[Cache], role: Role) -> list[str]:
    """Return the names of the caches of a role."""
    return [cache.name for cache in caches if cache.role == role]


def check_caches(caches: Sequence[Cache]) -> None:
    """Refuse caches that cannot be those of one graph.

    Raises:
        ValueError: Naming one.
    """
    if [cache.role for cache in caches] != sorted((cache.role for cache in caches), key=["self", "cross"].index):
        raise ValueError("caches that steps write come before those that the encoder gives")
    taken = {*STEP_INPUTS, *STEP_OUTPUTS, QUERIES_OUTPUT, LOG_PROBS_OUTPUT}
    for cache in caches:
        names = {cache.name, output_name(cache.name)} if cache.is_output else {cache.name}
        if names & taken:
            raise ValueError(f"caches has {shown(min(names & taken))} twice, or as the name of another tensor")
        taken |= names


class Tensors(Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs and outputs of the graphs, in the graphs' order."""

    encoder_inputs: TensorList
    encoder_outputs: TensorList
    decoder_inputs: TensorList
    decoder_outputs: TensorList
    scorer_inputs: TensorList
    scorer_outputs: TensorList

    @classmethod
    def of_layers(cls, num_decoder_layers: int, is_packed: bool = True) -> "Tensors":
        """Return what this format version asks of graphs of a Transformer with so many decoder layers."""
        return cls.of_caches(attention_caches(num_decoder_layers, 1, 1), is_packed)

    @classmethod
    def of_caches(
        cls,
        caches: Sequence[Cache],
        is_packed: bool = True,
        *,
        has_prompts: bool = False,
        has_attention: bool = True,
        has_queries: bool = False,
        has_log_probs: bool = False,
    ) -> "Tensors":
        """Return what it asks of graphs with these caches.

        Args:
            caches: In the graphs' order.
            is_packed: Whether the encoder takes sources packed, and gives side by side the caches of tokens, and those of sources.
            has_prompts: Whether the encoder reads prompts into the caches that steps write.
            has_attention: Whether the scorer tells attention.
            has_queries: Whether the decode step outputs queries, see `QUERIES_OUTPUT`.
            has_log_probs: Whether the decode step outputs all log-probabilities, see `LOG_PROBS_OUTPUT`.
        """
        written, given = names_of(caches, "self"), names_of(caches, "cross")
        if has_prompts:
            encoder_inputs, encoder_outputs = [*PROMPT_INPUTS, *written], list(map(output_name, written))
        elif is_packed:
            are_states = {cache.position_axis is None for cache in caches if cache.role == "cross"}
            encoder_inputs = list(PACKED_INPUTS)
            encoder_outputs = [PACKED_OUTPUT] * (False in are_states) + [STATES_OUTPUT] * (True in are_states)
        else:
            encoder_inputs, encoder_outputs = ["src_ids", "src_lens"], given
        return cls(
            encoder_inputs=encoder_inputs,
            encoder_outputs=encoder_outputs,
            decoder_inputs=[*STEP_INPUTS, *written, *given],
            decoder_outputs=[
                *STEP_OUTPUTS,
                *(output_name(cache.name) for cache in caches if cache.is_output),
                *[LOG_PROBS_OUTPUT] * has_log_probs,
                *[QUERIES_OUTPUT] * has_queries,
            ],
            scorer_inputs=list(SCORER_INPUTS),
            scorer_outputs=list(SCORER_OUTPUTS if has_attention else SCORER_OUTPUTS[:1]),
        )


def check_tensors(tensors: Tensors, expected: Tensors) -> None:
    """Refuse tensors that are not the ones this format version asks for.

    Raises:
        ValueError: Naming those that are missing, unknown or there twice.
    """
    for field in Tensors.__struct_fields__:
        wanted, found = getattr(expected, field), getattr(tensors, field)
        missing, unknown = set(wanted) - set(found), set(found) - set(wanted)
        if missing:
            raise ValueError(f"tensors.{field} lacks {listed([name for name in wanted if name in missing])}")
        if unknown:
            raise ValueError(f"tensors.{field} has unknown {listed([name for name in found if name in unknown])}")
        if len(found) > len(wanted):
            raise ValueError(f"tensors.{field} has a tensor twice")


def is_packed(precision: Precision) -> bool:
    """Tell whether an encoder of a precision takes sources packed; those of halves are for devices, and take them padded."""
    return precision not in HALVES


def pack(sources: Sequence[Sequence[int]]) -> dict[str, Ints]:
    """Return an encoder's inputs: the tokens of all sources, one source after the other, and where they belong.

    Returns:
        `src_ids`, `positions` and `cells` `[P]`, `grid` `[B, S]` and `src_lens` `[B]`, see `graphs.transformer.EncoderGraph`.
    """
    lengths = np.array([len(source) for source in sources], np.int64)
    longest, ends = int(lengths.max()), lengths.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    cells = positions + np.repeat(np.arange(len(sources)) * longest, lengths)
    grid = np.zeros(len(sources) * longest, np.int64)
    grid[cells] = np.arange(ends[-1])
    ids = np.fromiter((token for source in sources for token in source), np.int64, int(ends[-1]))
    return {"src_ids": ids, "positions": positions, "cells": cells, "grid": grid.reshape(-1, longest), "src_lens": lengths}
