"""Decoding in a batch of slots, and checks that the bits of a result do not depend on the batch.

Rows go through a fixed number of slots as requests of a server do: a finished row makes room for the next one, so rows stand at
different positions, and stale keys and values lie beyond each row's own. Servers read long prompts in pieces whose sizes depend on
other requests, and greedy requests share steps with beams, so how many candidates a step is asked for changes, too.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from dragoman.export.proof.cases import LONG_ROW, Row
from dragoman.export.proof.eager import Floats, Given, Ints
from dragoman.export.proof.report import ParityError
from dragoman.export.proof.sessions import OnnxRunner

NUM_SLOTS = 8
# Sources encoded together; the last is all there are.
SOURCE_BATCHES = (2, 3, 7, 64)
# Pieces of prompts. Attention takes queries in blocks: sizes one above those of blocks are among them.
PIECE_SIZES, LONG_PIECE_SIZES, MAX_UNEVEN = (1, 2, 7), (33, 65, 129, 257), 12
# Positions beyond a prompt in the caches that it is read into.
SPARE_POSITIONS = (1, 70)
# Slots and threads that quantised rows are decoded with, candidates of a step, and rows decoded alone.
BATCH_SLOTS, NUM_CANDIDATES, NUM_ROWS_ALONE = (3, 16), 64, 6

Observer = Callable[[list[Row], Ints, Floats], None]


def drive(
    runner: OnnxRunner, rows: Sequence[Row], num_slots: int, num_candidates: int, is_tight: bool, observe: Observer | None = None
) -> int:
    """Decode rows in slots to their ends; return the number of steps.

    Args:
        runner: The graphs.
        rows: In order of admission.
        num_slots: N at the most.
        num_candidates: K.
        is_tight: Make caches exactly as long as the longest row needs, instead of longer.
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
                slots.fill(len(active), row.stretch.whole.kept(row.stretch.start), "self")
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


def _encode(runner: OnnxRunner, rows: Sequence[Row], max_rows: int) -> dict[tuple[int, ...], Given]:
    """Encode each source once, in ragged batches in order; a long one by itself, since padding would be most of its batch."""
    sources = list(dict.fromkeys(tuple(row.source) for row in rows))
    short = [source for source in sources if len(source) <= LONG_ROW]
    batches = [short[start : start + max_rows] for start in range(0, len(short), max_rows)]
    batches += [[source] for source in sources if len(source) > LONG_ROW]
    encoded = (zip(batch, runner.encode([list(source) for source in batch]), strict=True) for batch in batches)
    return {source: given for batch in encoded for source, given in batch}


def check_sources(runners: Sequence[OnnxRunner], rows: Sequence[Row]) -> None:
    """Encode the sources of rows, or read them as prompts, in every way in which a server may.

    Raises:
        ParityError: If a source's bits are not always the same.
    """
    if runners[0].has_prompts:
        check_pieces(runners, rows)
    else:
        check_sources_apart(runners, rows)


def check_sources_apart(runners: Sequence[OnnxRunner], rows: Sequence[Row]) -> None:
    """Encode the sources of rows alone and in batches of mixed lengths, with every runner.

    A long source is encoded beside the shortest only: its attention takes most of the time.

    Raises:
        ParityError: If a source's bits are not always the same.
    """
    sources = [list(source) for source in dict.fromkeys(tuple(row.source) for row in rows)]
    short = sorted((source for source in sources if len(source) <= LONG_ROW), key=len)
    order = [short[i] for i in np.random.default_rng(3).permutation(len(short))]
    mixtures = [order[start : start + size] for size in SOURCE_BATCHES for start in range(0, len(order), size)]
    mixtures += [[*short[::-1]], *([short[0], source, short[0]] for source in sources if len(source) > LONG_ROW)]
    expected: dict[tuple[int, ...], list[bytes]] = {}
    for runner in runners:
        for batch in [*([source] for source in sources), *mixtures]:
            for source, given in zip(batch, runner.encode(batch), strict=True):
                bits = [part.tobytes() for part in given]
                if bits != expected.setdefault(tuple(source), bits):
                    raise ParityError(f"a source of {len(source)} tokens is not encoded to the same bits in every batch")


