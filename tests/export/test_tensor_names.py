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


@pytest.mark.parametrize(
    ("tensors", "encoder", "decoder", "has_attention"),
    [
        (Tensors.of_layers(2), (PACKED, ["cross_kv"]), ([*STEP, *SELF, *CROSS], [*CANDIDATES, *SELF_OUT]), True),
        (Tensors.of_layers(2, False), (PADDED, CROSS), ([*STEP, *SELF, *CROSS], [*CANDIDATES, *SELF_OUT]), True),
        (
            Tensors.of_caches([*STATES, START]),
            (PACKED, ["source_states"]),
            ([*STEP, "state_even_0", "state_odd_0", "start_0"], [*CANDIDATES, *STATES_OUT]),
            True,
        ),
        (
            Tensors.of_caches([*STATES, START, KEYS, VALUES], has_attention=False),
            (PACKED, ["cross_kv", "source_states"]),
            ([*STEP, "state_even_0", "state_odd_0", "start_0", "keys", "values"], [*CANDIDATES, *STATES_OUT]),
            False,
        ),
        (
            Tensors.of_caches([*STATES, START, KEYS], is_packed=False),
            (PADDED, ["start_0", "keys"]),
            ([*STEP, "state_even_0", "state_odd_0", "start_0", "keys"], [*CANDIDATES, *STATES_OUT]),
            True,
        ),
        (
            Tensors.of_caches(TEXT, has_prompts=True, has_attention=False),
            (["src_ids", "positions", "src_lens", *SELF], SELF_OUT),
            ([*STEP, *SELF], [*CANDIDATES, *SELF_OUT]),
            False,
        ),
    ],
)
def test_names_follow_from_caches(
    tensors: Tensors, encoder: tuple[list[str], ...], decoder: tuple[list[str], ...], has_attention: bool
) -> None:
    assert (tensors.encoder_inputs, tensors.encoder_outputs) == encoder
    assert (tensors.decoder_inputs, tensors.decoder_outputs) == decoder
    assert tensors.scorer_inputs == ["src_ids", "src_lens", "tgt_ids", "tgt_lens", "labels"]
    assert tensors.scorer_outputs == ["label_log_probs", *["attention"] * has_attention]


def test_caches_of_attention_give_the_names_of_layers() -> None:
    assert Tensors.of_caches(attention_caches(2, 2, 8)) == Tensors.of_layers(2)
