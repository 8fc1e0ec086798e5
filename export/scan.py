"""A loop in a graph: one ONNX Scan over the positions of a sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir

from dragoman.export.recording import Dim, Recorded, Size

POSITION_AXIS = 1
Step = Callable[[list[Any], list[Any]], tuple[Sequence[Any], Sequence[Any]]]


def scan(step: Step, states: Sequence[Any], sequences: Sequence[Any]) -> list[Any]:
    """Run a step at one position after the other.

    Args:
        step: Takes states, and what each sequence has at a position, `[B, …]`; gives the states after it, and results. It may read
            whatever lies outside; what does not depend on the position is computed once, before the loop.
        states: Before the first position, recorded tensors though the graph modules take them for tensors, as the sequences.
        sequences: `[B, T, …]`, at least one.

    Returns:
        The results of all positions, `[B, T, …]` each.
    """
    recorder = sequences[0].recorder
    with recorder.body("step") as body:
        before = [_input(body, f"state.{place}", state, state.shape) for place, state in enumerate(states)]
        read = [_input(body, f"read.{place}", x, _without_positions(x)) for place, x in enumerate(sequences)]
        after, results = step(before, read)
    body.outputs.extend(x.value for x in (*after, *results))
    assert all(value.graph is body and not value.is_graph_input() for value in body.outputs), "a step computes what it gives"
    attributes = {
        "body": body,
        "num_scan_inputs": len(sequences),
        "scan_input_axes": [POSITION_AXIS] * len(sequences),
        "scan_output_axes": [POSITION_AXIS] * len(results),
    }
    values = recorder.emit("Scan", [*states, *sequences], len(body.outputs), **attributes)
    num_positions = sequences[0].shape[POSITION_AXIS]
    return [
        Recorded(recorder, value, [*map(_name, (x.shape[0], num_positions, *x.shape[1:]))], x.dtype)
        for value, x in zip(values[len(states) :], results, strict=True)
    ]


def _input(body: onnx_ir.Graph, name: str, x: Recorded, shape: Sequence[Dim]) -> Recorded:
    """Add an input to a body."""
    value = onnx_ir.Value(name=f"{body.name}.{name}", type=x.value.type)
    body.inputs.append(value)
    return Recorded(x.recorder, value, [_name(dim) for dim in shape], x.dtype)


def _without_positions(x: Recorded) -> tuple[Dim, ...]:
    return (*x.shape[:POSITION_AXIS], *x.shape[POSITION_AXIS + 1 :])


def _name(dim: Dim) -> int | str:
    """Return a size, or the name of one that is known at run time only."""
    return dim.name if isinstance(dim, Size) else dim
