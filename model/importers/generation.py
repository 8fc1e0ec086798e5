"""Settings of generation of a foreign folder: template, languages, defaults, and the result of every field."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Languages, Template, around, num_forced
from dragoman.model.importers.defaults import ANSWER_FIELDS, Target, convert
from dragoman.model.importers.files import ForeignError, shown
from dragoman.model.importers.languages import TASKS_FIELD, Folder, PromptOptions, chosen_tasks, read_prompt_format, tasks_of
from dragoman.model.importers.tokenizers import read_token_ids

TOKEN_FIELDS: Final = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"})
SEARCH_FIELDS: Final = ANSWER_FIELDS - TOKEN_FIELDS
_FORCE_FIRST: Final = "force_bos_token_to_be_generated"  # the old name of forced_bos_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignGeneration:
    """Template, languages (None where they are not known), defaults, padding (see `ModelConfig.padding`) of a model.

    `notes` are sentences on templates and languages; `fields` has `field: result` for every setting of generation.
    """

    template: Template
    languages: Languages | None
    defaults: Defaults
    padding: str
    notes: list[str]
    fields: list[str]

    @property
    def token_ids(self) -> set[int]:
        """Tokens that go around a text."""
        languages = self.languages or Languages()
        return {
            token_id
            for affixes in (self.template, *languages.source, *languages.target)
            for token_id in (*affixes.source_prefix, *affixes.source_suffix, *affixes.target_prefix, affixes.decoder_start_id)
            if token_id is not None
        }


def read_generation(
    path: Path,
    network: ModelConfig,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any],
    options: PromptOptions,
) -> ForeignGeneration:
    """Return the prompts and defaults of a folder with these JSON files, whose `config.json` has become `network`.

    Raises:
        ForeignError: Naming the field that is missing, contradictory, or not supported.
    """
    settings = generation_fields(path, config, generation, options.task)
    folder = Folder(
        path=path,
        model_type=str(config.get("model_type")),
        config=config,
        generation=settings.fields,
        tokenizer=tokenizer,
        token_ids=read_token_ids(path, tokenizer),
        source_vocab_size=network.source_vocab_size,
        target_vocab_size=network.target_vocab_size,
        options=options,
    )
    try:
        prompts = read_prompt_format(folder)
        for kind, value in ((Template, prompts.template), (Languages | None, prompts.languages)):
            msgspec.convert(msgspec.to_builtins(value), kind)  # within the bounds that checkpoints have
    except ForeignError:
        raise
    except ValueError as error:
        raise ForeignError(f"{path}: {error}") from error
    template, start = prompts.template, settings.fields.get("decoder_start_token_id")
    if start is not None and start != network.decoder_start_id:
        template = msgspec.structs.replace(template, decoder_start_id=folder.target_token("decoder_start_token_id"))
    target = Target(
        pad_id=network.pad_id,
        eos_id=network.eos_id,
        decoder_start_id=network.decoder_start_id if template.decoder_start_id is None else template.decoder_start_id,
        vocab_size=network.target_vocab_size,
        max_target_tokens=network.max_target_positions,
        num_forced=num_forced(prompts.template, prompts.languages),
    )
    converted = convert(settings.fields, target, path / settings.origin)
    return ForeignGeneration(
        template=template,
        languages=prompts.languages,
        defaults=converted.defaults,
        padding=converted.padding,
        notes=[_around(folder, template, network.eos_id), *prompts.notes],
        fields=[*converted.notes, *settings.notes],
    )


def _around(folder: Folder, template: Template, eos_id: int) -> str:
    """Return a sentence on the tokens around every text."""
    names = {token_id: name for name, token_id in folder.token_ids.items()}
    affixes = around(template, None, None, eos_id)
    sides = affixes.source_prefix, affixes.source_suffix
    before, after = (" ".join(names.get(token_id, f"token {token_id}") for token_id in ids) for ids in sides)
    return f"around every text: {before} TEXT {after}".replace(":  ", ": ")


class GenerationFields(NamedTuple):
    """Fields by name, without those that are null; the file that most of them are from; notes on fields that do not count."""

    fields: dict[str, Any]
    origin: str
    notes: list[str]


def generation_fields(
    path: object, config: Mapping[str, Any], generation: Mapping[str, Any] | None, task: str = ""
) -> GenerationFields:
    """Return the fields that `generate` takes: `generation_config.json` alone where there is one, else those of `config.json`.

    Fields of a task come before the others.
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
    # The fields of the chosen tasks, over the others; those in which several tasks differ stay as they are.
    chosen = chosen_tasks(path, config, task)
    for name in dict.fromkeys(name for fields_of_task in chosen.values() for name in fields_of_task if name != "prefix"):
        values = [fields_of_task.get(name) for fields_of_task in chosen.values()]
        if any(value != values[0] for value in values):
            notes.append(f"{name}: differs among the tasks {', '.join(chosen):.400}; choose one of them for it to count")
        elif values[0] is not None:
            fields[name] = values[0]
    if unused := [name for name in tasks_of(config) if name not in chosen]:
        notes.append(f"{TASKS_FIELD}: not chosen with --task: {', '.join(unused):.400}")
    return GenerationFields(fields, origin, notes)
