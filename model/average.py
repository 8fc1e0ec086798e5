"""The mean of several checkpoints of one model, for example of its training's stages ("model soups", Wortsman et al., 2022)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.checkpoint_folder import CheckpointFolder


def average_checkpoints(directories: Sequence[Path]) -> Checkpoint:
    """Load checkpoints and return the first with the mean of all their parameters, summed in float64.

    Args:
        directories: One or more; a directory named twice counts twice.

    Raises:
        CheckpointError: If one cannot be read, or differs from the first in its model (dropouts aside) or its vocabulary; their
            parameters would not mean the same.
    """
    folders = [CheckpointFolder.load(directory) for directory in directories]
    for folder in folders[1:]:
        folders[0].refuse_other_model(folder)
    checkpoints = [Checkpoint.load(directory) for directory in directories]
    parameters = [dict(checkpoint.model.named_parameters()) for checkpoint in checkpoints]  # a shared table comes once
    with torch.no_grad():
        means = {name: torch.stack([each[name].double() for each in parameters]).mean(0) for name in parameters[0]}
        for name, mean in means.items():
            parameters[0][name].copy_(mean)
    return checkpoints[0]
