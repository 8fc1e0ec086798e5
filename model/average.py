"""The mean of several checkpoints of one model, for example of its training's stages ("model soups", Wortsman et al., 2022)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dragoman.model.checkpoint import Checkpoint, CheckpointError


def average_checkpoints(directories: Sequence[Path]) -> Checkpoint:
    """Load checkpoints and return the first with the mean of all their parameters, summed in float64.

    Args:
        directories: One or more; a directory named twice counts twice.

    Raises:
        CheckpointError: If one cannot be read, or differs from the first in its model (dropouts aside) or its vocabulary; their
            parameters would not mean the same.
    """
    checkpoints = [Checkpoint.load(directory) for directory in directories]
    first = checkpoints[0]
    for directory, checkpoint in zip(directories, checkpoints, strict=True):
        if fields := first.model.config.differences(checkpoint.model.config):
            raise CheckpointError(f"{directory}: its {', '.join(fields)} differ from those of {directories[0]}")
        if first.tokenizer.encoder.to_str() != checkpoint.tokenizer.encoder.to_str():
            raise CheckpointError(f"{directory}: its vocabulary differs from that of {directories[0]}")
    parameters = [dict(checkpoint.model.named_parameters()) for checkpoint in checkpoints]  # a shared table comes once
    with torch.no_grad():
        means = {name: torch.stack([each[name].double() for each in parameters]).mean(0) for name in parameters[0]}
        for name, mean in means.items():
            parameters[0][name].copy_(mean)
    return first
