"""What Transformers' `generate` takes from a foreign folder: `generation_config.json`, older fields of `config.json`, a task's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.model.importers.tasks import TASKS_FIELD, chosen_tasks, tasks_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that say how long, how wide and how an answer is searched for, in any version of Transformers.
SEARCH_FIELDS = _names(
    """
    max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams use_mtp temperature
    top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty
    no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias token_healing guidance_scale
    watermarking_config num_return_sequences encoder_no_repeat_ngram_size penalty_alpha dola_layers diversity_penalty
    num_beam_groups constraints force_words_ids
    """
)
TOKEN_FIELDS = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"})
_FORCE_FIRST = "force_bos_token_to_be_generated"  # what forced_bos_token_id was once


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFields:
    """The fields, and where they are from.

    Attributes:
        fields: By name; what is null is left out.
        origin: The file that most of them are from.
        notes: What of `config.json` does not count, and why.
    """

    fields: Mapping[str, Any]
    origin: str
    notes: list[str]


def generation_fields(
    path: object, config: Mapping[str, Any], generation: Mapping[str, Any] | None, task: str = ""
) -> GenerationFields:
    """Return what `generate` takes: `generation_config.json` alone where there is one, else the fields of `config.json`.

    Args:
        path: Of the folder, for messages.
        config: Its `config.json`.
        generation: Its `generation_config.json`; None where it has none.
        task: Of `task_specific_params`; its fields come before the others.

    Raises:
        ForeignError: If there is no such task.
    """
    stated = {name: value for name, value in config.items() if value is not None and name in SEARCH_FIELDS | TOKEN_FIELDS}
    notes: list[str] = []
    if generation is None:
        fields, origin = dict(stated), "config.json"
        if config.get(_FORCE_FIRST) is True and config.get("bos_token_id") is not None:
            fields.setdefault("forced_bos_token_id", config["bos_token_id"])
            notes.append(f"{_FORCE_FIRST}: forced_bos_token_id {config['bos_token_id']}")
    else:
        fields, origin = {name: value for name, value in generation.items() if value is not None}, "generation_config.json"
        notes += [
            f"{name}: config.json says {shown(value)}, which does not count beside generation_config.json"
            for name, value in stated.items()
            if name in SEARCH_FIELDS and generation.get(name) != value
        ]
    chosen = chosen_tasks(path, config, task)
    notes += _overlay(fields, chosen)
    if unused := [name for name in tasks_of(config) if name not in chosen]:
        notes.append(f"{TASKS_FIELD}: not chosen with --task: {', '.join(unused):.400}")
    return GenerationFields(fields=fields, origin=origin, notes=notes)


def _overlay(fields: dict[str, Any], chosen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put the fields of the chosen tasks over others; those in which several tasks differ are left as they are, and named."""
    notes: list[str] = []
    for name in dict.fromkeys(name for task in chosen.values() for name in task if name != "prefix"):
        values = [task.get(name) for task in chosen.values()]
        if any(value != values[0] for value in values):
            notes.append(f"{name}: differs among the tasks {', '.join(chosen):.400}; choose one of them for it to count")
        elif values[0] is not None:
            fields[name] = values[0]
    return notes


def shown(value: Any) -> str:
    """Return a value as a sentence has it."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
