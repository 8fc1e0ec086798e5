"""What graphs call their inputs and outputs follows from the caches, and from nothing that a model is called."""

import pytest

from dragoman.export.caches import Cache, attention_caches
from dragoman.export.tensor_names import PACKED_INPUTS
from dragoman.export.tensors import Tensors

STATES = [Cache("state_even_0", "self", [8]), Cache("state_odd_0", "self", [8])]
START, KEYS, VALUES = Cache("start_0", "cross", [8]), Cache("keys", "cross", ["S", 6]), Cache("values", "cross", ["S", 8])
TEXT = [cache for cache in attention_caches(1, 2, 8) if cache.role == "self"]


def test_caches_of_source_tokens_alone_are_one_output() -> None:
    tensors = Tensors.of_caches(attention_caches(2, 2, 8))
    assert (tensors.encoder_inputs, tensors.encoder_outputs) == (list(PACKED_INPUTS), ["cross_kv"])
    assert tensors == Tensors.of_layers(2)


@pytest.mark.parametrize(
    ("given", "outputs"),
    [([START], ["source_states"]), ([START, KEYS, VALUES], ["cross_kv", "source_states"]), ([KEYS], ["cross_kv"])],
    ids=["states alone", "both", "tokens alone"],
)
def test_what_is_given_once_a_source_is_an_output_of_its_own(given: list[Cache], outputs: list[str]) -> None:
    tensors = Tensors.of_caches([*STATES, *given])
    assert (tensors.encoder_inputs, tensors.encoder_outputs) == (list(PACKED_INPUTS), outputs)
    assert tensors.decoder_inputs[4:] == [cache.name for cache in (*STATES, *given)]
    assert tensors.decoder_outputs[2:] == ["state_even_0_out", "state_odd_0_out"]


def test_encoder_that_takes_sources_padded_gives_every_cache_apart() -> None:
    assert Tensors.of_caches([*STATES, START, KEYS], is_packed=False).encoder_outputs == ["start_0", "keys"]


def test_prompts_are_read_into_the_caches_that_steps_write() -> None:
    tensors = Tensors.of_caches(TEXT, has_prompts=True, has_attention=False)
    assert tensors.encoder_inputs == ["src_ids", "positions", "src_lens", "self_k_0", "self_v_0"]
    assert tensors.encoder_outputs == ["self_k_0_out", "self_v_0_out"]
    assert tensors.decoder_inputs == ["prev_ids", "positions", "src_lens", "num_candidates", "self_k_0", "self_v_0"]
    assert tensors.scorer_outputs == ["label_log_probs"]


def test_scorer_tells_attention_where_there_is_some() -> None:
    assert Tensors.of_caches(attention_caches(1, 2, 8)).scorer_outputs == ["label_log_probs", "attention"]
    assert Tensors.of_caches(attention_caches(1, 2, 8), has_attention=False).scorer_outputs == ["label_log_probs"]
