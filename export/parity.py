"""What export must prove: the graphs answer as the eager model does, whatever else is in the batch.

Rows go through a fixed number of slots as a server's requests do: a row that ends makes room for the next one, so rows stand at
different positions, and stale keys and values lie beyond each row's own. How the graphs are run is not here: see `verify`.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from dragoman.export.bundle import Parity, Quality
from dragoman.model.attention import split_heads
from dragoman.model.errors import InputError
from dragoman.model.transformer import FullAttention, Transformer

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
CrossKV = list[Floats]
# Positions whose log-probabilities the eager model works out together; of a long row, those it is whole up to and those of its end.
BLOCK_POSITIONS, LONG_ROW, END_POSITIONS = 32, 64, 16


class ParityError(InputError):
    """The graphs do not answer as the checkpoint does; the message names the figure that is off."""


class ParityReport(Struct, frozen=True, forbid_unknown_fields=True):
    """What was compared and how close it was.

    Attributes:
        tolerance: Largest difference of a log-probability or an attention weight that is accepted.
        max_log_prob_difference: Largest there was, over every token of the vocabulary at every compared position.
        num_rows: Teacher-forced rows compared with eager full-sequence passes.
        num_positions: Positions compared in them.
        num_steps: Decode steps they took, together in a batch.
        max_batch_rows: Rows of the fullest step.
        max_position: Last position compared; one row goes as far as the model can.
        num_rows_alone: Rows decoded a second time by themselves, with bit-identical results.
        num_sentences: Sources decoded greedily by the graphs and by the eager model.
        num_tokens: Tokens these gave.
        num_token_mismatches: Sources whose tokens parted, each where eager's two best tokens were within the tolerance.
        num_pairs: Pairs of source and target scored, see `scorer_parity`.
        max_score_difference: Largest difference of a target token's log-probability between the scorer and the eager model.
        max_attention_difference: The same of an attention weight.
        device: What the graphs ran on, and what of them did not run.
        processor: The kind of processor that proved them, see `processor.processor_kind`.
        quality: What 8-bit arithmetic changes; None where there is none.
    """

    tolerance: float
    max_log_prob_difference: float
    num_rows: int
    num_positions: int
    num_steps: int
    max_batch_rows: int
    max_position: int
    num_rows_alone: int
    num_sentences: int
    num_tokens: int
    num_token_mismatches: int
    num_pairs: int
    max_score_difference: float
    max_attention_difference: float
    device: str = "cpu"
    processor: str | None = None
    quality: Quality | None = None

    def headline(self) -> Parity:
        """Return what the manifest quotes."""
        return Parity(**{name: getattr(self, name) for name in Parity.__struct_fields__})


class Slots(Protocol):
    """Rows of cache, of which the first n take part in a step."""

    def fill(self, slot: int, cross_kv: CrossKV) -> None:
        """Give a slot to a new row with this source."""
        ...

    def restore(self, slot: int, self_kv: CrossKV) -> None:
        """Give a slot the keys and values of a row's first positions, `[H, T, Dh]`, layer by layer."""
        ...

    def move(self, source: int, destination: int) -> None:
        """Copy one slot's caches over another's."""
        ...

    def step(self, prev_ids: Ints, positions: Ints, src_lens: Ints, num_candidates: int) -> tuple[Ints, Floats]:
        """Decode one step of the first n slots, `[n]` each → candidate ids and log-probabilities `[n, K]`."""
        ...


class Runner(Protocol):
    """The encoder and the decode step, ready to run."""

    def encode(self, sources: Sequence[list[int]]) -> list[CrossKV]:
        """Encode sources in one right-padded batch → per source, the cross keys and values `[H, S, Dh]` of all layers."""
        ...

    def slots(self, num_slots: int, max_targets: int, max_sources: int) -> Slots:
        """Make caches of a capacity, full of noise."""
        ...


@dataclass(frozen=True, slots=True)
class EagerStretch:
    """A stretch of a long row: it begins where the eager model has left off, and need not be driven there step by step.

    Attributes:
        start: Its first position.
        self_kv: The eager model's keys and values of the positions before it, `[H, start, Dh]`, layer by layer.
        hidden: The eager model's hidden states of the whole row, `[T, d_model]`.
    """

    start: int
    self_kv: CrossKV
    hidden: Tensor


