"""Names of the graphs' inputs and outputs follow from the caches."""

import pytest

from dragoman.export.caches import Cache, attention_caches
from dragoman.export.tensors import Tensors

PACKED = ["src_ids", "positions", "cells", "grid", "src_lens"]
PADDED = ["src_ids", "src_lens"]
STEP = ["prev_ids", "positions", "src_lens", "num_candidates"]
CANDIDATES = ["candidate_ids", "candidate_log_probs"]
STATES = [Cache("state_even_0", "self", [8]), Cache("state_odd_0", "self", [8])]
STATES_OUT = ["state_even_0_out", "state_odd_0_out"]
START, KEYS, VALUES = Cache("start_0", "cross", [8]), Cache("keys", "cross", ["S", 6]), Cache("values", "cross", ["S", 8])
CROSS = ["cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1"]
SELF = ["self_k_0", "self_v_0", "self_k_1", "self_v_1"]
SELF_OUT = [f"{name}_out" for name in SELF]
TEXT = [cache for cache in attention_caches(2, 2, 8) if cache.role == "self"]


RNN_STEP = [*STEP, "state_even_0", "state_odd_0", "start_0"]
TENSORS = [
    (Tensors.of_layers(2), PACKED, ["cross_kv"], [*STEP, *SELF, *CROSS], SELF_OUT, True),
    (Tensors.of_layers(2, False), PADDED, CROSS, [*STEP, *SELF, *CROSS], SELF_OUT, True),
    (Tensors.of_caches([*STATES, START]), PACKED, ["source_states"], RNN_STEP, STATES_OUT, True),
    (
        *(Tensors.of_caches([*STATES, START, KEYS, VALUES], has_attention=False), PACKED, ["cross_kv", "source_states"]),
        *([*RNN_STEP, "keys", "values"], STATES_OUT, False),
    ),
    (
        *(Tensors.of_caches([*STATES, START, KEYS], is_packed=False), PADDED, ["start_0", "keys"]),
        *([*RNN_STEP, "keys"], STATES_OUT, True),
    ),
    (
        *(Tensors.of_caches(TEXT, has_prompts=True, has_attention=False), ["src_ids", "positions", "src_lens", *SELF], SELF_OUT),
        *([*STEP, *SELF], SELF_OUT, False),
    ),
]


@pytest.mark.parametrize(("tensors", "inputs", "outputs", "step_inputs", "written", "has_attention"), TENSORS)
def test_names_follow_from_caches(
    tensors: Tensors, inputs: list[str], outputs: list[str], step_inputs: list[str], written: list[str], has_attention: bool
) -> None:
    assert (tensors.encoder_inputs, tensors.encoder_outputs) == (inputs, outputs)
    assert (tensors.decoder_inputs, tensors.decoder_outputs) == (step_inputs, [*CANDIDATES, *written])
    assert tensors.scorer_inputs == ["src_ids", "src_lens", "tgt_ids", "tgt_lens", "labels"]
    assert tensors.scorer_outputs == ["label_log_probs", *["attention"] * has_attention]
    assert Tensors.of_caches(attention_caches(2, 2, 8)) == Tensors.of_layers(2)
