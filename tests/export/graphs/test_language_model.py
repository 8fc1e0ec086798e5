"""The graphs of a language model, in sessions as the server opens them: against the network, and to the bit against themselves."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from numpy.typing import NDArray

from dragoman.export.choice import choose_one_in_blocks
from dragoman.export.cpu import keep_sums_apart, keep_time_axis
from dragoman.export.graphs.language_model import PromptGraph, TextScorerGraph, TextStepGraph
from dragoman.export.quantize import ActivationRange, find_products, quantize
from dragoman.export.session import Session, open_session
from dragoman.export.storage import FILES, write_graphs
from dragoman.export.tracing import trace
from dragoman.model.config import ModelConfig
from dragoman.model.networks.architectures import network
from dragoman.model.networks.language_model import LanguageModel
from tests.export.conftest import GPT, LLAMA

SMALL: dict[str, Any] = {
    "architecture": "decoder",
    "source_vocab_size": 240,
    "target_vocab_size": 240,
    "d_model": 64,
    "num_heads": 4,
    "num_decoder_layers": 2,
    "decoder_ffn_dim": 80,
    "max_source_positions": 40,
    "max_target_positions": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt": GPT,
    "sinusoidal": {"has_output_bias": True, "padding": "masked"},
    "rotary-wide": {"positions": "rotary", "attention_dim": 128, "rotary_base": 500.0, "position_offset": 0},
    "learned-offset": {"positions": "learned", "position_offset": 2, "is_projection_tied": False, "has_embedding_norm": True},
}
PRECISIONS = ("fp32", "int8 a row", "int8 for all")
BATCHES = (2, 3, 5, 8, 16, 33)
ROOM = 64
TOLERANCE = 1e-4

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def random_model(**switches: Any) -> LanguageModel:
    """Make a model whose every parameter is random, biases and norms too, so that no mistake hides behind a 0 or a 1."""
    model = network(ModelConfig(**(SMALL | switches))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(float(name.endswith("norm.weight")), 0.15, generator=generator)
    assert isinstance(model, LanguageModel)
    return model


def graphs_of(model: LanguageModel, precision: str) -> Iterable[onnx_ir.Model]:
    """Yield the graphs of a bundle, rewritten as an export rewrites them."""
    for module in (PromptGraph(model), TextStepGraph(model), TextScorerGraph(model)):
        graph = trace(module)
        keep_sums_apart(graph)
        if isinstance(module, TextStepGraph):
            choose_one_in_blocks(graph)
        if precision != "fp32":
            one_for_all = ActivationRange(-6.0, 6.0, 3.0)
            keys = (product.key for product in find_products(graph.graph))
            quantize(graph, dict.fromkeys(keys, one_for_all) if precision == "int8 for all" else {})
            if isinstance(module, TextStepGraph):
                keep_time_axis(graph)
        yield graph


class Bundle:
    """Three graphs in sessions.

    Attributes:
        model: What they were made of.
        directory: Where they are.
    """

    def __init__(self, model: LanguageModel, directory: Path, precision: str) -> None:
        self.model, self.directory = model, directory
        write_graphs(graphs_of(model, precision), directory)
        self.prompt, self.step, self.scorer = (open_session(directory / name, 1) for name, _ in FILES)

    def rows(self, num_rows: int, room: int = ROOM) -> "Rows":
        return Rows(self, num_rows, room)

    def score(self, prompt: Sequence[int], inputs: Sequence[int], labels: Sequence[int]) -> Floats:
        """Score one pair alone, as the server does."""
        arrays = {"src_ids": prompt, "tgt_ids": inputs, "labels": labels}
        lengths = {"src_lens": np.array([len(prompt)]), "tgt_lens": np.array([len(inputs)])}
        given = {name: np.array([ids], np.int64).reshape(1, -1) for name, ids in arrays.items()}
        result: Floats = self.scorer.run(None, given | lengths)[0][0]
        return result


class Rows:
    """Caches full of noise, so that whatever reads beyond a row's own keys is found out.

    Attributes:
        caches: `[n, H, T, Dh]` by name, updated in place.
    """

    def __init__(self, bundle: Bundle, num_rows: int, room: int) -> None:
        noise, config = np.random.default_rng(9), bundle.model.config
        shape = num_rows, config.num_heads, room, config.head_dim
        self.bundle = bundle
        self.caches = {name: noise.random(shape, np.float32) for name in PromptGraph(bundle.model).cache_names}

    def read(self, row: int, ids: Sequence[int], start: int = 0) -> None:
        """Read a piece of a row's prompt, which begins at a position."""
        stop = start + len(ids)
        given = {"src_ids": np.array(ids), "positions": np.arange(start, stop), "src_lens": np.array([stop])}
        self._run(self.bundle.prompt, given, {}, slice(row, row + 1))

    def read_in_pieces(self, row: int, prompt: Sequence[int], sizes: Iterable[int]) -> None:
        """Read a whole prompt, in pieces of these sizes."""
        start = 0
        for size in sizes:
            self.read(row, prompt[start : start + size], start)
            start += size
            if start >= len(prompt):
                return

    def step(self, ids: Sequence[int], positions: Sequence[int], lengths: Sequence[int]) -> Floats:
        """Step the first rows; return all log-probabilities by id, `[n, V]`."""
        vocab_size = self.bundle.model.config.target_vocab_size
        found, values = self.candidates(ids, positions, lengths, vocab_size)
        by_id = np.empty_like(values)
        np.put_along_axis(by_id, found, values, 1)
        return by_id

    def candidates(self, ids: Sequence[int], positions: Sequence[int], lengths: Sequence[int], count: int) -> tuple[Ints, Floats]:
        """Step the first rows; return so many candidates of each and their log-probabilities."""
        given = {"prev_ids": ids, "positions": positions, "src_lens": lengths, "num_candidates": [count]}
        found, values = np.empty((len(ids), count), np.int64), np.empty((len(ids), count), np.float32)
        outputs = {"candidate_ids": found, "candidate_log_probs": values}
        self._run(self.bundle.step, {name: np.array(x, np.int64) for name, x in given.items()}, outputs, slice(0, len(ids)))
        return found, values

    def held(self, row: int, length: int) -> list[bytes]:
        """Return the bytes of a row's first positions."""
        return [cache[row, :, :length].tobytes() for cache in self.caches.values()]

    def _run(self, session: Session, given: dict[str, Any], results: dict[str, Any], rows: slice) -> None:
        binding = session.io_binding()
        for name, array in given.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in results.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, cache in self.caches.items():
            part = cache[rows]
            binding.bind_input(name, "cpu", 0, part.dtype, part.shape, part.ctypes.data)
            binding.bind_output(f"{name}_out", "cpu", 0, part.dtype, part.shape, part.ctypes.data)
        session.run_with_iobinding(binding)


