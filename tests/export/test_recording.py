"""Recorded functions and loops compute PyTorch's results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from onnx_ir.traversal import RecursiveGraphIterator
from torch import Tensor, nn

from dragoman.export.recording import Recorder
from dragoman.export.scan import scan
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


B, T, D = 3, 5, 4


class Loop(nn.Module):
    """Two states that are updated with a sequence and with what lies outside of the loop."""

    input_names = ["x", "first", "second", "outside"]  # noqa: RUF012
    output_names = ["sums", "doubled"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def step(self, states: list[Tensor], read: list[Tensor], outside: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        moved = torch.tanh(self.linear(states[0]) + read[0] * torch.sigmoid(outside))
        return [moved, states[1] + moved], [states[1] * moved, read[0] + read[0]]

    def forward(self, x: Tensor, first: Tensor, second: Tensor, outside: Tensor) -> list[Tensor]:
        results: list[Tensor] = scan(lambda states, read: self.step(states, read, outside), [first, second], [x])
        return results

    def eager(self, x: Tensor, first: Tensor, second: Tensor, outside: Tensor) -> list[Tensor]:
        states, rows = [first, second], []
        for position in range(x.shape[1]):
            states, results = self.step(states, [x[:, position]], outside)
            rows.append(results)
        return [torch.stack(column, 1) for column in zip(*rows, strict=True)]

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        axes = {"x": ("B", "T", D), "first": ("B", D), "second": ("B", D), "outside": ("B", D)}
        return {name: recorder.input(name, shape, torch.float32) for name, shape in axes.items()}


def test_loop_gives_what_pytorch_s_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Loop()
    onnx_ir.save(trace(module), tmp_path / "loop.onnx")
    session = open_session(tmp_path / "loop.onnx", 1)
    assert [value.shape for value in session.get_outputs()] == [["B", "T", D], ["B", "T", D]]
    for length in (1, T):
        inputs = torch.randn(B, length, D), *torch.randn(3, B, D)
        feeds = {name: value.numpy() for name, value in zip(module.input_names, inputs, strict=True)}
        for found, expected in zip(session.run(None, feeds), module.eager(*inputs), strict=True):
            np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-6)


def test_constant_values_are_computed_before_the_loop() -> None:
    graph = trace(Loop()).graph
    assert [node.op_type for node in graph] == ["Sigmoid", "Scan"]
    body = next(node for node in graph if node.op_type == "Scan").attributes["body"].as_graph()
    assert "Sigmoid" not in [node.op_type for node in body] and not body.initializers
    assert {value.name for value in graph.initializers.values()} == {"linear.weight", "linear.bias"}
    assert len({node.name for node in RecursiveGraphIterator(graph)}) == 2 + sum(1 for _ in body)
