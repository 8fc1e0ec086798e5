"""What export must prove: the graphs answer as the eager model does, whatever else is in the batch.

Rows go through a fixed number of slots as a server's requests do: a row that ends makes room for the next one, so rows stand at
different positions, and stale keys and values lie beyond each row's own. How the graphs are run is not here: see `verify`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from dragoman.export.double import Allowance, DoublePrecision
from dragoman.export.eager_pass import EagerPass
from dragoman.export.eager_pass import Floats as Floats
from dragoman.export.eager_pass import Given as Given
from dragoman.export.evidence import Parity, Quality, ShortlistParity
from dragoman.export.row import EagerStretch, Row
from dragoman.export.row import Ints as Ints
from dragoman.model.errors import InputError
from dragoman.model.networks.network import Network

# Positions whose log-probabilities the eager model works out together; of a long row, those it is whole up to and those of its end.
BLOCK_POSITIONS, LONG_ROW, END_POSITIONS = 32, 64, 16


class ParityError(InputError):
    """The graphs do not answer as the checkpoint does; the message names the figure that is off."""


class ParityReport(Struct, frozen=True, forbid_unknown_fields=True):
    """What was compared and how close it was."""

    tolerance: float  # largest difference of a log-probability or an attention weight that is accepted
    max_log_prob_difference: float  # largest there was, over every candidate at every compared position
    num_rows: int  # teacher-forced rows compared with eager full-sequence passes
    num_positions: int  # positions compared in them
    num_steps: int  # decode steps they took, together in a batch
    max_batch_rows: int  # rows of the fullest step
    max_position: int  # last position compared; one row goes as far as the model can
    num_rows_alone: int  # rows decoded a second time by themselves, with bit-identical results
    num_sentences: int  # sources decoded greedily by the graphs and by the eager model
    num_tokens: int  # tokens these gave
    num_token_mismatches: int  # sources whose tokens parted, each where eager's two best tokens were within the tolerance
    num_pairs: int  # pairs of source and target scored, see `scorer_parity`
    max_score_difference: float  # largest difference of a target token's log-probability between the scorer and the eager model
    max_attention_difference: float  # the same of an attention weight
    device: str = "cpu"  # what the graphs ran on, and what of them did not run
    processor: str | None = None  # the kind of processor that proved them, see `processor.processor_kind`
    # Of these, rows, or stretches of them, whose candidates were the whole vocabulary; the others' were the best.
    num_whole_rows: int | None = None
    quality: Quality | None = None  # what 8-bit arithmetic changes; None where there is none
    # How close the decode step with a shortlist is to the one without; None where there is none.
    shortlist: ShortlistParity | None = None

    def headline(self) -> Parity:
        """Return what the manifest quotes."""
        return Parity(**{name: getattr(self, name) for name in Parity.__struct_fields__})


class Slots(Protocol):
    """Rows of cache, of which the first n take part in a step."""

    def fill(self, slot: int, given: Given) -> None:
        """Give a slot to a new row with this source."""
        ...

    def restore(self, slot: int, kept: Given) -> None:
        """Give a slot what the caches that steps write hold after a row's first positions, see `Observation.caches`."""
        ...

    def move(self, source: int, destination: int) -> None:
        """Copy one slot's caches over another's."""
        ...

    def step(self, prev_ids: Ints, positions: Ints, src_lens: Ints, num_candidates: int) -> tuple[Ints, Floats]:
        """Decode one step of the first n slots, `[n]` each → candidate ids and log-probabilities `[n, K]`."""
        ...


class Runner(Protocol):
    """The encoder and the decode step, ready to run."""

    has_prompts: bool  # whether caches that steps write hold a row's source, too

    def encode(self, sources: Sequence[list[int]]) -> list[Given]:
        """Encode sources in one batch → per source what fills a slot: the row, as long as it is, of each cache that is given."""
        ...

    def slots(self, num_slots: int, max_targets: int, max_sources: int) -> Slots:
        """Make caches of a capacity, full of noise."""
        ...


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
    num_targets = max(row.num_steps + len(row.source) * runner.has_prompts for row in rows)
    slots = runner.slots(num_slots, num_targets + spare, max(len(row.source) for row in rows) + spare)
    encoded = _encode(runner, rows, num_slots)
    waiting = deque((row, encoded[tuple(row.source)]) for row in rows)
    active: list[Row] = []
    num_steps = 0
    while active or waiting:
        while waiting and len(active) < num_slots:
            row, given = waiting.popleft()
            slots.fill(len(active), given)
            if row.stretch is not None and row.stretch.start:
                slots.restore(len(active), row.stretch.whole.kept(row.stretch.start))
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


