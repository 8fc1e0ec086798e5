"""What the graphs of one kind have in common, whatever the architecture: names, inputs, and how a step's candidates are chosen."""

from typing import Any

import torch
from torch import Tensor

from dragoman.export.recording import Recorder, write_node
from dragoman.export.tensor_names import TensorNames

PAIR_AXES = {"src_ids": ("B", "S"), "src_lens": ("B",), "tgt_ids": ("B", "T"), "tgt_lens": ("B",), "labels": ("B", "T")}


class Encoding:
    """A graph that reads sources."""

    tensors: TensorNames  # names of the inputs and outputs of all graphs of its model

    @property
    def input_names(self) -> list[str]:
        """Names of the graph's inputs."""
        return self.tensors.encoder_inputs

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs."""
        return self.tensors.encoder_outputs


class Stepping:
    """A graph that decodes one token for each of N rows."""

    tensors: TensorNames  # names of the inputs and outputs of all graphs of its model
    shortlist: Tensor | None  # ids that candidates are of, rising; None for all

    @property
    def input_names(self) -> list[str]:
        """Names of the graph's inputs."""
        return self.tensors.decoder_inputs

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs."""
        return self.tensors.decoder_outputs

    def rows(self, recorder: Recorder) -> dict[str, Any]:
        """Add the inputs that come before the caches."""
        vectors = {name: recorder.input(name, ("N",)) for name in ("prev_ids", "positions", "src_lens")}
        return {**vectors, "num_candidates": recorder.input("num_candidates", (1,))}

    def likeliest(self, log_probs: Tensor, num_candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Choose from `[N, V]` the K likeliest ids, of equals the lower one first, and their log-probabilities, `[N, K]` each."""
        shape = log_probs.shape[0], "K"
        values, ids = write_node("TopK", (log_probs, num_candidates), (shape, shape), (torch.float32, torch.int64), axis=-1)
        if self.shortlist is not None:
            (ids,) = write_node("Gather", (self.shortlist, ids), (shape,), (torch.int64,))
        return ids, values


class Scoring:
    """A graph that scores right-padded pairs."""

    tensors: TensorNames  # names of the inputs and outputs of all graphs of its model

    @property
    def input_names(self) -> list[str]:
        """Names of the graph's inputs."""
        return self.tensors.scorer_inputs

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs."""
        return self.tensors.scorer_outputs

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        """Add the graph's inputs; return them as `forward` takes them."""
        return {name: recorder.input(name, PAIR_AXES[name]) for name in self.input_names}