@dataclass(slots=True)
class Row:
    """One sequence on its way through the slots.

    Attributes:
        source: Source ids, end-of-sequence included.
        inputs: What is fed, start token first; a greedy row grows by what it draws.
        num_steps: Where it ends at the latest: the position after its last step.
        eos_id: Token that ends a greedy row early; None in a teacher-forced row.
        stretch: What a row begins with that does not begin at position 0; see `EagerStretch`.
        log_probs: Of the first candidate, step by step.
        digest: Of every candidate and log-probability it was given.
    """

    source: list[int]
    inputs: list[int]
    num_steps: int
    eos_id: int | None = None
    stretch: EagerStretch | None = None
    log_probs: list[float] = field(default_factory=list)
    digest: str = ""

    @property
    def position(self) -> int:
        """The position of the token to feed next."""
        return (self.stretch.start if self.stretch is not None else 0) + len(self.log_probs)

    @property
    def is_done(self) -> bool:
        """Whether it leaves its slot."""
        return self.position == self.num_steps or (self.eos_id is not None and self.inputs[-1] == self.eos_id and self.position > 0)

    def again(self) -> "Row":
        """Return a teacher-forced row that has yet to take the same way."""
        return Row(self.source, self.inputs, self.num_steps, stretch=self.stretch)

    def take(self, ids: Ints, log_probs: Floats) -> None:
        """Take one step's candidates, `[K]` each."""
        self.digest = hashlib.sha256(self.digest.encode() + ids.tobytes() + log_probs.tobytes()).hexdigest()
        self.log_probs.append(float(log_probs[0]))
        if self.eos_id is not None:
            self.inputs.append(int(ids[0]))


Observer = Callable[[list[Row], Ints, Floats], None]


def drive(
    runner: Runner, rows: Sequence[Row], num_slots: int, num_candidates: int, is_tight: bool, observe: Observer | None = None
) -> int:
    """Take rows through slots to their ends; return the number of steps.

    Args:
        runner: The graphs.
        rows: In order of admission.
        num_slots: N at the most.
        num_candidates: K.
        is_tight: Give the caches exactly the room the longest row needs, instead of more.
        observe: Called before each step's rows take their candidates `[n, K]`.
    """
    spare = 0 if is_tight else 3
    slots = runner.slots(num_slots, max(row.num_steps for row in rows) + spare, max(len(row.source) for row in rows) + spare)
    encoded = _encode(runner, rows, num_slots)
    waiting = deque((row, encoded[tuple(row.source)]) for row in rows)
    active: list[Row] = []
    num_steps = 0
    while active or waiting:
        while waiting and len(active) < num_slots:
            row, cross_kv = waiting.popleft()
            slots.fill(len(active), cross_kv)
            if row.stretch is not None:
                slots.restore(len(active), row.stretch.self_kv)
            active.append(row)
        prev_ids = np.array([row.inputs[row.position] for row in active], np.int64)
        positions = np.array([row.position for row in active], np.int64)
        src_lens = np.array([len(row.source) for row in active], np.int64)
        ids, log_probs = slots.step(prev_ids, positions, src_lens, num_candidates)
        num_steps += 1
        if observe is not None:
            observe(active, ids, log_probs)
        for i, row in enumerate(active):
            row.take(ids[i], log_probs[i])
        for slot in reversed(range(len(active))):
            if active[slot].is_done:
                last = active.pop()
                if slot < len(active):
                    slots.move(len(active), slot)
                    active[slot] = last
    return num_steps


def _encode(runner: Runner, rows: Sequence[Row], max_rows: int) -> dict[tuple[int, ...], CrossKV]:
    """Encode each source once, in ragged batches of rows as they come; a long one by itself, for the others would be padding."""
    sources = list(dict.fromkeys(tuple(row.source) for row in rows))
    short = [source for source in sources if len(source) <= LONG_ROW]
    batches = [short[start : start + max_rows] for start in range(0, len(short), max_rows)]
    batches += [[source] for source in sources if len(source) > LONG_ROW]
    encoded = (zip(batch, runner.encode([list(source) for source in batch]), strict=True) for batch in batches)
    return {source: cross_kv for batch in encoded for source, cross_kv in batch}


class EagerReference:
    """Next-token log-probabilities of teacher-forced rows, from one full-sequence pass of the eager model for each row."""

    def __init__(self, model: Transformer) -> None:
        """Use a model in evaluation mode."""
        self.model = model
        self.hidden: dict[int, Tensor] = {}
        self.blocks: dict[int, tuple[int, Floats]] = {}

    @torch.inference_mode()
    def log_probs(self, rows: Sequence[Row]) -> Floats:
        """Return what each row's next step should give, `[n, V]`, padding at -inf."""
        return np.stack([self._next(row) for row in rows])

    def _next(self, row: Row) -> Floats:
        """Return one row's, `[V]`; a block of positions is worked out together, for each product reads the whole vocabulary."""
        start, block = self.blocks.get(id(row), (row.position, None))
        if block is None or row.position >= start + len(block):
            hidden = self._hidden(row)[row.position : min(row.position + BLOCK_POSITIONS, row.num_steps)]
            block = self.model.decoder.next_token_logits(hidden).log_softmax(-1).numpy()
            start = row.position
            self.blocks[id(row)] = start, block
        log_probs: Floats = block[row.position - start]
        if row.position == row.num_steps - 1:
            self.hidden.pop(id(row), None)
            del self.blocks[id(row)]
        return log_probs

    def _hidden(self, row: Row) -> Tensor:
        """Return a row's hidden states `[T, d_model]`, kept until its last step."""
        if row.stretch is not None:
            return row.stretch.hidden
        hidden = self.hidden.get(id(row))
        if hidden is None:
            memory, mask = self.model.encode(torch.tensor([row.source]), torch.tensor([len(row.source)]))
            hidden = self.hidden[id(row)] = self.model.decode(torch.tensor([row.inputs]), memory, mask)[0]
        return hidden