def _encode(runner: Runner, rows: Sequence[Row], max_rows: int) -> dict[tuple[int, ...], Given]:
    """Encode each source once, in ragged batches of rows as they come; a long one by itself, for the others would be padding."""
    sources = list(dict.fromkeys(tuple(row.source) for row in rows))
    short = [source for source in sources if len(source) <= LONG_ROW]
    batches = [short[start : start + max_rows] for start in range(0, len(short), max_rows)]
    batches += [[source] for source in sources if len(source) > LONG_ROW]
    encoded = (zip(batch, runner.encode([list(source) for source in batch]), strict=True) for batch in batches)
    return {source: given for batch in encoded for source, given in batch}


class EagerReference:
    """One full-sequence pass of the eager model for each row, and the next-token log-probabilities that come of it."""

    def __init__(self, model: Network) -> None:
        """Use a model in evaluation mode."""
        self.model = model
        self.blocks: dict[int, tuple[int, Floats]] = {}
        self.double = DoublePrecision(model)
        self._passes: dict[tuple[tuple[int, ...], int, tuple[int, ...]], EagerPass] = {}

    def whole(self, source: list[int], target: list[int], first: int | None = None) -> EagerPass:
        """Return the pass over a source and a target, see `EagerPass`; the same one every time."""
        first = self.model.config.decoder_start_id if first is None else first
        key = tuple(source), first, tuple(target)
        if key not in self._passes:
            self._passes[key] = EagerPass(self.model, source, target, len(target) > LONG_ROW, first)
        return self._passes[key]

    def allowance(self, whole: EagerPass) -> Allowance:
        """Return how far results may be from double precision."""
        return self.double.allowance(whole, self._passes.values())

    def of_row(self, row: Row) -> EagerPass:
        """Return the pass over a teacher-forced row, which end-of-sequence follows."""
        if row.stretch is not None:
            return row.stretch.whole
        return self.whole(row.source, [*row.inputs[1:], self.model.config.eos_id], row.inputs[0])

    def log_probs(self, rows: Sequence[Row]) -> Floats:
        """Return what each row's next step should give, `[n, V]`."""
        return np.stack([self._next(row) for row in rows])

    def _next(self, row: Row) -> Floats:
        """Return one row's, `[V]`; a block of positions is worked out together, for each product reads the whole vocabulary."""
        start, block = self.blocks.get(id(row), (row.position, None))
        if block is None or row.position >= start + len(block):
            start = row.position
            block = self.of_row(row).log_probs(start, min(start + BLOCK_POSITIONS, row.num_steps))
            self.blocks[id(row)] = start, block
        log_probs: Floats = block[row.position - start]
        if row.position == row.num_steps - 1:
            del self.blocks[id(row)]
        return log_probs


