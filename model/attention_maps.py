"""Every head's attention of one checkpoint, source and target: what is fed to the network, and what it is asked to tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import Start, greedy_search
from dragoman.model.errors import InputError
from dragoman.model.generation import Language, Languages, LanguageTable, around
from dragoman.model.networks.network import Network


@dataclass(frozen=True, slots=True)
class Fed:
    """A source as a network takes it."""

    source: list[int]  # ids that are encoded
    first: int  # first decoder token
    forced: list[int]  # tokens at the start of every answer


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """See the module."""

    source: list[int]  # ids that are encoded
    read: list[int]  # ids among which the decoder's self-attention is: those that it reads, after the prompt where there is one
    said: list[int]  # ids that the decoder's steps say, one each: the target, as a rule with end-of-sequence
    # Of the network, see `Observation.maps`: `encoder` from source to source, `decoder` from what is read to that, `cross` from
    # tokens around the source.
    maps: Mapping[str, Tensor]


def fed(checkpoint: Checkpoint, text: str, source_language: str = "", target_language: str = "") -> Fed:
    """Return what is fed for a text, with all that its model is told around it.

    Raises:
        InputError: If the text is empty where there must be some, is longer than the model takes, or a language is none of the
            model's.
    """
    languages = checkpoint.languages or Languages()
    source_side = _language("--from", source_language, languages.source, languages.default_source)
    target_side = _language("--to", target_language, languages.target, languages.default_target)
    model, config = checkpoint.model, checkpoint.model.config
    try:
        task = checkpoint.template.task_text(source_side, target_side)
    except ValueError as error:
        raise InputError(f"{checkpoint.name}: {error}: --from and --to name them") from error
    tokenizers = checkpoint.tokenizers
    has_special = checkpoint.defaults.special_tokens_in_text and tokenizers.special_tokens
    ids = (tokenizers.encode_with_special_tokens if has_special else tokenizers.source.encode)(task + text)
    source, first = model.prompt(ids)
    if not text and config.has_source:
        raise InputError("source: is empty")
    said = around(checkpoint.template, source_side, target_side, config.eos_id)
    if said.source_prefix or said.source_suffix != [config.eos_id]:
        source = [*said.source_prefix, *ids, *said.source_suffix]
    first = first if said.decoder_start_id is None else said.decoder_start_id
    counted = "end-of-sequence" if config.has_source else "start token"
    num_tokens = len(source) + (not config.has_source)  # the end of a prompt is read first
    if num_tokens > config.max_source_positions:
        raise InputError(f"source: {num_tokens} tokens, {counted} included, where the model takes {config.max_source_positions}")
    return Fed(source, first, said.target_prefix)


def answer(checkpoint: Checkpoint, of: Fed, max_new_tokens: int) -> list[int]:
    """Return the ids that greedy search says, forced ones and end-of-sequence included; the latter is missing from a cut answer."""
    model = checkpoint.model
    wanted = Start(forced=[of.forced], decoder_start_id=of.first, is_complete=True)
    found = greedy_search(model, [of.source], max_new_tokens, wanted)[0]
    has_ended = len(found.log_probs) > len(found.ids)
    return [*of.forced, *found.ids, *([model.config.eos_id] if has_ended else [])]


def target(checkpoint: Checkpoint, of: Fed, text: str) -> list[int]:
    """Return the ids of a target that is given, forced ones and end-of-sequence included.

    Raises:
        InputError: If the model's decoder does not take as many.
    """
    said = [*of.forced, *checkpoint.tokenizers.target.encode(text), checkpoint.model.config.eos_id]
    if len(said) > (limit := checkpoint.model.config.room_after(len(of.source))):
        raise InputError(f"target: {len(said)} tokens, end-of-sequence included, where the model takes {limit} after this source")
    return said


@torch.inference_mode()
def attention_maps(model: Network, of: Fed, said: Sequence[int]) -> AttentionMaps:
    """Look at a network that says a target.

    Args:
        model: In evaluation mode.
        of: The source.
        said: What `answer` or `target` gave.

    Raises:
        InputError: If there is no attention in it.
    """
    inputs = [of.first, *said[:-1]]
    maps = model.observe(of.source, inputs, has_maps=True).maps
    if not maps:
        raise InputError("the model has no attention to look at: its decoder knows of the source the encoder's last state alone")
    read = [*of.source, *inputs]
    length = maps["decoder"].shape[-1] if "decoder" in maps else len(inputs)
    return AttentionMaps(of.source, read[len(read) - length :], list(said), maps)


def _language(flag: str, asked: str, choice: Sequence[Language], default: str) -> Language | None:
    """Return one side's language, None where the model is told none."""
    table = LanguageTable(choice, default)
    if not asked:
        return table.default
    if (found := table.find(asked)) is None:
        raise InputError(f"{flag}: {asked!r} is no language of the model's; it has {', '.join(x.code for x in choice) or 'none'}")
    return found
