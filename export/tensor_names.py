"""What the graphs call their inputs and outputs. It imports nothing, so that whatever traces, runs or reads a graph may ask."""

from collections.abc import Sequence
from typing import NamedTuple

STEP_INPUTS = ("prev_ids", "positions", "src_lens", "num_candidates")
STEP_OUTPUTS = ("candidate_ids", "candidate_log_probs")
SCORER_INPUTS = ("src_ids", "src_lens", "tgt_ids", "tgt_lens", "labels")
SCORER_OUTPUTS = ("label_log_probs", "attention")
PROMPT_INPUTS = ("src_ids", "positions", "src_lens")
"""Inputs of what reads a piece of a prompt into the caches, but for these."""


def self_kv_names(num_layers: int) -> list[str]:
    """Name the self-attention caches that the decode step reads, `[N, H, T, Dh]` each: keys, then values, layer by layer."""
    return [f"self_{part}_{layer}" for layer in range(num_layers) for part in "kv"]


def self_kv_output_names(num_layers: int) -> list[str]:
    """Name the same caches as outputs; each is bound to the buffer of its input, which the step updates in place."""
    return [output_name(name) for name in self_kv_names(num_layers)]


def cross_kv_names(num_layers: int) -> list[str]:
    """Name the cross-attention keys and values, `[B, H, S, Dh]` each, which the encoder gives and the decode step reads."""
    return [f"cross_{part}_{layer}" for layer in range(num_layers) for part in "kv"]


def output_name(name: str) -> str:
    """Name a cache that the decode step writes, as an output."""
    return f"{name}_out"


PACKED_INPUTS = ("src_ids", "positions", "cells", "grid", "src_lens")
PACKED_OUTPUT = "cross_kv"
"""Inputs and output of an encoder that takes sources packed, see `dragoman.export.packing`."""
STATES_OUTPUT = "source_states"
"""Second output of such an encoder: what it gives once a source, `[B, …]`, and not for each of its tokens."""


class TensorNames(NamedTuple):
    """Inputs and outputs of the graphs, in the graphs' order."""

    encoder_inputs: list[str]
    encoder_outputs: list[str]
    decoder_inputs: list[str]
    decoder_outputs: list[str]
    scorer_inputs: list[str]
    scorer_outputs: list[str]

    @classmethod
    def of_caches(
        cls,
        self_names: Sequence[str],
        cross_names: Sequence[str],
        passed_names: Sequence[str] = (),
        is_packed: bool = True,
        *,
        state_names: Sequence[str] = (),
        has_prompts: bool = False,
        has_attention: bool = True,
    ) -> "TensorNames":
        """Return what the bundle's format version asks of graphs with caches of these names.

        Args:
            self_names: Those that steps write.
            cross_names: Those that the encoder gives.
            passed_names: Those of them that steps have as outputs, too, though they write nothing.
            is_packed: Whether the encoder takes sources packed, and gives side by side the caches of tokens, and those of sources.
            state_names: Those that the encoder gives once a source, and not for each of its tokens.
            has_prompts: Whether the encoder reads prompts into the caches that steps write.
            has_attention: Whether the scorer tells attention.
        """
        packed = [*([PACKED_OUTPUT] if set(cross_names) - set(state_names) else []), *([STATES_OUTPUT] if state_names else [])]
        encoder_inputs = list(PACKED_INPUTS) if is_packed else ["src_ids", "src_lens"]
        encoder_outputs = packed if is_packed else list(cross_names)
        if has_prompts:
            encoder_inputs, encoder_outputs = [*PROMPT_INPUTS, *self_names], list(map(output_name, self_names))
        return cls(
            encoder_inputs=encoder_inputs,
            encoder_outputs=encoder_outputs,
            decoder_inputs=[*STEP_INPUTS, *self_names, *cross_names],
            decoder_outputs=[*STEP_OUTPUTS, *map(output_name, self_names), *map(output_name, passed_names)],
            scorer_inputs=list(SCORER_INPUTS),
            scorer_outputs=list(SCORER_OUTPUTS if has_attention else SCORER_OUTPUTS[:1]),
        )

    @classmethod
    def of_layers(cls, num_decoder_layers: int, is_packed: bool = True) -> "TensorNames":
        """Return the same for a Transformer with so many decoder layers."""
        return cls.of_caches(self_kv_names(num_decoder_layers), cross_kv_names(num_decoder_layers), is_packed=is_packed)
