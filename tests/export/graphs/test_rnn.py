"""The recurrent encoder–decoder's graphs in ONNX Runtime sessions: what eager PyTorch says, and the same bits in any company."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx_ir.traversal import RecursiveGraphIterator

from dragoman.export.bundle import DECODER_FILE, ENCODER_FILE, SCORER_FILE
from dragoman.export.caches import Cache
from dragoman.export.choice import choose_one_in_blocks
from dragoman.export.graphs.rnn import RnnEncoderGraph, RnnScorerGraph, RnnStepGraph, rnn_caches
from dragoman.export.packing import pack
from dragoman.export.quantize import quantize
from dragoman.export.session import open_session
from dragoman.export.storage import write_graphs
from dragoman.export.tensor_names import output_name
from dragoman.export.tracing import trace
from dragoman.model.config import ModelConfig
from dragoman.model.networks.rnn import Rnn

V = 96
LAYERS = (1, 2)
ATTENTIONS = ("additive", "dot", "scaled_dot", "none")
MODELS = [(attention, layers) for attention in ATTENTIONS for layers in LAYERS]
SIZES = (2, 3, 5, 8, 16, 33)
NUM_ROWS = max(SIZES)
MAX_SOURCE, NUM_STEPS = 19, 7
FLOAT = np.float32

Array = NDArray[Any]
Caches = dict[str, Array]


def rnn(attention: str, layers: int, seed: int = 0, **switches: Any) -> Rnn:
    """Return a model whose every parameter is random."""
    sizes = {"d_model": 24, "num_encoder_layers": layers, "num_decoder_layers": layers, "is_embedding_shared": False}
    width = {"attention_dim": 40} if attention == "additive" else {}
    fields = {"source_vocab_size": 70, "target_vocab_size": V, "has_output_bias": True, **sizes, **width, **switches}
    model = Rnn(ModelConfig(architecture="rnn", attention=attention, **fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.normal_(0, 0.3, generator=generator)
    return model


@dataclass
class Row:
    """A source and what is fed after it."""

    source: list[int]
    inputs: list[int]


def rows() -> list[Row]:
    random = np.random.default_rng(5)
    lengths = [1, MAX_SOURCE, *random.integers(1, MAX_SOURCE + 1, NUM_ROWS - 2).tolist()]
    return [Row(random.integers(1, 70, n).tolist(), [2, *random.integers(1, V, NUM_STEPS - 1).tolist()]) for n in lengths]


ROWS = rows()


class Graphs:
    """The three graphs of a model in sessions."""

    def __init__(self, model: Rnn, directory: Path, num_threads: int = 1) -> None:
        self.model, self.directory, self.config = model, directory, model.config
        self.caches: list[Cache] = rnn_caches(model.config)
        self.encoder, self.decoder, self.scorer = (
            open_session(directory / name, num_threads) for name in (ENCODER_FILE, DECODER_FILE, SCORER_FILE)
        )

    def encode(self, sources: Sequence[list[int]]) -> list[Caches]:
        """Return what each source's caches hold, without an axis of rows."""
        packed = pack(sources)
        *rows, states = self.encoder.run(None, packed)
        given = [cache for cache in self.caches if cache.role == "cross"]
        found: list[Caches] = [{} for _ in sources]
        for is_rows, columns in ((True, rows[0] if rows else None), (False, states)):
            group = [cache for cache in given if (cache.position_axis is not None) is is_rows]
            if columns is None:
                assert not group
                continue
            widths = np.cumsum([cache.elements_per_position for cache in group])
            assert columns.shape[1] == widths[-1]
            for cache, part in zip(group, np.split(columns, widths[:-1], 1), strict=True):
                per_row = np.split(part, packed["src_lens"].cumsum()[:-1]) if is_rows else list(part)
                for caches, value in zip(found, per_row, strict=True):
                    caches[cache.name] = value
        return found

    def reserve(self, given: Sequence[Caches], lengths: Sequence[int], room: int, noise: float = 0.0) -> Caches:
        """Return caches for rows with room for so many source tokens, in which whatever is not given is noise."""
        random = np.random.default_rng(9)
        result: Caches = {}
        for cache in self.caches:
            buffer = noise * random.standard_normal((len(given), *cache.row_shape(room))).astype(FLOAT)
            for i, (row, length) in enumerate(zip(given, lengths, strict=True)):
                if cache.name in row:
                    buffer[i, : length if cache.position_axis is not None else None] = row[cache.name]
            result[cache.name] = buffer
        return result

    def step(
        self, caches: Caches, ids: Sequence[int], positions: Sequence[int], lengths: Sequence[int], num_candidates: int = V
    ) -> tuple[Array, Array]:
        """Decode a step, each written cache bound where it is read."""
        binding = self.decoder.io_binding()
        feeds = {"prev_ids": ids, "positions": positions, "src_lens": lengths, "num_candidates": [num_candidates]}
        arrays = {name: np.array(value, np.int64) for name, value in feeds.items()}
        for name, array in (arrays | caches).items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        found = np.empty((len(ids), num_candidates), np.int64), np.empty((len(ids), num_candidates), FLOAT)
        for name, array in zip(("candidate_ids", "candidate_log_probs"), found, strict=True):
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for cache in self.caches:
            if cache.role == "self":
                array = caches[cache.name]
                binding.bind_output(output_name(cache.name), "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.decoder.run_with_iobinding(binding)
        return found

    def score(self, pairs: Sequence[Row]) -> list[Array]:
        """Score rows as right-padded pairs, whose labels are their inputs but for the first, and then 1."""
        longest_source, longest = max(len(pair.source) for pair in pairs), max(len(pair.inputs) for pair in pairs)
        feeds = {
            "src_ids": [pair.source + [0] * (longest_source - len(pair.source)) for pair in pairs],
            "src_lens": [len(pair.source) for pair in pairs],
            "tgt_ids": [pair.inputs + [0] * (longest - len(pair.inputs)) for pair in pairs],
            "tgt_lens": [len(pair.inputs) for pair in pairs],
            "labels": [pair.inputs[1:] + [1] + [0] * (longest - len(pair.inputs)) for pair in pairs],
        }
        return list(self.scorer.run(None, {name: np.array(value, np.int64) for name, value in feeds.items()}))


def write(model: Rnn, directory: Path, precision: str) -> Path:
    graphs = [trace(graph(model)) for graph in (RnnEncoderGraph, RnnStepGraph, RnnScorerGraph)]
    choose_one_in_blocks(graphs[1])
    if precision == "int8":
        for graph in graphs:
            quantize(graph, {})
    directory.mkdir()
    write_graphs(graphs, directory)
    return directory


Written = Callable[..., Graphs]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Give a model's graphs, written once."""
    made: dict[tuple[str, int, str], tuple[Rnn, Path]] = {}

    def open_graphs(attention: str, layers: int, precision: str = "fp32", num_threads: int = 1) -> Graphs:
        key = attention, layers, precision
        if key not in made:
            model = rnn(attention, layers)
            made[key] = model, write(model, tmp_path_factory.mktemp("rnn") / "graphs", precision)
        return Graphs(*made[key], num_threads)

    return open_graphs


each_model = pytest.mark.parametrize(("attention", "layers"), MODELS)
each_precision = pytest.mark.parametrize("precision", ["fp32", "int8"])
each_number_of_threads = pytest.mark.parametrize("num_threads", [1, 2])


@torch.inference_mode()
def eager_log_probs(model: Rnn, row: Row) -> Array:
    """Return the next token's log-probabilities at every position, `[T, V]`."""
    hidden = model.observe(row.source, row.inputs).hidden
    return model.decoder.log_probs(hidden).numpy()


def in_order(ids: Array, log_probs: Array) -> Array:
    """Return all candidates' log-probabilities by their ids."""
    result = np.empty_like(log_probs)
    np.put_along_axis(result, ids, log_probs, 1)
    return result


def drive(graphs: Graphs, row: Row) -> tuple[list[Caches], list[tuple[Array, Array]]]:
    """Decode a row alone, in caches without room to spare; return the caches before each step, and the steps' candidates."""
    lengths = [len(row.source)]
    caches = graphs.reserve(graphs.encode([row.source]), lengths, len(row.source))
    before, found = [], []
    for position, token in enumerate(row.inputs):
        before.append({name: array.copy() for name, array in caches.items()})
        found.append(graphs.step(caches, [token], [position], lengths))
    return before, found


def difference(found: Array, expected: Array) -> float:
    """Return the largest; where one is -inf, the other is."""
    finite = np.isfinite(expected)
    assert (finite == np.isfinite(found)).all()
    return float(np.abs(found[finite] - expected[finite]).max())


@each_model
def test_encoder_gives_what_the_model_keeps(written: Written, attention: str, layers: int) -> None:
    graphs = written(attention, layers)
    model = graphs.model
    for row, found in zip(ROWS, graphs.encode([row.source for row in ROWS]), strict=True):
        with torch.inference_mode():
            values, _, last = model.encode(torch.tensor([row.source]), torch.tensor([len(row.source)]))
            expected = {f"start_{layer}": state for layer, state in enumerate(model.decoder.start(last))}
            if attention != "none":
                expected["values"] = values
            if attention == "additive":
                expected["keys"] = model.decoder.alignment.keys(values)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert difference(found[name], value[0].numpy()) < 2e-6, name


@each_model
@each_precision
@each_number_of_threads
def test_source_has_the_same_bits_alone_and_in_any_mixture(
    written: Written, attention: str, layers: int, precision: str, num_threads: int
) -> None:
    graphs = written(attention, layers, precision, num_threads)
    alone = [graphs.encode([row.source])[0] for row in ROWS]
    random = np.random.default_rng(2)
    for size in SIZES:
        chosen = random.permutation(NUM_ROWS)[:size].tolist()
        for i, found in zip(chosen, graphs.encode([ROWS[i].source for i in chosen]), strict=True):
            for name, value in found.items():
                assert np.array_equal(value, alone[i][name]), (size, name)


@each_model
def test_steps_give_the_model_s_log_probs(written: Written, attention: str, layers: int) -> None:
    graphs = written(attention, layers)
    for row in ROWS[:6]:
        _, found = drive(graphs, row)
        log_probs = np.concatenate([in_order(*candidates) for candidates in found])
        assert difference(log_probs, eager_log_probs(graphs.model, row)) < 1e-5


@each_model
@each_precision
@each_number_of_threads
def test_row_has_the_same_bits_alone_and_in_batches_at_any_positions_and_with_room_to_spare(
    written: Written, attention: str, layers: int, precision: str, num_threads: int
) -> None:
    graphs = written(attention, layers, precision, num_threads)
    alone = [drive(graphs, row) for row in ROWS]
    random = np.random.default_rng(3)
    names = [cache.name for cache in graphs.caches if cache.role == "self"]
    for size, room in zip((*SIZES, *SIZES), (19, 20, 27, 32, 63, 100, 33, 64, 19, 41, 24, 31), strict=True):
        chosen = random.permutation(NUM_ROWS)[:size].tolist()
        positions = random.integers(0, NUM_STEPS - 1, size).tolist()
        lengths = [len(ROWS[i].source) for i in chosen]
        given = [{name: array[0] for name, array in alone[i][0][p].items()} for i, p in zip(chosen, positions, strict=True)]
        caches = graphs.reserve(given, lengths, room, noise=50.0)
        tokens = [ROWS[i].inputs[p] for i, p in zip(chosen, positions, strict=True)]
        ids, log_probs = graphs.step(caches, tokens, positions, lengths)
        for place, (i, p) in enumerate(zip(chosen, positions, strict=True)):
            expected_ids, expected = alone[i][1][p]
            assert np.array_equal(ids[place], expected_ids[0]) and np.array_equal(log_probs[place], expected[0]), (size, room)
            for name in names:
                assert np.array_equal(caches[name][place], alone[i][0][p + 1][name][0]), (size, room, name)


@each_model
@each_precision
def test_step_done_again_changes_nothing(written: Written, attention: str, layers: int, precision: str) -> None:
    """A search that is paused, or looks at more candidates, does a step more than once."""
    graphs = written(attention, layers, precision)
    for row in ROWS[:4]:
        before, found = drive(graphs, row)
        lengths = [len(row.source)]
        caches = {name: array.copy() for name, array in before[0].items()}
        for position, token in enumerate(row.inputs):
            ids, log_probs = found[position]
            for count in (5, V, 1, 2):
                again = graphs.step(caches, [token], [position], lengths, count)
                assert np.array_equal(again[0], ids[:, :count]) and np.array_equal(again[1], log_probs[:, :count])
            if position + 1 < len(row.inputs):
                for name, array in caches.items():
                    assert np.array_equal(array, before[position + 1][name])


@each_model
def test_states_written_where_they_are_read_have_the_bits_of_separate_buffers(
    written: Written, attention: str, layers: int
) -> None:
    graphs = written(attention, layers)
    lengths = [len(row.source) for row in ROWS]
    caches = graphs.reserve(graphs.encode([row.source for row in ROWS]), lengths, MAX_SOURCE, noise=1.0)
    apart = {name: array.copy() for name, array in caches.items()}
    names = [value.name for value in graphs.decoder.get_outputs()]
    for position in range(NUM_STEPS):
        tokens, positions = [row.inputs[position] for row in ROWS], [position + i % 2 * 2 for i in range(NUM_ROWS)]
        ids, log_probs = graphs.step(caches, tokens, positions, lengths)
        integers = {"prev_ids": tokens, "positions": positions, "src_lens": lengths, "num_candidates": [V]}
        feeds = apart | {name: np.array(value, np.int64) for name, value in integers.items()}
        found = dict(zip(names, graphs.decoder.run(None, feeds), strict=True))
        assert np.array_equal(found["candidate_ids"], ids) and np.array_equal(found["candidate_log_probs"], log_probs)
        passed = "even" if position % 2 == 0 else "odd"
        for cache in graphs.caches:
            if cache.role == "self":
                new = found[output_name(cache.name)]
                assert np.array_equal(new, caches[cache.name])
                assert np.array_equal(new, apart[cache.name]) is (passed in cache.name)
                apart[cache.name] = new


@each_model
def test_caches_hold_what_the_model_says_that_a_step_needs(written: Written, attention: str, layers: int) -> None:
    graphs = written(attention, layers)
    row = ROWS[3]
    before, _ = drive(graphs, row)
    with torch.inference_mode():
        observed = graphs.model.observe(row.source, row.inputs)
    names = [cache.name for cache in graphs.caches if cache.role == "self"]
    for position in range(2, NUM_STEPS):
        for name, expected in zip(names, observed.caches(position), strict=True):
            assert difference(before[position][name][0], expected.numpy()) < 2e-6


@each_model
def test_scores_are_the_model_s(written: Written, attention: str, layers: int) -> None:
    graphs = written(attention, layers)
    pairs = [Row(row.source, row.inputs[: 1 + i % NUM_STEPS]) for i, row in enumerate(ROWS[:9])]
    log_probs, *attention_of = graphs.score(pairs)
    assert len(attention_of) == (attention != "none")
    for i, pair in enumerate(pairs):
        labels = np.array([*pair.inputs[1:], 1])
        expected = np.take_along_axis(eager_log_probs(graphs.model, pair), labels[:, None], 1)[:, 0]
        assert np.abs(log_probs[i, : len(labels)] - expected).max() < 1e-5
        for weights in attention_of:
            with torch.inference_mode():
                rows = graphs.model.observe(pair.source, pair.inputs).attention.numpy()
            found = weights[i][:, : len(labels)]
            assert weights.shape == (len(pairs), 1, max(len(p.inputs) for p in pairs), max(len(p.source) for p in pairs))
            assert np.abs(found[:, :, : len(pair.source)] - rows).max() < 1e-5
            assert not found[:, :, len(pair.source) :].any()


@each_model
@each_precision
def test_pair_alone_has_the_same_score_twice_and_in_a_batch_the_same_but_for_rounding(
    written: Written, attention: str, layers: int, precision: str
) -> None:
    graphs = written(attention, layers, precision)
    pairs = [Row(row.source, row.inputs[: 1 + i % NUM_STEPS]) for i, row in enumerate(ROWS[:12])]
    together = graphs.score(pairs)
    for i, pair in enumerate(pairs):
        num_source, num_target = len(pair.source), len(pair.inputs)
        for alone, again, batch in zip(graphs.score([pair]), graphs.score([pair]), together, strict=True):
            assert np.array_equal(alone, again)
            same = batch[i, :num_target] if batch.ndim == 2 else batch[i, :, :num_target, :num_source]
            assert np.abs(same - alone[0]).max() < (0.03 if precision == "int8" else 1e-5)


@each_model
def test_products_in_8_bits_are_close(written: Written, attention: str, layers: int) -> None:
    graphs, single = written(attention, layers, "int8"), written(attention, layers)
    differences = []
    for row in ROWS[:8]:
        found, expected = (np.concatenate([in_order(*step) for step in drive(side, row)[1]]) for side in (graphs, single))
        differences.append(difference(found, expected))
    assert 0 < max(differences) < 0.2


@each_model
def test_steps_products_and_tables_are_8_bit_but_for_the_scorers_loop(written: Written, attention: str, layers: int) -> None:
    directory = written(attention, layers, "int8").directory
    models = [onnx.load(directory / name, load_external_data=False).graph for name in (ENCODER_FILE, DECODER_FILE, SCORER_FILE)]
    for graph in models:
        single = [x for x in graph.initializer if x.data_type == onnx.TensorProto.FLOAT]
        matrices = {x.name for x in single if len(x.dims) == 2 and x.dims[1] > 1}
        for node in graph.node:
            if node.op_type not in ("GRU", "Scan"):
                assert not matrices & set(node.input), (node.op_type, matrices & set(node.input))
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in models[1].node) >= 2 * layers + 2


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_shortlist_chooses_from_its_tokens_alone(tmp_path: Path, attention: str) -> None:
    model, shortlist = rnn(attention, 1), [0, 1, 2, 5, 9, 40, 41, 95]
    graphs = [trace(RnnEncoderGraph(model)), trace(RnnStepGraph(model, shortlist)), trace(RnnScorerGraph(model))]
    write_graphs(graphs, tmp_path)
    row = ROWS[4]
    session = Graphs(model, tmp_path)
    caches = session.reserve(session.encode([row.source]), [len(row.source)], len(row.source))
    for position, token in enumerate(row.inputs):
        ids, log_probs = session.step(caches, [token], [position], [len(row.source)], len(shortlist))
        whole = eager_log_probs(model, Row(row.source, row.inputs[: position + 1]))[-1]
        order = ids[0].tolist()
        assert sorted(order) == shortlist
        expected = torch.tensor(whole[order]).log_softmax(-1).numpy()
        assert difference(log_probs[0], expected) < 1e-5


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    "switches", [{"is_embedding_scaled": False}, {"is_projection_tied": False}, {"padding": "masked"}, {"d_model": 22}], ids=str
)
def test_switches_are_followed(tmp_path: Path, attention: str, switches: dict[str, Any]) -> None:
    model = rnn(attention, 2, **switches)
    graphs = Graphs(model, write(model, tmp_path / "graphs", "fp32"))
    for row in ROWS[2:4]:
        found = np.concatenate([in_order(*step) for step in drive(graphs, row)[1]])
        assert difference(found, eager_log_probs(model, row)) < 1e-5
        labels = np.array([*row.inputs[1:], 1])
        scores = graphs.score([row])[0][0]
        assert np.abs(scores - np.take_along_axis(eager_log_probs(model, row), labels[:, None], 1)[:, 0]).max() < 1e-5


def test_scorer_has_no_weights_of_its_own(written: Written) -> None:
    for attention in ATTENTIONS:
        assert not (written(attention, 2).directory / "scorer.weights").exists()


def test_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(rnn("additive", 2), tmp_path / name, "int8")
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second"))
    assert first == second


def test_every_name_in_a_graph_is_of_one_value() -> None:
    for graph in (RnnEncoderGraph, RnnStepGraph, RnnScorerGraph):
        traced = trace(graph(rnn("additive", 2))).graph
        nodes = list(RecursiveGraphIterator(traced))
        bodies = [node.attributes["body"].as_graph() for node in nodes if node.op_type == "Scan"]
        values = [*traced.inputs, *traced.initializers.values(), *(x for body in bodies for x in body.inputs)]
        names = [value.name for value in (*values, *(x for node in nodes for x in node.outputs)) if value.name]
        assert len(names) == len(set(names))
        assert len(nodes) == len({node.name for node in nodes})
