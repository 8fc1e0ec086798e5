"""Fields of Transformers' settings of generation that become nothing here, and why."""

from collections.abc import Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that change an answer and that nothing here is like: what each would do.
BEYOND: Mapping[str, str] = {
    "max_time": "a request's deadline",
    "stop_strings": "texts that end an answer",
    "use_mtp": "several tokens a step",
    "min_p": "draws above a share of the likeliest",
    "top_h": "draws within a share of the entropy",
    "typical_p": "draws of typical tokens",
    "epsilon_cutoff": "draws above a probability",
    "eta_cutoff": "draws above a probability that depends on the entropy",
    "encoder_repetition_penalty": "a penalty on what is not in the source",
    "encoder_no_repeat_ngram_size": "no n-grams of the source",
    "exponential_decay_length_penalty": "a growing wish to end",
    "sequence_bias": "biases on sequences",
    "token_healing": "another end of the prompt",
    "guidance_scale": "two prompts against each other",
    "watermarking_config": "a watermark",
    "penalty_alpha": "contrastive search",
    "dola_layers": "layers against each other",
    "diversity_penalty": "groups of beams that differ",
    "num_beam_groups": "groups of beams that differ",
    "constraints": "words that must come",
    "force_words_ids": "words that must come",
    "assistant_ensemble_weight": "two models together",
}
# With these values, fields of the table above do nothing in Transformers either.
IDLE: Mapping[str, Any] = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "token_healing": False,
    "use_mtp": False,
}
SAMPLING_ONLY = frozenset({"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"})
# How Transformers computes, stores or returns; the server has its own way.
ELSEWHERE = _names(
    """
    use_cache cache_implementation cache_config max_cache_len output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind speculation_type
    compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size remove_invalid_values
    transformers_version _from_model_config _commit_hash
    """
)