class _Keeper(FullAttention):
    """The eager backend, which also keeps the decoder's keys and values, `[1, H, T, Dh]` each, layer by layer."""

    def __init__(self, num_heads: int, source_mask: Tensor, cross_kv: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(num_heads, source_mask, cross_kv)
        self.self_kv: list[Tensor] = []

    def self_attention(self, layer: int, qkv: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        self.self_kv += [split_heads(part, self.num_heads) for part in qkv.chunk(3, -1)[1:]]
        return super().self_attention(layer, qkv)


@torch.inference_mode()
def stretches(model: Transformer, row: Row) -> list[Row]:
    """Cut a long row into its beginning, its end, and what lies around every power of two between them.

    Steps in between would read every weight once each and prove little more: a step's arithmetic depends on its position through
    the position table alone, of which the scorer, which has the same one, proves every line (see `scorer_parity`).

    Args:
        model: In evaluation mode.
        row: Teacher-forced; one of up to `LONG_ROW` positions stays whole.

    Returns:
        The stretches; the keys and values before each are the eager model's.
    """
    if row.num_steps <= LONG_ROW:
        return [row]
    memory, mask = model.encode(torch.tensor([row.source]), torch.tensor([len(row.source)]))
    keeper = _Keeper(model.config.num_heads, mask, model.decoder.project_memory(memory))
    hidden = model.decoder(torch.tensor([row.inputs]), torch.arange(len(row.inputs)), keeper)[0]
    powers = [2**i for i in range(LONG_ROW.bit_length() - 1, row.num_steps.bit_length()) if 2**i < row.num_steps - 2]
    spans = [(power - 2, power + 2) for power in powers] + [(row.num_steps - END_POSITIONS, row.num_steps)]
    parts = [Row(row.source, row.inputs[: LONG_ROW // 2], LONG_ROW // 2)]
    for start, stop in spans:
        past = [part[0, :, :start].numpy() for part in keeper.self_kv]
        parts.append(Row(row.source, row.inputs, stop, stretch=EagerStretch(start, past, hidden)))
    return parts


class Comparison:
    """Compares every step over the whole vocabulary, and remembers the extremes."""

    def __init__(self, model: Transformer, tolerance: float) -> None:
        """Compare with a model."""
        self.reference = EagerReference(model)
        self.pad_id = model.config.pad_id
        self.tolerance = tolerance
        self.max_difference = 0.0
        self.max_batch_rows = 0
        self.max_position = 0
        self.num_positions = 0

    def observe(self, rows: list[Row], ids: Ints, log_probs: Floats) -> None:
        """Compare one step's candidates, K = V.

        Raises:
            ParityError: If a log-probability is off, the order is wrong, or padding is a candidate.
        """
        expected = self.reference.log_probs(rows)
        found = np.full_like(expected, np.nan)
        np.put_along_axis(found, ids, log_probs, 1)
        if not (np.isneginf(found[:, self.pad_id]).all() and np.isneginf(expected[:, self.pad_id]).all()):
            raise ParityError("padding has a log-probability above -inf")
        found[:, self.pad_id] = expected[:, self.pad_id] = 0
        differences = np.abs(found - expected).max(1)
        for row, difference in zip(rows, differences.tolist(), strict=True):
            if not difference <= self.tolerance:  # also refuses NaN
                raise ParityError(
                    f"log-probabilities are off by {difference:.3g} at position {row.position} of a row with {len(row.source)} "
                    f"source tokens; the tolerance is {self.tolerance:.3g}"
                )
        if not is_ordered(ids, log_probs):
            raise ParityError("candidates are not in order of log-probability, the lower id first where they are equal")
        self.max_difference = max(self.max_difference, *differences.tolist())
        self.max_batch_rows = max(self.max_batch_rows, len(rows))
        self.max_position = max(self.max_position, *(row.position for row in rows))
        self.num_positions += len(rows)


def is_ordered(ids: Ints, log_probs: Floats) -> bool:
    """Tell whether candidates `[n, K]` go down, and equal ones go up in id."""
    is_lower = log_probs[:, 1:] < log_probs[:, :-1]
    is_tie = (log_probs[:, 1:] == log_probs[:, :-1]) & (ids[:, 1:] > ids[:, :-1])
    return bool((is_lower | is_tie).all())