def check_pieces(runners: Sequence[OnnxRunner], rows: Sequence[Row]) -> None:
    """Read the sources of rows whole and in pieces of several sizes, with every runner.

    Raises:
        ParityError: If a prompt's bits are not always the same.
    """
    random = np.random.default_rng(4)
    for prompt in dict.fromkeys(tuple(row.source) for row in rows):
        length = len(prompt)
        is_long = length > LONG_ROW
        uneven = random.integers(1, (MAX_UNEVEN * MAX_UNEVEN if is_long else MAX_UNEVEN) + 1, length).tolist()
        sizes = [[size] * length for size in (LONG_PIECE_SIZES if is_long else PIECE_SIZES)]
        ways = [[length] * bool(length), *(_pieces(length, of_way) for of_way in (*sizes, uneven))]
        expected: list[bytes] | None = None
        for runner in runners:
            for pieces in ways:
                for spare in SPARE_POSITIONS:
                    bits = [part.tobytes() for part in runner.read(prompt, pieces, spare)]
                    if bits != (expected := expected or bits):
                        raise ParityError(
                            f"a prompt of {length} tokens is not read to the same bits whole and in {len(pieces)} pieces"
                        )


def _pieces(length: int, sizes: Sequence[int]) -> list[int]:
    """Cut a number of tokens into pieces of these sizes; the last is the rest."""
    ends = np.minimum(np.cumsum(sizes), length)
    return [int(size) for size in np.diff(ends, prepend=0) if size]


def check_alone(runner: OnnxRunner, row: Row, num_candidates: int) -> None:
    """Decode a row again by itself, in caches of its exact length, and compare every bit.

    Raises:
        ParityError: If one differs.
    """
    alone = row.again()
    drive(runner, [alone], 1, num_candidates, True)
    if alone.digest != row.digest:
        raise ParityError(f"{row} does not give the same bits alone as in a batch")


def check_one_candidate(runner: OnnxRunner, rows: Sequence[Row], num_slots: int) -> None:
    """Decode rows again with one candidate at every step, and without log-probabilities where the graph can do that.

    Raises:
        ParityError: If a candidate or its log-probability differs from the first of several.
    """
    for num_candidates in (1, 0) if runner.can_skip_log_probs else (1,):
        again = [row.again() for row in rows]
        drive(runner, again, num_slots, num_candidates, False)
        for row, other in zip(rows, again, strict=True):
            log_probs = row.log_probs if num_candidates else [0.0] * len(row.log_probs)
            if (row.choices, log_probs) != (other.choices, other.log_probs):
                raise ParityError(f"{row} has another first candidate where it is asked for {num_candidates} than for more")


def check_rows_apart(runners: Sequence[OnnxRunner], rows: Sequence[Row]) -> int:
    """Decode rows alone and in batches, on every runner; return how many there were.

    Raises:
        ParityError: If a row's bits are not always the same.
    """
    reference: list[str] = []
    for runner in runners:
        for num_slots in BATCH_SLOTS:
            again = [row.again() for row in rows]
            drive(runner, again, num_slots, min(NUM_CANDIDATES, runner.config.target_vocab_size), False)
            reference = reference or [row.digest for row in again]
            _compare_digests(again, reference)
        for row, digest in zip(rows[:NUM_ROWS_ALONE], reference, strict=False):
            alone = row.again()
            drive(runner, [alone], 1, min(NUM_CANDIDATES, runner.config.target_vocab_size), True)
            _compare_digests([alone], [digest])
        check_one_candidate(runner, again[:NUM_ROWS_ALONE], BATCH_SLOTS[0])
    return len(rows)


def _compare_digests(rows: Sequence[Row], digests: Sequence[str]) -> None:
    """Raise ParityError for a row whose bits differ from before."""
    for row, digest in zip(rows, digests, strict=True):
        if row.digest != digest:
            raise ParityError(f"{row} does not give the same bits in every batch")
