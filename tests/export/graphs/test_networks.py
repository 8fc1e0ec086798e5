"""Graphs of every family and architecture: they pass the gate, and keep the promises of a decode step that it does not compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx_ir.traversal import RecursiveGraphIterator

from dragoman.export.building import Recipe, build_graphs
from dragoman.export.progress import Progress, steps_of
from dragoman.export.proof.report import ParityReport
from dragoman.export.proof.sessions import OnnxRunner, OnnxSlots, bind_caches
from dragoman.export.tensors import output_name
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.text.tokenizers import Tokenizers
from tests.export.conftest import MakeCheckpoint
from tests.model.conftest import GPT, LLAMA
from tests.model.families import FAMILIES, random_pair

RNN: dict[str, Any] = {"architecture": "rnn", "d_model": 24, "is_embedding_shared": False, "has_output_bias": True}
DECODER: dict[str, Any] = {"architecture": "decoder", "d_model": 64, "decoder_ffn_dim": 80}
# Rows longer than 64 begin in the middle, in caches that the model says a step needs.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dot": ("int8", RNN | {"attention": "dot", "padding": "masked", "max_target_positions": 80}),
    "scaled_dot": ("fp32", RNN | {"attention": "scaled_dot", "d_model": 22, "is_projection_tied": False, "num_decoder_layers": 1}),
    "additive": ("fp32", RNN | {"attention": "additive", "attention_dim": 40, "is_embedding_scaled": False}),
    "none": ("int8", RNN | {"attention": "none", "target_vocab_size": 290, "num_encoder_layers": 1}),
    "llama": ("fp32", DECODER | LLAMA | {"max_target_positions": 100}),
    "gpt": ("int8", DECODER | GPT),
    "sinusoidal": ("fp32", DECODER | {"has_output_bias": True, "padding": "masked"}),
    "rotary-wide": ("int8", DECODER | {"positions": "rotary", "attention_dim": 128, "rotary_base": 500.0, "position_offset": 0}),
    "learned-offset": (
        "fp32",
        DECODER | {"positions": "learned", "position_offset": 2, "is_projection_tied": False, "has_embedding_norm": True},
    ),
}


class Built:
    """A checkpoint and its graphs."""

    def __init__(self, name: str, checkpoint: Checkpoint, directory: Path, precision: Any) -> None:
        self.name, self.checkpoint, self.directory = name, checkpoint, directory
        self.model, self.config = checkpoint.model, checkpoint.model.config
        self.graphs, self.report = build_graphs(
            checkpoint, directory, Recipe(precision), Progress(steps_of(precision, has_shortlist=False))
        )
        self.runner = OnnxRunner(directory, self.config, num_threads=1)
        self.is_text = self.runner.has_prompts

    def start(self, *sources: Sequence[int], spare: int = 0) -> OnnxSlots:
        """Return slots that hold sources."""
        longest = max(map(len, sources))
        slots = self.runner.slots(len(sources), 12 + longest * self.is_text + spare, longest + spare)
        for slot, given in enumerate(self.runner.encode([list(source) for source in sources])):
            slots.fill(slot, given)
        return slots

    def graph(self, name: str) -> onnx.GraphProto:
        return onnx.load(self.directory / f"{name}.onnx", load_external_data=False).graph


@pytest.fixture(scope="module")
def built(
    request: pytest.FixtureRequest,
    tokenizers: Tokenizers,
    make_checkpoint: MakeCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Built:
    name, folder = request.param, tmp_path_factory.mktemp("graphs")
    if name in FAMILIES:
        return Built(name, Checkpoint(name, random_pair(name)[1], tokenizers), folder, "fp32")
    precision, switches = KINDS[name]
    return Built(name, make_checkpoint(**switches), folder, precision)


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("built", names, indirect=True, scope="module")


of_all, of_kinds = of(*FAMILIES, *KINDS), of("marian", *KINDS)
of_texts = of(*(name for name, (_, switches) in KINDS.items() if switches["architecture"] == "decoder"))
of_single = of("marian", *(name for name, (precision, _) in KINDS.items() if precision == "fp32"))


def numbers(*lengths: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 280, length).tolist() for length in lengths]


def step(slots: OnnxSlots, ids: Any, positions: Any, lengths: Any, count: int) -> list[bytes]:
    """Return the bits of candidates and their log-probabilities, row by row."""
    found, log_probs = slots.step(np.array(ids), np.array(positions), np.array(lengths), count)
    return [one.tobytes() + other.tobytes() for one, other in zip(found, log_probs, strict=True)]


def copied(slots: OnnxSlots) -> dict[str, NDArray[Any]]:
    return {name: buffer.copy() for name, buffer in slots.buffers.items()}


@of_all
def test_graphs_pass_the_gate(built: Built) -> None:
    report: ParityReport = built.report
    assert report.max_log_prob_difference < 2e-5 and report.max_score_difference < 2e-5
    assert report.num_token_mismatches == 0
    assert built.is_text or report.max_position == built.config.max_target_positions - 1


@of_all
def test_rows_have_the_same_bits_at_every_batch_size(built: Built) -> None:
    """Rows stand at different positions of caches of different sizes, beside rows with longer and with shorter sources."""
    sources = [[*ids, 1] for ids in numbers(*np.random.default_rng(3).integers(1, 19, 17))]
    tokens, steps = np.array(numbers(*[17] * 8, seed=1)), 8

    def decode(rows: range, is_staggered: bool) -> dict[tuple[int, int], bytes]:
        slots, bits = built.start(*(sources[row] for row in rows), spare=3 * is_staggered), {}
        lengths = [len(sources[row]) for row in rows]
        for i in range(steps + 2 * is_staggered):
            at = np.clip(i - (np.arange(len(rows)) % 3) * is_staggered, 0, steps - 1)
            found = step(slots, tokens[at, rows], at, lengths, 280)
            bits |= {(row, at[place]): found[place] for place, row in enumerate(rows)}
        return bits

    alone = {key: value for row in range(17) for key, value in decode(range(row, row + 1), False).items()}
    for size in (2, 3, 5, 8, 17):
        together = decode(range(size), True)
        assert {key for key, value in together.items() if alone[key] != value} == set()


@of_kinds
def test_step_can_be_done_again_with_fewer_candidates_and_in_other_buffers(built: Built) -> None:
    """A search that is paused, or looks at more candidates, does a step more than once."""
    (source,), count = numbers(9), built.config.target_vocab_size
    slots = built.start(source)
    names = [value.name for value in slots.session.get_outputs()]
    for position, token in enumerate((2, 9, 14, 260, 30)):
        before, call = copied(slots), ([token], [position], [len(source)])
        ids, log_probs = slots.step(*map(np.array, call), count)
        after = copied(slots)
        for fewer in (5, 1, 2):
            assert step(slots, *call, fewer) == [ids[0, :fewer].tobytes() + log_probs[0, :fewer].tobytes()]
            assert all(np.array_equal(slots.buffers[name], value) for name, value in after.items())
        scalars = dict(zip(("prev_ids", "positions", "src_lens"), map(np.array, call), strict=True))
        found = dict(zip(names, slots.session.run(None, before | scalars | {"num_candidates": np.array([count])}), strict=True))
        assert np.array_equal(found["candidate_ids"], ids) and np.array_equal(found["candidate_log_probs"], log_probs)
        for cache in slots.caches:
            if cache.role == "self":
                length = position + 1 + len(source) * built.is_text
                part = (0,) if cache.position_axis is None else (0, *[slice(None)] * cache.position_axis, slice(length))
                assert np.array_equal(found[output_name(cache.name)][part], after[cache.name][part])


@of_kinds
def test_step_updates_its_own_position_and_nowhere_else(built: Built) -> None:
    sources = numbers(4, 11, 2, 7)
    slots = built.start(*sources)
    before, positions = copied(slots), np.array([0, 8, 3])
    step(slots, [4, 5, 6], positions, [4, 11, 2], 2)
    for cache in slots.caches:
        changed = slots.buffers[cache.name] != before[cache.name]
        if cache.position_axis is None:
            parity = {"odd": 0, "even": 1}.get(cache.name.split("_")[1])
            expected: list[Any] = [cache.role == "self" and i < 3 and positions[i] % 2 == parity for i in range(4)]
            assert changed.any(1).tolist() == expected
            continue
        axes = tuple(i for i in range(1, changed.ndim) if i != cache.position_axis + 1)
        places = np.zeros((4, changed.shape[cache.position_axis + 1]), bool)
        if cache.role == "self":
            places[[0, 1, 2], positions + np.array([4, 11, 2]) * built.is_text] = True
        np.testing.assert_array_equal(changed.any(axes), places)


@of_single
def test_caches_hold_what_the_network_observes(built: Built) -> None:
    (source,), inputs = numbers(9), [2, 9, 14, 260, 30]
    slots = built.start(source)
    for position, token in enumerate(inputs):
        step(slots, [token], [position], [len(source)], 1)
    with torch.inference_mode():
        observed = built.model.observe(source, inputs).caches(len(inputs))
    for cache, expected in zip((cache for cache in slots.caches if cache.role == "self"), observed, strict=True):
        found = slots.buffers[cache.name][0][tuple(map(slice, expected.shape))]
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


# Prompts.


def read(built: Built, slots: OnnxSlots, row: int, ids: Sequence[int], start: int) -> None:
    """Read a piece of a row's prompt, which begins at a position."""
    session = built.runner._sessions["encoder.onnx"]
    binding, stop = session.io_binding(), start + len(ids)
    for name, value in (("src_ids", ids), ("positions", range(start, stop)), ("src_lens", [stop])):
        array = np.array(value, np.int64)
        binding.bind_cpu_input(name, array)
    bind_caches(binding, {name: buffer[row : row + 1] for name, buffer in slots.buffers.items()}, slots.outputs, 1)
    session.run_with_iobinding(binding)


