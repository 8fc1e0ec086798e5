"""Attention of a checkpoint, in PyTorch: every head of every layer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.attention.maps import Kind, Look, Map, Part, Room, token
from dragoman.model.attention_maps import AttentionMaps, answer, attention_maps, fed
from dragoman.model.attention_maps import target as ids_of_target
from dragoman.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from dragoman.model.text.tokenizer import Tokenizer


def look_into(
    directory: Path,
    source: str,
    target: str | None,
    room: Room,
    *,
    kinds: Sequence[Kind] = (),
    layer: int | None = None,
    max_new_tokens: int | None = None,
    languages: tuple[str, str] = ("", ""),
) -> Look:
    """Look at a checkpoint that translates a source, or goes on with it.

    Args:
        directory: The checkpoint.
        source: The text.
        target: What it is to say; None for its greedy answer.
        room: What can be drawn.
        kinds: Those to show; all where it is empty.
        layer: The only one to show; None for all.
        max_new_tokens: Tokens of a greedy answer at the most; None for as many as can be drawn.
        languages: Of source and target, by any of their names; empty for the model's defaults.

    Raises:
        InputError: If there is too much of something, too little, or the model has no attention.
    """
    checkpoint = Checkpoint.load(directory)
    of = fed(checkpoint, source, *languages)
    room.check_tokens("source", len(of.source))
    notes = []
    if target is None:
        said = answer(checkpoint, of, min(room.max_tokens, max_new_tokens or room.max_tokens))
        if said[-1] != checkpoint.model.config.eos_id:
            notes.append(f"The answer did not end within {len(said)} tokens; it is cut there.")
    else:
        said = ids_of_target(checkpoint, of, target)
    room.check_tokens("target", len(said))
    seen = attention_maps(checkpoint.model, of, said)
    room.check_tokens("source and target together" if len(seen.read) > len(said) else "target", len(seen.read))
    sides = checkpoint.tokenizers
    encoded = _shown(seen.source, sides.source, checkpoint)
    read = _shown(seen.read, sides.target, checkpoint)
    said_tokens = _shown(seen.said, sides.target, checkpoint)
    axes = {Kind.ENCODER: (encoded, encoded), Kind.DECODER: (read, read), Kind.CROSS: (said_tokens, encoded)}
    text = sides.target.decode(said) if target is None else target
    outline = Look(checkpoint.name, source, text, tuple(_outline(kind, axes[kind], seen) for kind in Kind if kind in seen.maps))
    wanted = outline.only(kinds, layer)
    room.check(wanted)  # before a large model's weights become numbers of Python's
    return replace(wanted, parts=tuple(_filled(part, seen) for part in wanted.parts), notes=tuple(notes))


def _outline(kind: Kind, axes: tuple[tuple[str, ...], tuple[str, ...]], seen: AttentionMaps) -> Part:
    """Return all maps of a kind without their weights."""
    num_layers, num_heads = seen.maps[kind].shape[:2]
    return Part(kind, *axes, tuple(Map((), layer, head) for layer in range(num_layers) for head in range(num_heads)))


def _filled(part: Part, seen: AttentionMaps) -> Part:
    """Return the same maps with their weights."""
    table = seen.maps[part.kind]
    return replace(part, maps=tuple(replace(drawn, weights=table[drawn.layer, drawn.head].tolist()) for drawn in part.maps))


def _shown(ids: list[int], tokenizer: "Tokenizer", checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return tokens as they are shown; special ones have names, those that the model has none for their numbers."""
    config = checkpoint.model.config
    names = {config.pad_id: "pad", config.decoder_start_id: "start", config.eos_id: "eos"}
    return tuple(token(tokenizer.token_bytes(number), names.get(number, str(number))) for number in ids)
