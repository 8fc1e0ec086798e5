"""Parallel text: reading it with errors that name file and line, and cutting it into batches in a repeatable order."""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import InputError

Ids = Sequence[int]


class DataError(InputError):
    """Text that cannot be used; the message names the file and, where there is one, the line."""


def read_lines(path: Path) -> list[str]:
    """Read a text file, one sentence a line, gunzipping `.gz`; only a line feed ends a line (a carriage return before it goes).

    Raises:
        DataError: If the file is missing, empty, not gzip though called so, or not UTF-8 (with the line number).
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:  # gzip's own error is an OSError too
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not content:
        raise DataError(f"{path}: the file is empty")
    lines = []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8: {error.reason} at byte {error.start}") from error
    return lines


def read_parallel(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Read two files whose lines correspond.

    Raises:
        DataError: As `read_lines`, or if the line counts differ, or a line is blank on one side (with its number).
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise DataError(f"{source} has {len(sources)} lines but {target} has {len(targets)}")
    for path, lines in ((source, sources), (target, targets)):
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                raise DataError(f"{path}, line {number}: the line is blank")
    return sources, targets


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded training pairs.

    Attributes:
        source_ids: `[B, S]`, each row ending in end-of-sequence.
        source_lengths: `[B]`.
        target_ids: `[B, T]`, start token first: what the decoder reads.
        labels: `[B, T]`, end-of-sequence last: what it should say.
        num_target_tokens: Labels that are not padding.
    """

    source_ids: Tensor
    source_lengths: Tensor
    target_ids: Tensor
    labels: Tensor
    num_target_tokens: int

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return Batch(
            source_ids=self.source_ids.to(device, non_blocking=True),
            source_lengths=self.source_lengths.to(device, non_blocking=True),
            target_ids=self.target_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            num_target_tokens=self.num_target_tokens,
        )


def pad(rows: Sequence[Ids], pad_id: int) -> Tensor:
    """Stack rows of different lengths into `[B, longest]`, filled up on the right."""
    table = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int64)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(table)


def collate(sources: Sequence[Ids], targets: Sequence[Ids], config: ModelConfig) -> Batch:
    """Build a batch from ids without special tokens."""
    source_rows = [[*ids, config.eos_id] for ids in sources]
    return Batch(
        source_ids=pad(source_rows, config.pad_id),
        source_lengths=torch.tensor([len(row) for row in source_rows]),
        target_ids=pad([[config.decoder_start_id, *ids] for ids in targets], config.pad_id),
        labels=pad([[*ids, config.eos_id] for ids in targets], config.pad_id),
        num_target_tokens=sum(len(ids) + 1 for ids in targets),
    )


def bucket(sources: Sequence[Ids], targets: Sequence[Ids], max_tokens: int, rng: np.random.Generator) -> list[npt.NDArray[np.intp]]:
    """Group pairs of similar length into batches of at most `max_tokens` and shuffle the batches.

    Args:
        sources: Ids without special tokens.
        targets: The same number of rows.
        max_tokens: Rows times the longer side, padding and special token included; a single longer pair is a batch of its own.
        rng: Decides which pairs of equal lengths meet, and the order of batches.

    Returns:
        Indices into `sources`, one array a batch; each pair exactly once.
    """
    source_lengths = np.array([len(ids) + 1 for ids in sources])
    target_lengths = np.array([len(ids) + 1 for ids in targets])
    order = rng.permutation(len(sources))
    order = order[np.lexsort((source_lengths[order], target_lengths[order]))]
    batches, start, longest = [], 0, 0
    for end, length in enumerate(np.maximum(source_lengths, target_lengths)[order]):
        longest = max(longest, length)
        if end > start and longest * (end + 1 - start) > max_tokens:
            batches.append(order[start:end])
            start, longest = end, length
    batches.append(order[start:])
    return [batches[i] for i in rng.permutation(len(batches))]
