"""Attention as it is drawn: maps of weights with tokens on their axes, wherever they come from. Plain data: no torch, no NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from dragoman.model.errors import InputError


class Kind(StrEnum):
    """Direction of attention; see `MEANINGS`."""

    ENCODER = "encoder"
    DECODER = "decoder"
    CROSS = "cross"


NAMES: Final[dict[Kind, str]] = {
    Kind.ENCODER: "Encoder self-attention",
    Kind.DECODER: "Decoder self-attention",
    Kind.CROSS: "Cross-attention",
}
MEANINGS: Final[dict[Kind, str]] = {
    Kind.ENCODER: "A row is a token of the source, and tells how much it takes from each token of the source.",
    Kind.DECODER: "A row is a token that the decoder reads, and tells how much it takes from itself and each token before it.",
    Kind.CROSS: "A row is a token that the decoder says, and tells how much its step takes from each token of the source.",
}


@dataclass(frozen=True, slots=True)
class Map:
    """The weights of one head."""

    # A row for each token that looks, with a weight for each that is looked at; each row sums to 1.
    weights: Sequence[Sequence[float]]
    layer: int | None  # from 0; None for the mean of all layers
    head: int | None  # from 0; None for the mean of all heads

    @property
    def layer_name(self) -> str:
        """Name of its layer."""
        return "mean of all layers" if self.layer is None else f"layer {self.layer}"

    @property
    def head_name(self) -> str:
        """Name of its head."""
        return "mean of all heads" if self.head is None else f"head {self.head}"


@dataclass(frozen=True, slots=True)
class Part:
    """All maps of one kind."""

    kind: Kind  # direction of attention
    rows: tuple[str, ...]  # the tokens that look, as they are shown
    columns: tuple[str, ...]  # the tokens that are looked at
    maps: tuple[Map, ...]  # layer by layer, and in each head by head

    def layers(self) -> list[tuple[Map, ...]]:
        """Return the maps of each layer."""
        order = dict.fromkeys(drawn.layer for drawn in self.maps)
        return [tuple(drawn for drawn in self.maps if drawn.layer == layer) for layer in order]

    @property
    def num_weights(self) -> int:
        """Cells of all maps together."""
        return len(self.maps) * len(self.rows) * len(self.columns)


@dataclass(frozen=True, slots=True)
class Look:
    """Attention weights of a model for a source and a target."""

    model: str  # its name
    source: str  # the text
    target: str  # its answer, or what was given for it
    parts: tuple[Part, ...]  # the attention, kind by kind
    notes: tuple[str, ...] = ()  # notes for the reader, in sentences

    @property
    def num_maps(self) -> int:
        """Heads of all kinds and layers."""
        return sum(len(part.maps) for part in self.parts)

    def only(self, kinds: Sequence[Kind] = (), layer: int | None = None) -> "Look":
        """Return what is asked for of it.

        Args:
            kinds: Those to keep; all where it is empty.
            layer: The one to keep; None for all.

        Raises:
            InputError: If the model has no such attention.
        """
        has = [part.kind for part in self.parts]
        for kind in kinds:
            if kind not in has:
                raise InputError(f"--kind {kind}: model {self.model} has no {NAMES[kind].lower()}, only {', '.join(has)}")
        parts = [part for part in self.parts if not kinds or part.kind in kinds]
        if layer is not None:
            known = sorted({drawn.layer for part in parts for drawn in part.maps if drawn.layer is not None})
            if layer not in known:
                raise InputError(f"--layer {layer}: model {self.model} has the layers {known[0]} to {known[-1]}")
            kept = ((part, tuple(drawn for drawn in part.maps if drawn.layer == layer)) for part in parts)
            parts = [replace(part, maps=maps) for part, maps in kept if maps]
        return replace(self, parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class Room:
    """Limits of a drawing."""

    drawing: str  # name of the drawing
    max_tokens: int  # of one axis
    max_maps: int  # heads
    max_weights: int  # cells of all maps together

    def check_tokens(self, side: str, count: int) -> None:
        """Refuse an axis that is too long; the side is that of the pair.

        Raises:
            InputError: Naming the side and the limit.
        """
        if count > self.max_tokens:
            raise InputError(f"{side}: {count} tokens; {self.drawing} shows {self.max_tokens} at most")

    def check(self, look: Look) -> None:
        """Refuse what does not fit.

        Raises:
            InputError: Naming the limit, and the options that choose less.
        """
        advice = "--kind and --layer choose less"
        if look.num_maps > self.max_maps:
            raise InputError(f"{look.num_maps} heads; {self.drawing} shows {self.max_maps} at most: {advice}")
        num_weights = sum(part.num_weights for part in look.parts)
        if num_weights > self.max_weights:
            raise InputError(f"{num_weights} weights; {self.drawing} shows {self.max_weights} at most: {advice}")


PAGE_ROOM: Final = Room("a page", max_tokens=256, max_maps=1536, max_weights=2_000_000)
PICTURE_ROOM: Final = Room("a picture", max_tokens=64, max_maps=256, max_weights=1_000_000)