MakeBundle = Callable[[str, str], Bundle]


@pytest.fixture(scope="module")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    known: dict[tuple[str, str], Bundle] = {}

    def make(kind: str, precision: str) -> Bundle:
        if (kind, precision) not in known:
            model = random_model(**KINDS[kind])
            known[kind, precision] = Bundle(model, tmp_path_factory.mktemp("graphs"), precision)
        return known[kind, precision]

    return make


@pytest.fixture(params=KINDS)
def bundle(request: pytest.FixtureRequest, make_bundle: MakeBundle) -> Bundle:
    return make_bundle(request.param, "fp32")


@pytest.fixture(params=[(kind, precision) for kind in ("llama", "gpt") for precision in PRECISIONS], ids=" ".join)
def any_bundle(request: pytest.FixtureRequest, make_bundle: MakeBundle) -> Bundle:
    return make_bundle(*request.param)


def texts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 240, length).tolist() for length in lengths]


@torch.inference_mode()
def eager(model: LanguageModel, text: Sequence[int]) -> Floats:
    """Return the log-probabilities after each token of a text, from one pass over it whole, `[T, V]`."""
    hidden = model.decode(torch.tensor([text]), torch.empty(1, 0, dtype=torch.int64), torch.tensor([0]))
    result: Floats = model.decoder.log_probs(hidden)[0].numpy()
    return result


