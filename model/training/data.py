"""Batches of parallel text, padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman.model.config import ModelConfig
from dragoman.model.decode import pad


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
        tensors = self.source_ids, self.source_lengths, self.target_ids, self.labels
        moved = [tensor.to(device, non_blocking=True) for tensor in tensors]
        return Batch(moved[0], moved[1], moved[2], moved[3], self.num_target_tokens)

    def repeated(self, count: int) -> "Batch":
        """Return the rows `count` times over."""
        rows = [tensor.repeat(count, 1) for tensor in (self.source_ids, self.target_ids, self.labels)]
        return Batch(rows[0], self.source_lengths.repeat(count), rows[1], rows[2], self.num_target_tokens * count)


def collate(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], config: ModelConfig) -> Batch:
    """Build a batch from ids without special tokens."""
    source_rows = [[*ids, config.eos_id] for ids in sources] if config.has_source else list(sources)
    return Batch(
        source_ids=pad(source_rows, config.pad_id),
        source_lengths=torch.tensor([len(row) for row in source_rows]),
        target_ids=pad([[config.decoder_start_id, *ids] for ids in targets], config.pad_id),
        labels=pad([[*ids, config.eos_id] for ids in targets], config.pad_id),
        num_target_tokens=sum(len(ids) + 1 for ids in targets),
    )