@of_texts
def test_reading_writes_the_piece_and_one_place_more_where_its_tokens_are_odd(built: Built) -> None:
    for size in (1, 6, 7):
        slots = built.runner.slots(3, 12, 0)
        before = copied(slots)
        read(built, slots, 1, numbers(size)[0], 4)
        expected = np.zeros((3, 12), bool)
        expected[1, 4 : 4 + size + size % 2] = True
        for name, buffer in slots.buffers.items():
            np.testing.assert_array_equal((buffer != before[name]).any((1, 3)), expected)


@of_texts
def test_stepping_a_row_whose_prompt_is_being_read_leaves_no_trace(built: Built) -> None:
    """While a prompt is read, piece by piece, its row is stepped among the others: the next piece overwrites what that writes."""
    prompt, other, answer = numbers(24, 12, 6)
    undisturbed, together, start = built.start(prompt, spare=2), built.runner.slots(2, 38, 0), 0
    read(built, together, 0, other, 0)
    for i, size in enumerate((2, 7, 12, 3)):
        step(together, [other[i], answer[0]], [i, 0], [len(other), start], 1)
        read(built, together, 1, prompt[start : start + size], start)
        start += size
    for i, token in enumerate(answer):
        found = step(together, [other[i + 4], token], [i + 4, i], [len(other), len(prompt)], 280)[1]
        assert found == step(undisturbed, [token], [i], [len(prompt)], 280)[0]