def test_prompts_and_then_steps_give_what_the_network_gives(bundle: Bundle) -> None:
    """Rows of all lengths, the empty one and the longest there are, stepped together, each at its own position."""
    lengths, num_steps = [0, 1, 2, 17, 40, 5], [63, 8, 30, 20, 24, 58]
    prompts, answers = texts(lengths), texts(num_steps, 1)
    rows = bundle.rows(len(lengths))
    for row, prompt in enumerate(prompts):
        if prompt:
            rows.read(row, prompt)
    expected = [eager(bundle.model, [*prompt, *answer])[len(prompt) :] for prompt, answer in zip(prompts, answers, strict=True)]
    for step in range(max(num_steps)):
        # A row that has ended goes on with its last token, in its place: nobody looks.
        at = [min(step, num - 1) for num in num_steps]
        found = rows.step([answer[i] for answer, i in zip(answers, at, strict=True)], at, lengths)
        for row, i in enumerate(at):
            if i == step:
                np.testing.assert_allclose(found[row], expected[row][i], rtol=0, atol=TOLERANCE)


def test_steps_from_an_empty_prompt_fill_the_room_to_its_end(bundle: Bundle) -> None:
    (text,) = texts([64])
    rows = bundle.rows(1)
    found = np.concatenate([rows.step([token], [i], [0]) for i, token in enumerate(text)])
    np.testing.assert_allclose(found, eager(bundle.model, text), rtol=0, atol=TOLERANCE)


def test_caches_hold_what_the_network_observes(bundle: Bundle) -> None:
    prompt, answer = texts([11, 4])
    rows = bundle.rows(1)
    rows.read(0, prompt)
    for i, token in enumerate(answer):
        rows.step([token], [i], [len(prompt)])
    with torch.inference_mode():
        caches = bundle.model.observe(prompt, answer).caches(len(answer))
    for cache, expected in zip(rows.caches.values(), caches, strict=True):
        np.testing.assert_allclose(cache[0, :, : len(prompt) + len(answer)], expected.numpy(), rtol=0, atol=1e-5)


def test_scores_are_the_network_s(bundle: Bundle) -> None:
    for num_prompt, num_target in ((0, 1), (0, 64), (1, 1), (40, 24), (7, 5)):
        prompt, inputs, labels = texts([num_prompt, num_target, num_target])
        expected = eager(bundle.model, [*prompt, *inputs])[num_prompt:][np.arange(num_target), labels]
        np.testing.assert_allclose(bundle.score(prompt, inputs, labels), expected, rtol=0, atol=TOLERANCE)


