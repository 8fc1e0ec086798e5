"""Which new sources are encoded together: padding is work thrown away, but so is the fixed cost of one more encoder run."""

from dragoman.server.engine.sequence import Sequence

MAX_PADDING = 0.25
"""Longest share of its batch's length by which a source may be shorter than the longest in the batch."""


def group_by_length(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Cut sequences into batches of similar source length, longest first."""
    groups: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: -sequence.num_source_tokens):
        if not groups or sequence.num_source_tokens < (1 - MAX_PADDING) * groups[-1][0].num_source_tokens:
            groups.append([])
        groups[-1].append(sequence)
    return groups
