"""Report of an import: what was found, what became of it, what has no effect and why, what was compared."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dragoman.model.importers.files import is_empty, shown

# Fields of `config.json` that have no effect here, and why.
_REASONS: Final = {
    "of training": """
        dropout dropout_rate attention_dropout activation_dropout classifier_dropout classif_dropout encoder_layerdrop
        decoder_layerdrop init_std initializer_factor initializer_range gradient_checkpointing
    """,
    "of the library": """
        architectures dtype torch_dtype transformers_version use_cache output_past output_attentions output_hidden_states
        return_dict _name_or_path _num_labels torchscript use_bfloat16 chunk_size_feed_forward is_encoder_decoder
        tokenizer_class name_or_path num_hidden_layers force_download _commit_hash attn_implementation
    """,
    "of other uses of the network": """
        id2label label2id num_labels problem_type finetuning_task task_specific_params prefix sep_token_id cls_token_id
        add_cross_attention cross_attention_hidden_size add_bias_logits
    """,
    "of old versions; Transformers takes no notice either": """
        normalize_before normalize_embedding add_final_layer_norm static_position_embeddings extra_pos_embeddings
        model_max_length max_source_positions max_target_positions n_positions sentinel_offset
    """,
}


@dataclass(slots=True)
class Report:
    """Sentences in four groups, in the order they were added."""

    found: list[str] = field(default_factory=list)  # contents of the folder
    translated: list[str] = field(default_factory=list)  # results, where they are not plain
    ignored: list[str] = field(default_factory=list)  # contents that have no effect here, and why
    checked: list[str] = field(default_factory=list)  # comparisons, and their figures

    def ignore(self, file: str, fields: Iterable[tuple[str, Any]], reason: str) -> None:
        """Name fields of a file that have no effect, with their values."""
        named = ", ".join(f"{name} {shown(value, 40)}" for name, value in fields)
        if named:
            self.ignored.append(f"{file}: {named}: {reason}")

    def ignore_unread(self, unread: Mapping[str, Any], told: Collection[str]) -> None:
        """Name fields of `config.json` that have not been read, but for those of which another line tells."""
        left = {name: value for name, value in unread.items() if value is None or name not in told}
        for reason, names in _REASONS.items():
            self.ignore("config.json", [(name, left.pop(name)) for name in sorted(left.keys() & set(names.split()))], reason)
        self.ignore("config.json", [(name, left.pop(name)) for name in sorted(left) if is_empty(left[name])], "says nothing")
        self.ignore("config.json", sorted(left.items()), "not known here")

    def lines(self) -> list[str]:
        """Return the report, a group after the other, those with nothing left out."""
        groups = {"found": self.found, "translated": self.translated, "ignored": self.ignored, "checked": self.checked}
        return [f"{name + ':':<12}{line}" for name, lines in groups.items() for line in lines]
