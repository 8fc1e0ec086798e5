"""ONNX Runtime sessions of a bundle's graphs, with cache buffers as the manifest declares them.

fp32 and int8 run on the CPU; fp16 on CUDA where there is a device, else on the CPU; bf16, which the CPU provider does not
have, on the CPU in a copy that is widened to single precision.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray

from dragoman.export.architectures import architecture_of
from dragoman.export.bundle import DECODER_FILE, ENCODER_FILE, GRAPH_FILES, SCORER_FILE, BundleError
from dragoman.export.fields import Precision
from dragoman.export.proof.cases import Pair, padded
from dragoman.export.proof.eager import Floats, Given, Ints
from dragoman.export.session import Session, has_cuda, open_on_cuda, open_session
from dragoman.export.tensors import LOG_PROBS_OUTPUT, PACKED_OUTPUT, QUERIES_OUTPUT, STATES_OUTPUT, Cache, Role, output_name, pack
from dragoman.model.config import ModelConfig

# Range of the numbers restored into 8-bit caches.
RESTORED_RANGE = 4.0
LEVELS = 127
NUMBERS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
# Positions beyond a prompt in the caches that it is read into; the graph may use one of them.
SPARE_POSITIONS = 4

WIDENED = "cpu, widened to fp32; not run in bf16"

CacheBuffer = NDArray[np.number[Any]]


@contextmanager
def open_runner(directory: Path, config: ModelConfig, precision: Precision, *, is_on_cpu: bool = False) -> "Iterator[OnnxRunner]":
    """Open the graphs of a directory as a precision is run on this machine.

    Args:
        directory: Of the graphs.
        config: Of their model.
        precision: Of the graphs.
        is_on_cpu: Run fp16 on the CPU even where there is a CUDA device.

    Raises:
        BundleError: If ONNX Runtime cannot load them, or their inputs and outputs are not those of the bundle format.
    """
    if precision == "fp16":
        yield HalfRunner(directory, config, is_on_cpu)
    elif precision == "bf16":
        with tempfile.TemporaryDirectory() as folder:
            for name in GRAPH_FILES:
                widen(directory / name, Path(folder) / name)
            runner = OnnxRunner(Path(folder), config, is_packed=False)
            runner.device = WIDENED
            yield runner
    else:
        yield OnnxRunner(directory, config)


class OnnxRunner:
    """Sessions of the graphs in a directory: encoder and decode step, or the scorer."""

    device = "cpu"

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        num_threads: int | None = None,
        is_precise: bool = False,
        is_packed: bool = True,
    ) -> None:
        """Load encoder and decode step; the default number of threads is PyTorch's.

        Args:
            directory: Of the graphs.
            config: Of their model.
            num_threads: Of each session.
            is_precise: See `open_session`.
            is_packed: Whether their encoder takes sources packed.

        Raises:
            BundleError: If ONNX Runtime cannot, or if their inputs and outputs are not those of the bundle format.
        """
        self.config, self.is_packed = config, is_packed
        self.architecture = architecture_of(config)
        self.has_prompts = self.architecture.has_prompts
        self.directory = directory
        self.num_threads = num_threads or torch.get_num_threads()
        self.is_precise = is_precise
        self._sessions: dict[str, Session] = {}
        self.open(ENCODER_FILE, DECODER_FILE)
        # Whether the decode step can be asked for 0 candidates.
        self.can_skip_log_probs = LOG_PROBS_OUTPUT in {output.name for output in self._sessions[DECODER_FILE].get_outputs()}

    def open(self, *names: str) -> None:
        """Load these graphs and release the others; each holds its weights in a layout of its own.

        Raises:
            BundleError: If ONNX Runtime cannot, or if their inputs and outputs are not those of the bundle format.
        """
        self._sessions = {name: session for name, session in self._sessions.items() if name in names}
        for name in names:
            if name in self._sessions:
                continue
            path = self.directory / name
            try:
                session = self._open(path)
            except Exception as error:  # the library's errors have no other common base
                raise BundleError(f"{path}: ONNX Runtime cannot load it: {error}") from error
            found = tuple([value.name for value in group] for group in (session.get_inputs(), session.get_outputs()))
            if found != self._names(name, session):
                raise BundleError(f"{path}: its inputs and outputs are not those of a model with this configuration")
            self._sessions[name] = session

    def _caches(self, session: Session) -> list[Cache]:
        """Return the caches as a decode step declares them, some of which may be in 8 bits."""
        integers = {value.name for value in session.get_inputs() if value.type == "tensor(int8)"}
        caches = self.architecture.caches(self.config)
        return [msgspec.structs.replace(cache, precision="int8") if cache.name in integers else cache for cache in caches]

    def _names(self, name: str, session: Session) -> tuple[list[str], list[str]]:
        """Return the names that a graph's inputs and outputs must have."""
        names = {output.name for output in session.get_outputs()}
        outputs = {"has_queries": QUERIES_OUTPUT in names, "has_log_probs": LOG_PROBS_OUTPUT in names}
        tensors = self.architecture.tensors(self.config, self._caches(session), self.is_packed, **outputs)
        return {
            ENCODER_FILE: (tensors.encoder_inputs, tensors.encoder_outputs),
            DECODER_FILE: (tensors.decoder_inputs, tensors.decoder_outputs),
            SCORER_FILE: (tensors.scorer_inputs, tensors.scorer_outputs),
        }[name]

    def _open(self, path: Path) -> Session:
        return open_session(path, self.num_threads, is_precise=self.is_precise)

    def encode(self, sources: Sequence[list[int]]) -> list[Given]:
        """Encode sources in one batch → for each source what fills a slot: its row of each cache that the encoder gives."""
        self.open(ENCODER_FILE, DECODER_FILE)
        if self.has_prompts:
            return [self.read(source, [len(source)] if source else []) for source in sources]
        session, caches = self._sessions[ENCODER_FILE], self.architecture.caches(self.config)
        given = [cache for cache in caches if cache.role == "cross"]
        if self.is_packed:
            packed = pack(sources)
            names = [output.name for output in session.get_outputs()]
            results = dict(zip(names, session.run(None, packed), strict=True))
            return _split(results, given, packed["src_lens"])
        ids, lengths = padded(sources, self.config.pad_id)
        outputs = session.run(None, {"src_ids": ids, "src_lens": lengths})
        return [
            [_beginning(output[i], cache, length).copy() for cache, output in zip(given, outputs, strict=True)]
            for i, length in enumerate(lengths)
        ]

    def read(self, prompt: Sequence[int], pieces: Sequence[int], spare: int = SPARE_POSITIONS) -> Given:
        """Read a prompt in pieces → its rows of the caches that steps write.

        Args:
            prompt: Its ids.
            pieces: Tokens of each piece; together, all there are.
            spare: Free positions beyond its last, at least 1, within the model's limit.
        """
        self.open(ENCODER_FILE, DECODER_FILE)
        session = self._sessions[ENCODER_FILE]
        caches = [cache for cache in self.architecture.caches(self.config) if cache.role == "self"]
        buffers = noise_of(session, caches, 1, min(len(prompt) + spare, self.config.max_target_positions), 0)
        outputs = {output.name for output in session.get_outputs()}
        start = 0
        for size in pieces:
            stop = start + size
            ids, positions = np.array(prompt[start:stop], np.int64), np.arange(start, stop)
            binding = session.io_binding()
            for name, array in (("src_ids", ids), ("positions", positions), ("src_lens", np.array([stop], np.int64))):
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            bind_caches(binding, buffers, outputs, 1)
            session.run_with_iobinding(binding)
            start = stop
        assert start == len(prompt), "pieces are all of a prompt"
        return [_beginning(buffers[cache.name][0], cache, start) for cache in caches]

    def slots(self, num_slots: int, max_targets: int, max_sources: int) -> "OnnxSlots":
        """Make caches of a capacity, full of noise."""
        self.open(ENCODER_FILE, DECODER_FILE)
        session = self._sessions[DECODER_FILE]
        if self.has_prompts:  # the graph's position table may end there
            max_targets = min(max_targets, self.config.max_target_positions)
        return OnnxSlots(session, self.architecture.caches(self.config), num_slots, max_targets, max_sources, self.has_prompts)

    def score(self, pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
        """Score one right-padded batch → log-probabilities of targets' tokens `[B, T]`, attention `[B, L, T, S]`; L may be 0."""
        config = self.config
        src_ids, src_lens = padded([pair.source for pair in pairs], config.pad_id)
        labels, tgt_lens = padded([pair.target for pair in pairs], config.pad_id)
        tgt_ids = np.roll(labels, 1, 1)
        starts = [config.decoder_start_id if pair.decoder_start_id is None else pair.decoder_start_id for pair in pairs]
        tgt_ids[:, 0] = starts
        inputs = {"src_ids": src_ids, "src_lens": src_lens, "tgt_ids": tgt_ids, "tgt_lens": tgt_lens, "labels": labels}
        self.open(SCORER_FILE)
        log_probs, *attention = self._sessions[SCORER_FILE].run(None, inputs)
        none = np.zeros((len(pairs), 0, labels.shape[1], src_ids.shape[1]), np.float32)
        return log_probs, attention[0] if attention else none


class HalfRunner(OnnxRunner):
    """fp16 graphs, on CUDA where there is a device and they may run there."""

    def __init__(self, directory: Path, config: ModelConfig, is_on_cpu: bool) -> None:
        self.device = "cuda" if torch.cuda.is_available() and has_cuda() and not is_on_cpu else "cpu"
        super().__init__(directory, config, is_packed=False)

    def _open(self, path: Path) -> Session:
        return open_on_cuda(path) if self.device == "cuda" else super()._open(path)


def widen(source: Path, target: Path) -> None:
    """Write a copy of a bfloat16 graph that computes in single precision with the same weights."""
    model = onnx_ir.load(source)
    graph = model.graph
    half, single = onnx_ir.DataType.BFLOAT16, onnx_ir.DataType.FLOAT
    for value in graph.initializers.values():
        assert value.const_value is not None
        if value.const_value.dtype == half:
            value.const_value = onnx_ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for value in values:
        if value.dtype == half:
            value.dtype = single
    for node in graph:
        for attribute in list(node.attributes.values()):
            if node.op_type == "Cast" and attribute.name == "to" and attribute.value == int(half):
                node.attributes["to"] = onnx_ir.AttrInt64("to", int(single))
            assert attribute.type != onnx_ir.AttributeType.TENSOR or attribute.value.dtype != half, f"{node.name} holds a constant"
    onnx_ir.save(model, target, external_data=target.with_suffix(".weights").name)


class OnnxSlots:
    """Cache buffers of which the first n rows are bound for a step, as input and as output."""

    def __init__(
        self,
        session: Session,
        caches: Sequence[Cache],
        num_slots: int,
        max_targets: int,
        max_sources: int,
        has_prompts: bool = False,
    ) -> None:
        """Allocate buffers, full of noise, so that a step which reads beyond a row's own positions gives other results.

        Args:
            session: Of the decode step.
            caches: That it declares.
            num_slots: Rows.
            max_targets: Positions of the caches that steps write.
            max_sources: Positions of those that the encoder gives.
            has_prompts: Whether sources are given in the caches that steps write.
        """
        self.session = session
        self.outputs = {output.name for output in session.get_outputs()}
        self.caches, self.given_role = caches, "self" if has_prompts else "cross"
        self.buffers = noise_of(session, caches, num_slots, max_targets, max_sources)

    def fill(self, slot: int, parts: Given, role: Role | None = None) -> None:
        """Write into a slot what caches hold of a row's first positions, each in the shape of a row.

        Args:
            slot: Its number.
            parts: By default of the caches that a source is given in.
            role: Of other caches: `self` for what steps have written, see `Observation.caches`.
        """
        caches = [cache for cache in self.caches if cache.role == (role or self.given_role)]
        for cache, part in zip(caches, parts, strict=True):
            buffer = self.buffers[cache.name]
            buffer[slot][tuple(map(slice, part.shape))] = as_numbers(part, buffer.dtype)

    def move(self, source: int, destination: int) -> None:
        """Copy one slot's caches over another's."""
        for buffer in self.buffers.values():
            buffer[destination] = buffer[source]

    def step(self, prev_ids: Ints, positions: Ints, src_lens: Ints, num_candidates: int) -> tuple[Ints, Floats]:
        """Decode one step of the first n slots, `[n]` each → candidate ids and log-probabilities `[n, K]`, of zeros if K is 0."""
        rows = len(prev_ids)
        binding = self.session.io_binding()
        scalars = {
            "prev_ids": prev_ids,
            "positions": positions,
            "src_lens": src_lens,
            "num_candidates": np.array([num_candidates], np.int64),
        }
        for name, array in scalars.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        shape = rows, max(1, num_candidates)
        ids, log_probs = np.empty(shape, np.int64), np.empty(shape, np.float32)
        for name, result in (("candidate_ids", ids), ("candidate_log_probs", log_probs)):
            binding.bind_output(name, "cpu", 0, result.dtype, result.shape, result.ctypes.data)
        bind_caches(binding, self.buffers, self.outputs, rows)
        self.session.run_with_iobinding(binding)
        return ids, log_probs


def noise_of(
    session: Session, caches: Sequence[Cache], num_rows: int, max_targets: int, max_sources: int
) -> dict[str, CacheBuffer]:
    """Return buffers for the caches that a graph reads, full of noise, in the graph's numbers."""
    random = np.random.default_rng(0)
    numbers = {value.name: NUMBERS[value.type] for value in session.get_inputs() if value.type in NUMBERS}
    buffers = {}
    for cache in caches:
        shape = num_rows, *cache.row_shape(max_targets if cache.role == "self" else max_sources)
        buffers[cache.name] = as_numbers(random.random(shape, np.float32), np.dtype(numbers[cache.name]))
    return buffers


def as_numbers(part: NDArray[Any], dtype: np.dtype[Any]) -> CacheBuffer:
    """Convert numbers to a cache's type; in 8 bits with one scale, since only bits are compared."""
    if part.dtype == dtype:
        return part
    if dtype == np.int8:
        levels: CacheBuffer = np.clip(np.rint(part * (LEVELS / RESTORED_RANGE)), -LEVELS, LEVELS).astype(np.int8)
        return levels
    converted: CacheBuffer = part.astype(dtype)
    return converted


def bind_caches(binding: Any, buffers: dict[str, CacheBuffer], outputs: set[str], num_rows: int) -> None:
    """Bind the first rows of caches as inputs, and where they are outputs, too, in the same place."""
    for name, buffer in buffers.items():
        shape = num_rows, *buffer.shape[1:]
        binding.bind_input(name, "cpu", 0, buffer.dtype, shape, buffer.ctypes.data)
        if output_name(name) in outputs:
            binding.bind_output(output_name(name), "cpu", 0, buffer.dtype, shape, buffer.ctypes.data)


def _split(results: dict[str, NDArray[Any]], given: Sequence[Cache], lengths: Ints) -> list[Given]:
    """Split an encoder's outputs of packed sources, all caches side by side: of tokens `[P, …]`, and of sources `[B, …]`."""
    numbers: dict[str, list[NDArray[Any]]] = {}
    for name, is_of_tokens in ((PACKED_OUTPUT, True), (STATES_OUTPUT, False)):
        caches = [cache for cache in given if (cache.position_axis is not None) is is_of_tokens]
        ends = np.cumsum([cache.elements_per_position for cache in caches])
        columns = np.split(results[name], ends[:-1], 1) if caches else []
        assert not caches or results[name].shape[1] == ends[-1], "caches are as wide as declared"
        for cache, part in zip(caches, columns, strict=True):
            rows = np.split(part, lengths.cumsum()[:-1]) if is_of_tokens else list(part)
            numbers[cache.name] = [_as_row(row, cache) for row in rows]
    return [[numbers[cache.name][i] for cache in given] for i in range(len(lengths))]


def _as_row(numbers: NDArray[Any], cache: Cache) -> NDArray[Any]:
    """Reshape a cache's numbers of a source, `[S, n]`, or `[n]` where they are not of tokens, to its row."""
    sizes = [size for size in cache.shape if isinstance(size, int)]
    if cache.position_axis is None:
        return numbers.reshape(sizes)
    return np.moveaxis(numbers.reshape(len(numbers), *sizes), 0, cache.position_axis)


def _beginning(row: NDArray[Any], cache: Cache, length: int) -> NDArray[Any]:
    """Return the first positions of a cache's row, or all of it where it has none."""
    return row if cache.position_axis is None else row[(slice(None),) * cache.position_axis + (slice(length),)]
