"""Slots of caches of every kind, in a decode step that does nothing but tell what it was given."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from dragoman.export.caches import Cache, attention_caches
from dragoman.export.running import OnnxSlots
from dragoman.export.session import Session

RNN = [
    Cache("state_even_0", "self", [3]),
    Cache("state_odd_0", "self", [3]),
    Cache("start_0", "cross", [3]),
    Cache("keys", "cross", ["S", 2]),
]
TEXT = [cache for cache in attention_caches(1, 2, 4) if cache.role == "self"]


def echo(caches: list[Cache]) -> Session:
    """Return a step that gives a row's previous token and writes 1 more than they were into all its own caches."""
    nodes = [
        helper.make_node("Unsqueeze", ["prev_ids", "axis"], ["candidate_ids"]),
        helper.make_node("Cast", ["candidate_ids"], ["candidate_log_probs"], to=TensorProto.FLOAT),
        *(helper.make_node("Add", [c.name, "one"], [f"{c.name}_out"]) for c in caches if c.role == "self"),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["N"]) for name in ("prev_ids", "positions", "src_lens")]
    inputs.append(helper.make_tensor_value_info("num_candidates", TensorProto.INT64, [1]))
    inputs += [helper.make_tensor_value_info(c.name, TensorProto.FLOAT, ["N", *c.shape]) for c in caches]
    outputs = [
        helper.make_tensor_value_info("candidate_ids", TensorProto.INT64, ["N", 1]),
        helper.make_tensor_value_info("candidate_log_probs", TensorProto.FLOAT, ["N", 1]),
        *(helper.make_tensor_value_info(f"{c.name}_out", TensorProto.FLOAT, ["N", *c.shape]) for c in caches if c.role == "self"),
    ]
    constants = [helper.make_tensor("axis", TensorProto.INT64, [1], [1]), helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])]
    graph = helper.make_graph(nodes, "echo", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return Session(model.SerializeToString(), providers=["CPUExecutionProvider"])


def numbers(*shape: int, first: float = 100.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return first + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_buffers_have_the_room_that_their_axes_say_and_hold_the_same_noise_every_time() -> None:
    slots, again = (OnnxSlots(echo(RNN), RNN, 4, 9, 5) for _ in range(2))
    shapes = {"state_even_0": (4, 3), "state_odd_0": (4, 3), "start_0": (4, 3), "keys": (4, 5, 2)}
    assert {name: buffer.shape for name, buffer in slots.buffers.items()} == shapes
    for name, buffer in slots.buffers.items():
        assert len(np.unique(buffer)) == buffer.size and (buffer == again.buffers[name]).all()


def test_source_fills_the_caches_that_the_encoder_gives_up_to_its_end() -> None:
    slots = OnnxSlots(echo(RNN), RNN, 3, 9, 5)
    before = {name: buffer.copy() for name, buffer in slots.buffers.items()}
    slots.fill(1, [numbers(3), numbers(2, 2)])
    assert slots.buffers["start_0"][1].tolist() == [100, 101, 102]
    assert slots.buffers["keys"][1, :2].tolist() == [[100, 101], [102, 103]]
    assert (slots.buffers["keys"][1, 2:] == before["keys"][1, 2:]).all(), "what is beyond a source stays noise"
    for name in before:
        assert (slots.buffers[name][[0, 2]] == before[name][[0, 2]]).all(), "other rows are left alone"
        assert name in ("start_0", "keys") or (slots.buffers[name] == before[name]).all()
    slots.restore(0, [numbers(3), numbers(3, first=200)])
    assert [slots.buffers[name][0].tolist() for name in ("state_even_0", "state_odd_0")] == [[100, 101, 102], [200, 201, 202]]
    assert (slots.buffers["start_0"][0] == before["start_0"][0]).all()


def test_prompt_fills_the_caches_that_steps_write() -> None:
    slots = OnnxSlots(echo(TEXT), TEXT, 2, 6, 0, has_prompts=True)
    before = slots.buffers["self_v_0"].copy()
    slots.fill(1, [numbers(2, 3, 4), numbers(2, 3, 4, first=500)])
    assert (slots.buffers["self_v_0"][1, :, :3] == numbers(2, 3, 4, first=500)).all()
    assert (slots.buffers["self_v_0"][1, :, 3:] == before[1, :, 3:]).all()
    slots.fill(0, [numbers(2, 0, 4), numbers(2, 0, 4)])
    assert (slots.buffers["self_v_0"][0] == before[0]).all(), "there is nothing of an empty prompt"


@pytest.mark.parametrize("caches", [RNN, TEXT], ids=["states", "text"])
def test_step_writes_first_rows_in_place_and_moves_take_all_caches(caches: list[Cache]) -> None:
    slots = OnnxSlots(echo(caches), caches, 3, 4, 5, has_prompts=caches is TEXT)
    before = {name: buffer.copy() for name, buffer in slots.buffers.items()}
    rows = np.array([7, 8])
    ids, log_probs = slots.step(rows, np.zeros(2, np.int64), np.ones(2, np.int64), 1)
    assert ids.tolist() == log_probs.tolist() == [[7], [8]]
    for cache in caches:
        buffer, was = slots.buffers[cache.name], before[cache.name]
        np.testing.assert_array_equal(buffer[:2], was[:2] + 1 if cache.role == "self" else was[:2])
        np.testing.assert_array_equal(buffer[2], was[2])
    slots.move(0, 2)
    assert all((buffer[2] == buffer[0]).all() for buffer in slots.buffers.values())