def test_scores_of_ragged_rows_are_those_of_each_alone(bundle: Bundle) -> None:
    """Padded pairs together are longer than the longest text there is."""
    prompts, targets, wanted = texts([0, 40, 3, 1]), texts([60, 1, 8, 50], 1), texts([60, 1, 8, 50], 2)

    def padded(rows: list[list[int]]) -> Ints:
        return np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])

    given = {"src_ids": padded(prompts), "tgt_ids": padded(targets), "labels": padded(wanted)}
    lengths = {"src_lens": np.array([len(row) for row in prompts]), "tgt_lens": np.array([len(row) for row in targets])}
    assert given["src_ids"].shape[1] + given["tgt_ids"].shape[1] > bundle.model.config.max_target_positions
    (found,) = bundle.scorer.run(None, given | lengths)
    for row, (prompt, inputs, labels) in enumerate(zip(prompts, targets, wanted, strict=True)):
        np.testing.assert_allclose(found[row, : len(inputs)], bundle.score(prompt, inputs, labels), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("num_rows", BATCHES)
def test_steps_have_the_same_bits_in_every_batch(any_bundle: Bundle, num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    lengths = random.integers(0, 41, num_rows).tolist()
    prompts, answers = texts(lengths), texts([6] * num_rows, 1)
    together = any_bundle.rows(num_rows)
    alone = [any_bundle.rows(1) for _ in prompts]
    for row, prompt in enumerate(prompts):
        if prompt:
            together.read(row, prompt)
            alone[row].read(0, prompt)
    for step in range(6):
        tokens = [answer[step] for answer in answers]
        found = together.step(tokens, [step] * num_rows, lengths)
        for row, rows in enumerate(alone):
            assert rows.step([tokens[row]], [step], [lengths[row]]).tobytes() == found[row].tobytes(), (row, step)
    for row, rows in enumerate(alone):
        assert together.held(row, lengths[row] + 6) == rows.held(0, lengths[row] + 6)


@pytest.mark.parametrize("sizes", [[1], [2], [3], [7], [16], [33], [2, 9, 3, 14], [23, 1, 4, 31]], ids=str)
@pytest.mark.parametrize("length", [4, 17, 33, 40])
def test_prompts_in_pieces_have_the_bits_of_the_whole(any_bundle: Bundle, sizes: list[int], length: int) -> None:
    """Heads are 16 wide, so that 33 queries are a block of 32 and one left over."""
    (prompt,) = texts([length])
    whole, pieces = any_bundle.rows(1), any_bundle.rows(1)
    whole.read(0, prompt)
    pieces.read_in_pieces(0, prompt, sizes * length)
    assert pieces.held(0, length) == whole.held(0, length)


@pytest.mark.parametrize("num_tokens", [1, 6, 7])
def test_reading_writes_the_piece_and_one_place_more_where_its_tokens_are_odd(any_bundle: Bundle, num_tokens: int) -> None:
    (prompt,) = texts([num_tokens])
    rows = any_bundle.rows(3, 12)
    before = {name: cache.copy() for name, cache in rows.caches.items()}
    rows.read(1, prompt, 4)
    expected = np.zeros((3, 12), bool)
    expected[1, 4 : 4 + num_tokens + num_tokens % 2] = True
    for name, cache in rows.caches.items():
        np.testing.assert_array_equal((cache != before[name]).any((1, 3)), expected)


@pytest.mark.parametrize("room", [41, 47, 48, 64, 96, 104])
def test_room_changes_no_bits(any_bundle: Bundle, room: int) -> None:
    (prompt,) = texts([33])
    snug, wide = any_bundle.rows(1, 40), any_bundle.rows(1, room)
    snug.read(0, prompt)
    wide.read_in_pieces(0, prompt, [5, 9, 19])
    for step, token in enumerate(prompt[:7]):
        assert snug.step([token], [step], [33]).tobytes() == wide.step([token], [step], [33]).tobytes()
    assert snug.held(0, 40) == wide.held(0, 40)


def test_stepping_a_row_whose_prompt_is_being_read_leaves_no_trace(any_bundle: Bundle) -> None:
    """While a prompt is read, piece by piece, its row is stepped among the others: the next piece overwrites what that writes."""
    prompt, other, answer = texts([30, 12, 6])
    undisturbed, together = any_bundle.rows(1), any_bundle.rows(2)
    undisturbed.read(0, prompt)
    together.read(0, other)
    start = 0
    for step, size in enumerate((2, 7, 16, 5)):
        together.step([other[step], answer[0]], [step, 0], [len(other), start])
        together.read(1, prompt[start : start + size], start)
        start += size
    assert start == len(prompt)
    for step, token in enumerate(answer):
        found = together.step([other[step + 4], token], [step + 4, step], [len(other), len(prompt)])[1]
        assert found.tobytes() == undisturbed.step([token], [step], [len(prompt)])[0].tobytes()
    assert together.held(1, 36) == undisturbed.held(0, 36)


def test_a_step_can_be_done_again(any_bundle: Bundle) -> None:
    prompt, answer = texts([9, 5])
    rows = any_bundle.rows(1)
    rows.read(0, prompt)
    found = [rows.step([token], [i], [9]).tobytes() for i, token in enumerate(answer)]
    before = rows.held(0, ROOM)
    assert [rows.step([token], [i], [9]).tobytes() for i, token in enumerate(answer)] == found
    assert rows.held(0, ROOM) == before


def test_one_candidate_is_the_first_of_many(any_bundle: Bundle) -> None:
    prompts = texts([3, 8, 30])
    rows = any_bundle.rows(3)
    for row, prompt in enumerate(prompts):
        rows.read(row, prompt)
    call = [5, 6, 7], [0, 0, 0], [3, 8, 30]
    ids, values = rows.candidates(*call, 4)
    first, value = rows.candidates(*call, 1)
    np.testing.assert_array_equal(first, ids[:, :1])
    np.testing.assert_array_equal(value, values[:, :1])


def test_a_step_writes_at_its_place_and_nowhere_else(bundle: Bundle) -> None:
    rows = bundle.rows(4, 20)
    before = {name: cache.copy() for name, cache in rows.caches.items()}
    rows.step([4, 5, 6], [0, 8, 3], [0, 11, 2])
    expected = np.zeros((4, 20), bool)
    expected[[0, 1, 2], [0, 19, 5]] = True
    for name, cache in rows.caches.items():
        np.testing.assert_array_equal((cache != before[name]).any((1, 3)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_8_bits_are_close_to_what_they_stand_for(make_bundle: MakeBundle, kind: str) -> None:
    bundle, single = make_bundle(kind, "int8 a row"), make_bundle(kind, "fp32")
    prompt, inputs = texts([20, 30])
    found, expected = (each.rows(1) for each in (bundle, single))
    for rows in (found, expected):
        rows.read(0, prompt)
    for i, token in enumerate(inputs):
        quantised, exact = (rows.step([token], [i], [20])[0, 1:] for rows in (found, expected))
        assert 0 < (np.exp(exact) * np.abs(quantised - exact)).sum() < 0.25
        label = int(quantised.argmax()) + 1
        np.testing.assert_allclose(bundle.score(prompt, inputs[: i + 1], [0] * i + [label])[-1], quantised.max(), rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", ["llama", "learned-offset"])
def test_shortlist_gives_the_whole_vocabulary_s_logits_normalised_over_it(
    make_bundle: MakeBundle, kind: str, tmp_path: Path
) -> None:
    bundle = make_bundle(kind, "fp32")
    shortlist = [0, 1, 2, 9, 30, 31, 77, 200]
    short = Bundle(bundle.model, tmp_path, "fp32")
    graph = trace(TextStepGraph(bundle.model, shortlist))
    keep_sums_apart(graph)
    onnx_ir.save(graph, tmp_path / "short.onnx")
    short.step = open_session(tmp_path / "short.onnx", 1)
    (prompt,) = texts([9])
    rows, whole = short.rows(1), bundle.rows(1)
    rows.read(0, prompt)
    whole.read(0, prompt)
    ids, values = rows.candidates([5], [0], [9], len(shortlist))
    expected = whole.step([5], [0], [9])[0, shortlist].astype(np.float64)
    expected -= np.log(np.exp(expected).sum())
    assert sorted(ids[0].tolist()) == shortlist
    np.testing.assert_allclose(values[0], expected[np.searchsorted(shortlist, ids[0])], rtol=0, atol=1e-5)


def test_graphs_hold_each_weight_once_and_nothing_they_do_not_need(bundle: Bundle) -> None:
    prompt, step, scorer = (onnx.load(bundle.directory / name, load_external_data=False).graph for name, _ in FILES)
    assert not (bundle.directory / "scorer.weights").exists()
    dead = {"decoder.norm.weight", "decoder.layers.1.feed_forward.inner.weight", "decoder.layers.1.self_attention.output.weight"}
    assert dead & {tensor.name for tensor in step.initializer} >= dead - {"decoder.norm.weight"}
    assert not dead & {tensor.name for tensor in prompt.initializer}
    assert "LogSoftmax" not in {node.op_type for node in prompt.node}
    kinds = [node.op_type for graph in (prompt, step, scorer) for node in graph.node]
    assert kinds.count("GroupQueryAttention") == 3 * bundle.model.config.num_decoder_layers
    assert "Softmax" not in kinds


def test_prompts_and_texts_are_of_any_size(bundle: Bundle) -> None:
    def axes(values: Any) -> dict[str, list[str | int]]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    prompt, step, scorer = (onnx.load(bundle.directory / name, load_external_data=False).graph for name, _ in FILES)
    config = bundle.model.config
    heads = {f"self_{part}_{layer}": [config.num_heads, "T", config.head_dim] for layer in range(2) for part in "kv"}
    caches = {name: [1, *shape] for name, shape in heads.items()}
    assert axes(prompt.input) == {"src_ids": ["P"], "positions": ["P"], "src_lens": [1]} | caches
    assert axes(prompt.output) == {f"{name}_out": shape for name, shape in caches.items()}
    caches = {name: ["N", *shape] for name, shape in heads.items()}
    rows = {name: ["N"] for name in ("prev_ids", "positions", "src_lens")}
    assert axes(step.input) == rows | {"num_candidates": [1]} | caches
    candidates = {name: ["N", "K"] for name in ("candidate_ids", "candidate_log_probs")}
    assert axes(step.output) == candidates | {f"{name}_out": shape for name, shape in caches.items()}
    pair, lengths = ["B", "T"], ["B"]
    assert axes(scorer.input) == {
        "src_ids": ["B", "S"], "src_lens": lengths, "tgt_ids": pair, "tgt_lens": lengths, "labels": pair,
    }  # fmt: skip
    assert axes(scorer.output) == {"label_log_probs": pair}
