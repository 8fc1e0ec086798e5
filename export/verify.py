"""The parity gate: runs exported graphs under ONNX Runtime against the checkpoint they came from. Export fails when it fails."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dragoman.export.bundle import DECODER_FILE, ENCODER_FILE, SCORER_FILE, BundleError, Tensors, cross_kv_names, self_kv_names
from dragoman.export.choice_parity import check_one_candidate
from dragoman.export.encoder_parity import check_sources_apart
from dragoman.export.greedy_parity import check_greedy
from dragoman.export.packing import pack
from dragoman.export.parity import Comparison, CrossKV, EagerReference, Floats, Ints, ParityError, ParityReport, drive, stretches
from dragoman.export.processor import processor_kind
from dragoman.export.progress import STEPS, Progress
from dragoman.export.row import Row
from dragoman.export.scorer_parity import Pair, ScorerComparison, check_scorer, padded
from dragoman.export.session import Session, open_session
from dragoman.export.tensor_names import output_name
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.network import Network

TOLERANCE = 1e-4
# What is restored into caches in 8 bits lies within.
RESTORED_RANGE = 4.0
NUM_ROWS, NUM_ROWS_ALONE, NUM_SLOTS = 24, 4, 8
# Beyond so many tokens, few rows are compared over all of them, and the others over their best: to sort them costs most of a step.
LARGE_VOCABULARY, NUM_WHOLE_ROWS, NUM_BEST = 2**16, 3, 512
NUM_RANDOM_SENTENCES, NUM_RANDOM_CHECKED = 200, 49
MAX_ROW_TOKENS, MAX_SENTENCE_TOKENS, MAX_LONGEST_ROW = 32, 24, 1024
SENTENCES = (
    "Two children are building a sandcastle on the beach.",
    "The train to the coast leaves at 7:45 from platform 3.",
    "She had never seen so many stars, and neither had he!",
    "Why does the kettle whistle?",
    "A man in a red jacket is repairing the roof of a small wooden house while his neighbour holds the ladder.",
    "Ein Hund läuft über die verschneite Wiese.",
    "Können Sie mir bitte sagen, wo der nächste Bahnhof ist?",
    "Le chat dort sur le canapé depuis ce matin.",
    "L’été dernier, nous avons marché jusqu’à la mer.",
    "Mañana compraré pan, queso y unas naranjas.",
    "お茶を一杯ください。",
    "Вчера весь день шёл дождь.",
    "x = 3.14159; y = -x ** 2",
    "🙂 ok",
    "a",
)


CacheBuffer = NDArray[np.number[Any]]


class OnnxSlots:
    """Cache buffers of which the first n rows are bound for a step, as input and as output."""

    def __init__(self, session: Session, config: ModelConfig, num_slots: int, max_targets: int, max_sources: int) -> None:
        """Allocate buffers, full of noise, so that a step which reads beyond a row's own keys is found out."""
        noise = np.random.default_rng(0)
        layers, heads, width = config.num_decoder_layers, config.num_heads, config.head_dim
        self.session = session
        self.outputs = {output.name for output in session.get_outputs()}
        self.levels = 127 if has_integer_caches(session) else None

        def buffers(names: Sequence[str], capacity: int) -> dict[str, CacheBuffer]:
            return {name: self._stored(noise.random((num_slots, heads, capacity, width), np.float32)) for name in names}

        self.self_kv = buffers(self_kv_names(layers), max_targets)
        self.cross_kv = buffers(cross_kv_names(layers), max_sources)

    def fill(self, slot: int, cross_kv: CrossKV) -> None:
        """See `Slots`."""
        for buffer, part in zip(self.cross_kv.values(), cross_kv, strict=True):
            buffer[slot, :, : part.shape[1]] = part

    def restore(self, slot: int, self_kv: CrossKV) -> None:
        """See `Slots`."""
        for buffer, part in zip(self.self_kv.values(), self_kv, strict=True):
            buffer[slot, :, : part.shape[1]] = self._stored(part)

    def move(self, source: int, destination: int) -> None:
        """See `Slots`."""
        for buffer in (*self.self_kv.values(), *self.cross_kv.values()):
            buffer[destination] = buffer[source]

    def step(self, prev_ids: Ints, positions: Ints, src_lens: Ints, num_candidates: int) -> tuple[Ints, Floats]:
        """See `Slots`."""
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
        for name, buffer in (*self.self_kv.items(), *self.cross_kv.items()):
            binding.bind_input(name, "cpu", 0, buffer.dtype, (rows, *buffer.shape[1:]), buffer.ctypes.data)
        ids, log_probs = np.empty((rows, num_candidates), np.int64), np.empty((rows, num_candidates), np.float32)
        for name, result in (("candidate_ids", ids), ("candidate_log_probs", log_probs)):
            binding.bind_output(name, "cpu", 0, result.dtype, result.shape, result.ctypes.data)
        for name, buffer in (*self.self_kv.items(), *self.cross_kv.items()):
            if output_name(name) not in self.outputs:
                continue
            binding.bind_output(output_name(name), "cpu", 0, buffer.dtype, (rows, *buffer.shape[1:]), buffer.ctypes.data)
        self.session.run_with_iobinding(binding)
        return ids, log_probs

    def _stored(self, part: Floats) -> CacheBuffer:
        """Return numbers as the caches have them; in 8 bits, of which nothing but bits is compared, each has the same scale."""
        if self.levels is None:
            return part
        levels: CacheBuffer = np.clip(np.rint(part * (self.levels / RESTORED_RANGE)), -self.levels, self.levels).astype(np.int8)
        return levels


