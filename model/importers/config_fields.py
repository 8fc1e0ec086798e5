"""Fields of `config.json` that have no effect here, each with the reason: a report names them all."""

from typing import Any, Final

from dragoman.model.importers.foreign import Foreign, says_something
from dragoman.model.importers.generation_fields import SEARCH_FIELDS, TOKEN_FIELDS
from dragoman.model.importers.report import Report
from dragoman.model.importers.tasks import TASKS_FIELD, tasks_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_REASONS: Final = (
    (
        _names(
            "dropout dropout_rate attention_dropout activation_dropout classifier_dropout classif_dropout encoder_layerdrop "
            "decoder_layerdrop init_std initializer_factor initializer_range gradient_checkpointing"
        ),
        "of training",
    ),
    (
        _names(
            "architectures dtype torch_dtype transformers_version use_cache output_past output_attentions output_hidden_states "
            "return_dict _name_or_path _num_labels torchscript use_bfloat16 chunk_size_feed_forward is_encoder_decoder "
            "tokenizer_class name_or_path num_hidden_layers force_download _commit_hash attn_implementation"
        ),
        "of the library",
    ),
    (
        _names(
            "id2label label2id num_labels problem_type finetuning_task task_specific_params prefix sep_token_id cls_token_id "
            "add_cross_attention cross_attention_hidden_size add_bias_logits"
        ),
        "of other uses of the network",
    ),
    (
        _names(
            "normalize_before normalize_embedding add_final_layer_norm static_position_embeddings extra_pos_embeddings "
            "model_max_length max_source_positions max_target_positions n_positions sentinel_offset"
        ),
        "of old versions; Transformers takes no notice either",
    ),
)


def tell_ignored(foreign: Foreign, report: Report) -> None:
    """Name what `config.json` says that nobody has asked for, but for settings of generation, which are told elsewhere."""
    told = SEARCH_FIELDS | TOKEN_FIELDS | ({TASKS_FIELD} if tasks_of(foreign.config.fields) else set())
    left = {name: value for name, value in foreign.config.unread.items() if value is None or name not in told}
    for names, reason in _REASONS:
        known = {name: left.pop(name) for name in sorted(left.keys() & names)}
        report.ignore("config.json", known.items(), reason)
    idle: dict[str, Any] = {name: left.pop(name) for name in sorted(left) if not says_something(left[name])}
    report.ignore("config.json", idle.items(), "says nothing")
    report.ignore("config.json", sorted(left.items()), "not known here")
