"""Batches of parallel text, padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman.model.config import ModelConfig
from dragoman.model.ids import Ids
from dragoman.model.padding import pad


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded training pairs."""

    source_ids: Tensor  # `[B, S]`, each row ending in end-of-sequence; S is 0 for a language model, which reads targets alone
    source_lengths: Tensor  # `[B]`
    target_ids: Tensor  # `[B, T]`, start token first: what the decoder reads
    labels: Tensor  # `[B, T]`, end-of-sequence last: what it should say
    num_target_tokens: int  # labels that are not padding

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return Batch(
            source_ids=self.source_ids.to(device, non_blocking=True),
            source_lengths=self.source_lengths.to(device, non_blocking=True),
            target_ids=self.target_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            num_target_tokens=self.num_target_tokens,
        )

    def repeated(self, count: int) -> "Batch":
        """Return the rows `count` times over."""
        return Batch(
            source_ids=self.source_ids.repeat(count, 1),
            source_lengths=self.source_lengths.repeat(count),
            target_ids=self.target_ids.repeat(count, 1),
            labels=self.labels.repeat(count, 1),
            num_target_tokens=self.num_target_tokens * count,
        )


def collate(sources: Sequence[Ids], targets: Sequence[Ids], config: ModelConfig) -> Batch:
    """Build a batch from ids without special tokens."""
    source_rows = [[*ids, config.eos_id] for ids in sources] if config.has_source else list(sources)
    return Batch(
        source_ids=pad(source_rows, config.pad_id),
        source_lengths=torch.tensor([len(row) for row in source_rows]),
        target_ids=pad([[config.decoder_start_id, *ids] for ids in targets], config.pad_id),
        labels=pad([[*ids, config.eos_id] for ids in targets], config.pad_id),
        num_target_tokens=sum(len(ids) + 1 for ids in targets),
    )