def has_integer_caches(session: Session) -> bool:
    """Tell whether a decode step keeps its caches in 8 bits."""
    return any(value.type == "tensor(int8)" for value in session.get_inputs())


class OnnxRunner:
    """The graphs of a directory in CPU sessions: those that decode, or the one that scores."""

    slots_type = OnnxSlots

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        num_threads: int | None = None,
        is_precise: bool | None = None,
        is_packed: bool = True,
    ) -> None:
        """Load those that decode; without a number of threads they get as many as PyTorch has.

        Args:
            directory: Where they are.
            config: Of their model.
            num_threads: Of each session.
            is_precise: See `open_session`.
            is_packed: Whether their encoder takes sources packed.

        Raises:
            BundleError: If ONNX Runtime cannot, or if their inputs and outputs are not those of the bundle format.
        """
        self.config, self.is_packed = config, is_packed
        self.directory = directory
        self.num_threads = num_threads or torch.get_num_threads()
        self.is_precise = is_precise
        self._sessions: dict[str, Session] = {}
        inputs_outputs = Tensors.of_layers(config.num_decoder_layers, self.is_packed)
        self._expected = {
            ENCODER_FILE: (inputs_outputs.encoder_inputs, inputs_outputs.encoder_outputs),
            DECODER_FILE: (inputs_outputs.decoder_inputs, inputs_outputs.decoder_outputs),
            SCORER_FILE: (inputs_outputs.scorer_inputs, inputs_outputs.scorer_outputs),
        }
        self.open(ENCODER_FILE, DECODER_FILE)

    def open(self, *names: str) -> None:
        """Load these graphs and let go of the others; each holds its weights in a layout of its own.

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
            except Exception as error:  # the library's errors have no common base but this
                raise BundleError(f"{path}: ONNX Runtime cannot load it: {error}") from error
            found = tuple([value.name for value in group] for group in (session.get_inputs(), session.get_outputs()))
            if found != self._names(name, session):
                raise BundleError(f"{path}: its inputs and outputs are not those of a model with this configuration")
            self._sessions[name] = session

    def _names(self, name: str, session: Session) -> tuple[list[str], list[str]]:
        """Return what a graph's inputs and outputs have to be called."""
        inputs, outputs = self._expected[name]
        if name == DECODER_FILE and has_integer_caches(session):
            outputs = [*outputs, *map(output_name, cross_kv_names(self.config.num_decoder_layers))]
        return inputs, outputs

    def _open(self, path: Path) -> Session:
        return open_session(path, self.num_threads, is_precise=self.is_precise)

    def encode(self, sources: Sequence[list[int]]) -> list[CrossKV]:
        """See `Runner`."""
        self.open(ENCODER_FILE, DECODER_FILE)
        session, heads = self._sessions[ENCODER_FILE], self.config.num_heads
        if self.is_packed:
            (rows,) = session.run(None, packed := pack(sources))
            parts = np.split(rows, packed["src_lens"].cumsum()[:-1])
            return [list(part.reshape(len(part), -1, heads, self.config.head_dim).transpose(1, 2, 0, 3)) for part in parts]
        ids, lengths = padded(sources, self.config.pad_id)
        outputs = session.run(None, {"src_ids": ids, "src_lens": lengths})
        return [[output[i, :, :length].copy() for output in outputs] for i, length in enumerate(lengths)]

    def slots(self, num_slots: int, max_targets: int, max_sources: int) -> OnnxSlots:
        """See `Runner`."""
        self.open(ENCODER_FILE, DECODER_FILE)
        return self.slots_type(self._sessions[DECODER_FILE], self.config, num_slots, max_targets, max_sources)

    def score(self, pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
        """See `scorer_parity.Scorer`."""
        config = self.config
        src_ids, src_lens = padded([pair.source for pair in pairs], config.pad_id)
        labels, tgt_lens = padded([pair.target for pair in pairs], config.pad_id)
        tgt_ids = np.roll(labels, 1, 1)
        starts = [config.decoder_start_id if pair.decoder_start_id is None else pair.decoder_start_id for pair in pairs]
        tgt_ids[:, 0] = starts
        inputs = {"src_ids": src_ids, "src_lens": src_lens, "tgt_ids": tgt_ids, "tgt_lens": tgt_lens, "labels": labels}
        self.open(SCORER_FILE)
        log_probs, attention = self._sessions[SCORER_FILE].run(None, inputs)
        return log_probs, attention


def verify(checkpoint: Checkpoint, directory: Path, tolerance: float = TOLERANCE, progress: Progress | None = None) -> ParityReport:
    """Compare the graphs in a directory with the checkpoint.

    Five things must hold. Teacher-forced rows of many lengths, batched at different positions, give the log-probabilities of eager
    full-sequence passes: over the whole vocabulary, or if that is large, some over the whole and the others over their best, which
    no other token may belong to. Some of them, decoded alone, give bit-identical results, and asked for one candidate the first of
    those they gave. Sources, too, give the same bits alone and in any mixture (see `encoder_parity`). Greedy decoding takes at each
    step the token that the eager model would take, except at a tie within the tolerance. The scorer gives the same rows the eager
    model's log-probabilities and attention weights. Where eager single precision itself is off by more than the tolerance, graphs
    may be as far from double precision as it is, times a small factor (see `double`).

    Raises:
        BundleError: If the graphs cannot be loaded or have other inputs and outputs.
        ParityError: Naming the figure that is off.
    """
    runner = OnnxRunner(directory, checkpoint.model.config)
    return compare(checkpoint, runner, checkpoint.model, tolerance, is_exact_alone=True, progress=progress)


def compare(
    checkpoint: Checkpoint,
    runner: OnnxRunner,
    model: Network,
    tolerance: float,
    *,
    is_exact_alone: bool,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare graphs with a model; `verify` says what must hold.

    Args:
        checkpoint: Its tokeniser makes the sentences.
        runner: The graphs.
        model: What they are compared with.
        tolerance: Largest difference of a log-probability or an attention weight.
        is_exact_alone: Whether a row alone must give the bits that it gives in a batch, which CUDA does not promise.
        progress: Told what has been compared.

    Raises:
        ParityError: Naming the figure that is off.
    """
    progress = progress or Progress(STEPS["fp32"])
    config = model.config
    reference, rows = EagerReference(model), forced_rows(config)
    driven = [part for row in rows for part in stretches(reference, row)]
    comparison = Comparison(reference, tolerance)
    if is_exact_alone:
        check_sources_apart([runner], rows)
    num_steps = 0
    for part, num_candidates in by_candidates(driven, config.target_vocab_size):
        num_steps += drive(runner, part, NUM_SLOTS, num_candidates, False, comparison.observe)
        if hardest := _hardest(part)[: NUM_ROWS_ALONE * is_exact_alone]:
            for row in hardest:
                check_alone(runner, row, num_candidates)
            check_one_candidate(runner, hardest, NUM_SLOTS)
    progress.done("compare log-probabilities")
    sources = greedy_sources(checkpoint)
    num_tokens, num_mismatches = check_greedy(runner, reference, sources, tolerance)
    progress.done("compare greedy answers")
    pairs = [Pair(row.source, [*row.inputs[1:], config.eos_id]) for row in rows]
    scores = ScorerComparison(reference, tolerance)
    check_scorer(runner, pairs, scores, NUM_SLOTS, NUM_ROWS_ALONE * is_exact_alone)
    progress.done("compare scores")
    return ParityReport(
        tolerance=max(comparison.largest_allowed, scores.largest_allowed),
        max_log_prob_difference=comparison.max_difference,
        num_rows=len(rows),
        num_whole_rows=NUM_WHOLE_ROWS if config.target_vocab_size > LARGE_VOCABULARY else len(rows),
        num_positions=comparison.num_positions,
        num_steps=num_steps,
        max_batch_rows=comparison.max_batch_rows,
        max_position=comparison.max_position,
        num_rows_alone=NUM_ROWS_ALONE * is_exact_alone,
        num_sentences=len(sources),
        num_tokens=num_tokens,
        num_token_mismatches=num_mismatches,
        num_pairs=len(pairs),
        max_score_difference=scores.max_log_prob_difference,
        max_attention_difference=scores.max_attention_difference,
        processor=processor_kind(),
    )


def forced_rows(config: ModelConfig) -> list[Row]:
    """Draw teacher-forced rows: random lengths, the shortest there can be, and one as long as the model goes (up to 1,024)."""
    random = np.random.default_rng(1)

    def row(num_source: int, num_target: int) -> Row:
        source = _random_ids(random, config.source_vocab_size, config.pad_id, num_source - 1)
        target = _random_ids(random, config.target_vocab_size, config.pad_id, num_target - 1)
        return Row([*source, config.eos_id], [config.decoder_start_id, *target], num_target)

    max_source, max_target = min(config.max_source_positions, MAX_ROW_TOKENS), min(config.max_target_positions, MAX_ROW_TOKENS)
    lengths = [(int(random.integers(1, max_source + 1)), int(random.integers(1, max_target + 1))) for _ in range(NUM_ROWS - 2)]
    longest = min(config.max_source_positions, MAX_LONGEST_ROW), min(config.max_target_positions, MAX_LONGEST_ROW)
    return [row(*pair) for pair in ((1, max_target), *lengths[: NUM_ROWS // 2], longest, *lengths[NUM_ROWS // 2 :])]


def by_candidates(rows: Sequence[Row], vocab_size: int) -> list[tuple[list[Row], int]]:
    """Return rows with how many candidates they are compared over: all, or for most rows of a large vocabulary the best."""
    if vocab_size <= LARGE_VOCABULARY:
        return [(list(rows), vocab_size)]
    whole = _hardest(rows)[:NUM_WHOLE_ROWS]
    rest = [row for row in rows if all(row is not other for other in whole)]
    return [(whole, vocab_size), (rest, NUM_BEST)]


def greedy_sources(checkpoint: Checkpoint) -> list[list[int]]:
    """Return sources without end-of-sequence: random ids of many lengths, and sentences."""
    config = checkpoint.model.config
    random = np.random.default_rng(2)
    room = config.max_source_positions - 1
    lengths = random.integers(0, min(room, MAX_SENTENCE_TOKENS) + 1, NUM_RANDOM_SENTENCES)
    sources = [_random_ids(random, config.source_vocab_size, config.pad_id, int(length)) for length in lengths]
    # Of the random ones the last: these are also what int8 is calibrated with.
    return sources[-NUM_RANDOM_CHECKED:] + [ids[:room] for ids in checkpoint.tokenizers.source.encode_batch(SENTENCES)]


def _random_ids(random: np.random.Generator, vocab_size: int, pad_id: int, length: int) -> list[int]:
    """Draw ids, padding excluded."""
    ids: list[int] = (pad_id + 1 + random.integers(0, vocab_size - 1, length)).tolist()
    return [i % vocab_size for i in ids]


def _hardest(rows: Sequence[Row]) -> list[Row]:
    """Return rows in the order in which they are worth decoding again: the end of a long row, then rows from their beginning."""
    ends = [row for row in rows if row.stretch is not None][-1:]
    return ends + [row for row in rows if row.stretch is None]


def check_alone(runner: OnnxRunner, row: Row, num_candidates: int) -> None:
    """Decode a row again by itself, in caches with no room to spare, and compare every bit.

    Raises:
        ParityError: If one differs.
    """
    alone = row.again()
    drive(runner, [alone], 1, num_candidates, True)
    if alone.digest != row.digest:
        raise ParityError(
            f"a row with {len(row.source)} source and {row.num_steps} target tokens does not give the same bits alone as in a batch"
        )
