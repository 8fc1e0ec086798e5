"""What a foreign folder says of generation, put together: template, languages, defaults, and what became of every field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Languages, Template, around
from dragoman.model.importers.conversion import Target
from dragoman.model.importers.defaults import convert
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.generation_fields import generation_fields, shown
from dragoman.model.importers.languages import read_speech
from dragoman.model.importers.speech import Folder, Speech, Wishes, is_token
from dragoman.model.importers.token_ids import read_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignGeneration:
    """What is said to a model, and how it is asked where a request does not say.

    Attributes:
        template: Around every text.
        languages: Its languages; None where it is not known to have any.
        defaults: What a request means that does not say.
        padding: How its network predicts padding; see `ModelConfig.padding`.
        notes: What was found of languages and templates, a sentence each.
        fields: `field: what became of it`, for every setting of generation.
    """

    template: Template
    languages: Languages | None
    defaults: Defaults
    padding: str
    notes: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)


def read_generation(
    path: Path,
    network: ModelConfig,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any],
    wishes: Wishes,
) -> ForeignGeneration:
    """Return what a foreign folder says of generation.

    Args:
        path: Of the folder.
        network: The configuration that was made of it; its `padding` is not looked at.
        config: Its `config.json`.
        generation: Its `generation_config.json`; None where it has none.
        tokenizer: Its `tokenizer_config.json`; empty where it has none.
        wishes: The user's.

    Raises:
        ForeignError: Naming what is missing, contradictory, or beyond us.
    """
    settings = generation_fields(path, config, generation, wishes.task)
    folder = Folder(
        path=path,
        model_type=str(config.get("model_type")),
        config=config,
        generation=settings.fields,
        tokenizer=tokenizer,
        token_ids=read_token_ids(path, tokenizer),
        source_vocab_size=network.source_vocab_size,
        target_vocab_size=network.target_vocab_size,
        wishes=wishes,
    )
    speech = _checked(folder)
    template = _started(folder, speech, network.decoder_start_id)
    start = network.decoder_start_id if template.decoder_start_id is None else template.decoder_start_id
    target = Target(
        pad_id=network.pad_id,
        eos_id=network.eos_id,
        decoder_start_id=start,
        vocab_size=network.target_vocab_size,
        max_target_tokens=network.max_target_positions,
        num_forced=speech.num_forced,
    )
    converted = convert(settings.fields, target, path / settings.origin)
    return ForeignGeneration(
        template=template,
        languages=speech.languages,
        defaults=converted.defaults,
        padding=converted.padding,
        notes=[_around(folder, template, network.eos_id), *speech.notes],
        fields=[*converted.notes, *settings.notes],
    )


def _checked(folder: Folder) -> Speech:
    """Return what is said to a model, within the bounds that checkpoints have.

    Raises:
        ForeignError: If it is not, or contradicts itself.
    """
    try:
        speech = read_speech(folder)
        for kind, value in ((Template, speech.template), (Languages, speech.languages)):
            if value is not None:
                msgspec.convert(msgspec.to_builtins(value), kind)
    except ForeignError:
        raise
    except ValueError as error:
        raise ForeignError(f"{folder.path}: {error}") from error
    return speech


def _around(folder: Folder, template: Template, eos_id: int) -> str:
    """Return a sentence on the tokens around every text."""
    names = {token_id: name for name, token_id in folder.token_ids.items()}
    said = around(template, None, None, eos_id)
    before, after = (
        " ".join(names.get(token_id, f"token {token_id}") for token_id in ids) for ids in (said.source_prefix, said.source_suffix)
    )
    return f"around every text: {before} TEXT {after}".replace(":  ", ": ")


def _started(folder: Folder, speech: Speech, start: int) -> Template:
    """Return the template with the start token that `generate` takes, where that is not the network's.

    Raises:
        ForeignError: If it is no token.
    """
    stated = folder.generation.get("decoder_start_token_id")
    if stated is None or stated == start:
        return speech.template
    if not is_token(stated, folder.target_vocab_size):
        raise ForeignError(f"{folder.path}: decoder_start_token_id {shown(stated)} is no token of the {folder.target_vocab_size}")
    return msgspec.structs.replace(speech.template, decoder_start_id=stated)