def stretches(reference: EagerReference, row: Row) -> list[Row]:
    """Cut a long row into its beginning, its end, and what lies around every power of two between them.

    Steps in between would read every weight once each and prove little more: a step's arithmetic depends on its position through
    the position table alone, of which the scorer, which has the same one, proves every line (see `scorer_parity`).

    Args:
        reference: Makes the eager model's pass over it.
        row: Teacher-forced; one of up to `LONG_ROW` positions stays whole.

    Returns:
        The stretches; what caches hold before each is the eager model's.
    """
    if row.num_steps <= LONG_ROW:
        return [row]
    powers = [2**i for i in range(LONG_ROW.bit_length() - 1, row.num_steps.bit_length()) if 2**i < row.num_steps - 2]
    spans = [(0, LONG_ROW // 2), *((power - 2, power + 2) for power in powers), (row.num_steps - END_POSITIONS, row.num_steps)]
    whole = reference.of_row(row)
    return [Row(row.source, row.inputs, stop, stretch=EagerStretch(start, whole)) for start, stop in spans]


class Comparison:
    """Compares every step, and remembers the extremes.

    Steps that give all V candidates are compared over the whole vocabulary. Those that give fewer are compared over these, and
    whatever token is not among them must not be one of the likeliest by more than the tolerance.
    """

    def __init__(self, reference: EagerReference, tolerance: float) -> None:
        """Compare with the eager model."""
        self.reference = reference
        self.pad_id = reference.model.config.pad_id
        self.is_padding_predicted = reference.model.config.padding == "predicted"
        self.tolerance = tolerance
        self.largest_allowed = tolerance
        self.max_difference = 0.0
        self.max_batch_rows = 0
        self.max_position = 0
        self.num_positions = 0
        self.num_in_double = 0

    def observe(self, rows: list[Row], ids: Ints, log_probs: Floats) -> None:
        """Compare one step's candidates.

        Raises:
            ParityError: If a log-probability is off, the order is wrong, or padding is a candidate of a model that predicts none.
        """
        expected = self.reference.log_probs(rows)
        found = np.full_like(expected, np.nan)
        np.put_along_axis(found, ids, log_probs, 1)
        if not self.is_padding_predicted:
            refuse_padding(found, self.pad_id)
        differences = self._differences(found, expected, log_probs)
        for i, row in enumerate(rows):
            if not differences[i] <= self.tolerance:  # also refuses NaN
                differences[i] = self._judge(row, found[i : i + 1], log_probs[i : i + 1], float(differences[i]))
        if not is_ordered(ids, log_probs):
            raise ParityError("candidates are not in order of log-probability, the lower id first where they are equal")
        self.max_difference = max(self.max_difference, float(differences.max()))
        self.max_batch_rows = max(self.max_batch_rows, len(rows))
        self.max_position = max(self.max_position, *(row.position for row in rows))
        self.num_positions += len(rows)

    def _differences(self, found: Floats, expected: Floats, log_probs: Floats) -> Floats:
        """Return the largest difference of each row's candidates, `[n]`; NaN where one that must be there is not."""
        num_candidates, vocab_size = log_probs.shape[1], found.shape[1]
        if not self.is_padding_predicted:
            found, expected = (np.delete(table, self.pad_id, 1) for table in (found, expected))
        is_absent = np.isnan(found)
        differences = np.abs(found - expected)
        if num_candidates < vocab_size:
            beyond = np.maximum(expected - log_probs[:, -1:], 0)
            differences = np.where(is_absent, beyond, differences)
            differences[is_absent.sum(1) != found.shape[1] - num_candidates] = np.nan
        largest: Floats = differences.max(1)
        return largest

    def _judge(self, row: Row, found: Floats, log_probs: Floats, difference: float) -> float:
        """Compare one row's candidates, `[1, V]` and `[1, K]`, with double precision.

        Raises:
            ParityError: If they are off then, too.
        """
        allowed, double = self.tolerance, self.reference.double
        if difference < np.inf:
            whole = self.reference.of_row(row)
            allowed = max(self.tolerance, self.reference.allowance(whole).log_prob)
            precise = double.of(whole).log_probs(row.position, row.position + 1)
            difference = float(self._differences(found, precise, log_probs)[0])
            self.num_in_double += 1
            self.largest_allowed = max(self.largest_allowed, allowed)
        if not difference <= allowed:
            raise ParityError(
                f"log-probabilities are off by {difference:.3g} at position {row.position} of a row with {len(row.source)} "
                f"source tokens; the tolerance is {allowed:.3g}"
            )
        return difference


def refuse_padding(found: Floats, pad_id: int) -> None:
    """Refuse log-probabilities `[n, V]` above -inf, where they are known, of padding that is never predicted.

    Raises:
        ParityError: If there are some.
    """
    of_padding = found[:, pad_id]
    if not np.isneginf(of_padding[~np.isnan(of_padding)]).all():
        raise ParityError("padding has a log-probability above -inf")


def is_ordered(ids: Ints, log_probs: Floats) -> bool:
    """Tell whether candidates `[n, K]` go down, and equal ones go up in id."""
    is_lower = log_probs[:, 1:] < log_probs[:, :-1]
    is_tie = (log_probs[:, 1:] == log_probs[:, :-1]) & (ids[:, 1:] > ids[:, :-1])
    return bool((is_lower | is_tie).all())
