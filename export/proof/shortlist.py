"""Parity of a shortlist: its decode step gives the listed tokens as the whole one does, normalised over the list.

The whole step has been compared with PyTorch (see `verify`) in the same arithmetic, so only the normalisation and its rounding can
differ.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dragoman.export.fields import Precision
from dragoman.export.proof.batching import NUM_SLOTS, check_alone, drive
from dragoman.export.proof.cases import LONG_ROW, Row, forced_rows, pair_of
from dragoman.export.proof.comparison import is_ordered
from dragoman.export.proof.eager import Floats, Ints
from dragoman.export.proof.report import ParityError, ShortlistParity
from dragoman.export.proof.sessions import open_runner
from dragoman.export.proof.verify import NUM_ROWS_ALONE, TOLERANCES
from dragoman.model.config import ModelConfig

NUM_SHORT_ROWS = 12
TOLERANCE = TOLERANCES["fp32"]


def verify_shortlist(whole: Path, short: Path, ids: Sequence[int], config: ModelConfig, precision: Precision) -> ShortlistParity:
    """Compare graphs with a shortlist with those without.

    Args:
        whole: Directory of the graphs without one.
        short: Directory of the graphs with it.
        ids: The list, rising.
        config: Of their model.
        precision: Theirs.

    Raises:
        BundleError: If graphs cannot be loaded.
        ParityError: Naming the figure that is off.
    """
    expected, rows = _Recording(ids, config), _rows(config)
    with open_runner(whole, config, precision) as runner:
        drive(runner, rows, NUM_SLOTS, config.target_vocab_size, False, expected.observe)
        pairs = [pair_of(row, config.eos_id) for row in rows[:NUM_ROWS_ALONE]]
        scores = runner.score(pairs)
    comparison, rows = _Comparison(ids, expected), _rows(config)
    with open_runner(short, config, precision) as runner:
        drive(runner, rows, NUM_SLOTS, len(ids), False, comparison.observe)
        alone = rows[: NUM_ROWS_ALONE * (runner.device != "cuda")]
        for row in alone:
            check_alone(runner, row, len(ids))
        if any(a.tobytes() != b.tobytes() for a, b in zip(scores, runner.score(pairs), strict=True)):
            raise ParityError("the scorer does not give the same bits beside a shortlist")
    num_positions = sum(row.num_steps for row in rows)
    return ShortlistParity(len(ids), len(rows), num_positions, comparison.max_difference, len(alone))


def _rows(config: ModelConfig) -> list[Row]:
    """Return short teacher-forced rows, not decoded yet; the same ones every time."""
    return [row for row in forced_rows(config) if row.num_steps <= LONG_ROW][:NUM_SHORT_ROWS]


class _Recording:
    """Log-probabilities of the whole decode step for the tokens of a list, normalised over them."""

    def __init__(self, ids: Sequence[int], config: ModelConfig) -> None:
        self.ids = np.array(ids)
        self.is_padding_masked = config.padding == "masked"
        self.found: dict[tuple[tuple[int, ...], tuple[int, ...], int], Floats] = {}

    def observe(self, rows: list[Row], ids: Ints, log_probs: Floats) -> None:
        """Keep one step's candidates, `[n, V]`."""
        table = np.empty(log_probs.shape, np.float64)
        np.put_along_axis(table, ids, log_probs.astype(np.float64), 1)
        listed = table[:, self.ids]
        mass = np.exp(listed).sum(1)
        if self.is_padding_masked:  # it is never a candidate, but its probability is missing from the others
            mass += np.maximum(1 - np.exp(table).sum(1), 0)
        listed -= np.log(mass)[:, None]
        for row, values in zip(rows, listed, strict=True):
            self.found[_place(row)] = values.astype(np.float32)


class _Comparison:
    """Comparison of the short decode step with the recorded one."""

    def __init__(self, ids: Sequence[int], expected: _Recording) -> None:
        self.ids, self.expected = np.array(ids), expected
        self.max_difference = 0.0

    def observe(self, rows: list[Row], ids: Ints, log_probs: Floats) -> None:
        """Compare one step's candidates, `[n, K]`."""
        order = ids.argsort(1)
        if not (np.take_along_axis(ids, order, 1) == self.ids).all():
            raise ParityError("the candidates are not the tokens of the shortlist")
        if not is_ordered(ids, log_probs):
            raise ParityError("candidates of the shortlist are not in order of log-probability, the lower id first where equal")
        expected = np.stack([self.expected.found[_place(row)] for row in rows])
        found = np.take_along_axis(log_probs, order, 1)
        is_ruled_out = np.isneginf(expected)
        if not (np.isneginf(found) == is_ruled_out).all():
            raise ParityError("the shortlist rules out other tokens than the whole decode step")
        difference = float(np.abs(np.where(is_ruled_out, 0, found - np.where(is_ruled_out, 0, expected))).max())
        if not difference <= TOLERANCE:  # also refuses NaN
            raise ParityError(f"log-probabilities of the shortlist are off by {difference:.3g}; the tolerance is {TOLERANCE:.3g}")
        self.max_difference = max(self.max_difference, difference)


def _place(row: Row) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(row.source), tuple(row.inputs), row.position
