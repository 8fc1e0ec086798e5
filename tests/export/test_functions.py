"""Recorded functions compute what PyTorch computes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dragoman.export.recording import Recorder
from dragoman.export.session import open_session
from dragoman.export.tracing import trace, write

Function = Callable[[Tensor, Tensor], Tensor]


class Calls(nn.Module):
    """A graph module that calls one function of x `[B, S]` and y `[B, 3]`, whole numbers."""

    input_names, output_names = ["x", "y"], ["z"]

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        return [self.function(x, y)]

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        return {"x": recorder.input("x", ("B", "S")), "y": recorder.input("y", ("B", 3))}


@pytest.mark.parametrize("size", [0, 1, 4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat((x, y), 1),
        lambda x, y: torch.cat((y, x, y), -1),
        lambda x, y: torch.cat((y, y)),
        lambda x, y: torch.cat((x, y), 1).clamp(2, 5),
        lambda x, y: torch.cat((x, y), 1).scatter(1, y.clamp(0, 2), y + 7),
        *(lambda x, y, place=place: torch.cat((x, y), 1).unsqueeze(place).clamp(2, 5) for place in (-3, -2, -1, 0, 1, 2)),
    ],
    ids=["cat", "cat three", "cat rows", "clamp", "scatter", *(f"unsqueeze {place}" for place in (-3, -2, -1, 0, 1, 2))],
)
def test_whole_numbers_are_put_together_and_in_places(function: Function, size: int, tmp_path: Path) -> None:
    model = trace(Calls(function))
    write(model, tmp_path / "graph.onnx", "graph.weights")
    random = np.random.default_rng(size)
    x = random.integers(0, 9, (3, size))
    y = np.stack([random.permutation(3) for _ in range(3)])  # places that differ within a row
    (found,) = open_session(tmp_path / "graph.onnx", 1).run(None, {"x": x, "y": y})
    np.testing.assert_array_equal(found, function(torch.tensor(x), torch.tensor(y)).numpy())
    shape = model.graph.outputs[0].shape
    assert shape is not None and len(shape) == found.ndim
    assert all(size == (3 if str(dim) == "B" else dim) for dim, size in zip(shape, found.shape, strict=True) if str(dim) in "B123")