# Files.


@of_kinds
def test_graphs_hold_each_weight_once_and_nothing_they_do_not_need(built: Built) -> None:
    is_int8 = built.name in KINDS and KINDS[built.name][0] == "int8"
    assert (built.directory / "scorer.weights").exists() is (is_int8 and not built.is_text), "the loop's weights are not in 8 bits"
    graphs = [built.graph(name) for name in ("encoder", "decoder", "scorer")]
    operators = [[node.op_type for node in graph.node] for graph in graphs]
    for graph in built.graphs:
        nodes = list(RecursiveGraphIterator(graph.graph))
        assert len(nodes) == len({node.name for node in nodes})
    if built.is_text:
        unread = ("feed_forward.inner.weight", "self_attention.output.weight")
        unread_names = {f"decoder.layers.{built.config.num_decoder_layers - 1}.{name}" for name in unread}
        assert not unread_names & {tensor.name for tensor in graphs[0].initializer} and "LogSoftmax" not in operators[0]
        assert [names.count("GroupQueryAttention") for names in operators] == [built.config.num_decoder_layers] * 3
        assert not any("Softmax" in names for names in operators)
    if is_int8:
        for graph in graphs:
            single = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
            matrices = {tensor.name for tensor in single if len(tensor.dims) == 2 and tensor.dims[1] > 1 and tensor.dims[0] > 1}
            for node in graph.node:
                if node.op_type not in ("GRU", "Scan", "Gather", "GroupQueryAttention"):
                    assert not matrices & set(node.input), (node.op_type, matrices & set(node.input))
        assert "MatMulIntegerToFloat" in operators[1]
