"""Which token tables a foreign model has: what is shared and tied is read off the tensors, whatever the flags say."""

from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.report import Report
from dragoman.model.importers.weights import Weights


@dataclass(frozen=True, slots=True)
class TableNames:
    """The names that a family's files have for token tables.

    Attributes:
        shared: Of the table of both sides.
        encoder: Of the encoder's own.
        decoder: Of the decoder's own.
        head: Of the output projection's.
    """

    shared: str
    encoder: str
    decoder: str
    head: str


@dataclass(frozen=True, slots=True)
class Tables:
    """Which tensor each side reads; two that are equal are one.

    Attributes:
        encoder: Name of the encoder's.
        decoder: Name of the decoder's.
        head: Name of the output projection's.
    """

    encoder: str
    decoder: str
    head: str


def choose_tables(
    names: TableNames,
    weights: Weights,
    report: Report,
    *,
    is_tied: bool,
    are_sides_shared: bool = True,
    is_head_required: bool = True,
) -> Tables:
    """Choose them.

    Args:
        names: What they are called.
        weights: The tensors.
        report: Told where tensors and flags disagree.
        is_tied: What the configuration says of the projection.
        are_sides_shared: What it says of the two sides, where it does.
        is_head_required: Whether a projection that is said to be of its own must be there.

    Raises:
        ForeignError: If there is none for a side, or none that the configuration says is of its own.
    """
    shared = [names.shared] * are_sides_shared
    encoder = _first(weights, [names.encoder, *shared, *[names.decoder, names.head] * (is_tied and are_sides_shared)])
    decoder = _first(weights, [names.decoder, *shared, *[names.encoder] * (is_tied and are_sides_shared), *[names.head] * is_tied])
    if not is_tied and is_head_required and names.head not in weights:
        raise ForeignError(
            f"{weights.path}: {names.head} is missing, though config.json says that it is a table of its own (tie_word_embeddings)"
        )
    head = _first(weights, [names.head, decoder])
    chosen = _merged(weights, encoder, decoder, head)
    _tell(names, weights, chosen, report, is_tied)
    for name in (names.shared, names.encoder, names.decoder, names.head):
        if name in weights and name not in (chosen.encoder, chosen.decoder, chosen.head):
            if name == names.shared and not any(weights.are_equal(name, kept) for kept in {chosen.encoder, chosen.decoder}):
                report.ignored.append(f"{weights.path.name}: {name}: both sides have tables of their own")
            weights.pass_over(name)
    return chosen


def _first(weights: Weights, names: Sequence[str]) -> str:
    for name in names:
        if name in weights:
            return name
    raise ForeignError(f"{weights.path}: {names[0]} is missing")


def _merged(weights: Weights, encoder: str, decoder: str, head: str) -> Tables:
    """Give tensors that are equal one name."""
    if weights.are_equal(head, decoder):
        head = decoder
    if weights.are_equal(encoder, decoder):
        encoder = decoder
    return Tables(encoder, decoder, head)


def _tell(names: TableNames, weights: Weights, chosen: Tables, report: Report, is_tied: bool) -> None:
    is_really = chosen.head == chosen.decoder
    if is_tied and not is_really:
        report.translated.append(
            f"config.json says that the output projection is tied to the token table, but {chosen.head} and {chosen.decoder} "
            "differ: they stay two"
        )
    if not is_tied and is_really:
        how = "there is no projection of its own" if names.head not in weights else "the tensors are equal"
        report.translated.append(
            f"config.json says that the output projection is not tied to the token table, but {how}: they are one"
        )
    shared = "one token table for both sides" if chosen.encoder == chosen.decoder else "a token table for each side"
    report.translated.append(f"{shared}, the output projection {'is the decoder’s' if is_really else 'has its own weights'}")
