"""Loss of quality in reduced precision: answers in int8, fp16 and bf16 stay close to those in single precision.

Parity of the wiring is checked separately, see `verify`: of int8 on the graphs before quantisation.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dragoman.export.arguments import QualityTexts
from dragoman.export.progress import STEPS, Progress
from dragoman.export.proof.batching import NUM_SLOTS, check_rows_apart, check_sources, drive
from dragoman.export.proof.cases import (
    EagerReference,
    Row,
    forced_rows,
    greedy_rows,
    greedy_sources,
    max_candidates,
    pair_of,
    stretches,
)
from dragoman.export.proof.comparison import MAX_NEW_TOKENS, is_ordered, refuse_padding
from dragoman.export.proof.eager import Floats, Ints
from dragoman.export.proof.report import ParityError, Quality
from dragoman.export.proof.sessions import OnnxRunner
from dragoman.export.quantize import ScaleCounts
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import greedy_search
from dragoman.model.errors import InputError
from dragoman.model.networks.transformer import Transformer

# A sound quantisation stays far below these, a broken one far above: they are not a promise of quality.
MAX_DIVERGENCE, MIN_AGREEMENT, MAX_SCORER_DIFFERENCE = 0.2, 0.8, 0.2
MAX_BLEU_LOSS, MAX_CHRF_LOSS = 0.3, 0.2
MAX_MASS_ERROR = 1e-3
NUM_SOURCES, MAX_ANSWER_TOKENS = 64, 48
THREADS = (1, 2)
# Rows encoded before they are decoded, whose keys and values lie in memory.
MAX_ROWS = 256
# Largest difference of a log-probability from single precision, which is also the margin that excuses a different token.
LIMITS = {"fp16": 0.1, "bf16": 0.8}
# Share of sources, most of them random tokens, whose greedy answer must be that of single precision to the last token.
MIN_HALF_AGREEMENT = {"fp16": 0.9, "bf16": 0.6}


def verify_quantized(
    checkpoint: Checkpoint,
    directory: Path,
    counts: ScaleCounts,
    texts: QualityTexts | None = None,
    progress: Progress | None = None,
) -> Quality:
    """Check quantised graphs whose originals `verify` has passed.

    Raises:
        BundleError: If the graphs cannot be loaded or have other inputs and outputs.
        InputError: If a text is too long.
        ParityError: Naming the figure that is off.
    """
    progress = progress or Progress(STEPS["int8"])
    config = checkpoint.model.config
    forced = forced_rows(config)
    reference = EagerReference(checkpoint.model)
    parts = [part for row in forced for part in stretches(reference, row)]
    runners = [OnnxRunner(directory, config, number) for number in THREADS]
    check_sources(runners, forced)
    check_rows_apart(runners, parts)
    progress.done("compare batches in 8 bits")
    divergence, rows, runner = Divergence(checkpoint), answer_rows(checkpoint), OnnxRunner(directory, config)
    num_candidates = max_candidates(config.target_vocab_size)
    drive(runner, rows, NUM_SLOTS, num_candidates, False, divergence.observe)
    quality = Quality(
        num_constant_scales=counts.num_constant,
        num_row_scales=counts.num_row,
        num_rows=len(forced),
        num_tokens=len(divergence.differences),
        agreement=divergence.num_agreed / len(divergence.differences),
        mean_divergence=float(np.mean(divergence.divergences)),
        mean_log_prob_difference=float(np.mean(divergence.differences)),
        mean_scorer_difference=_scorer_difference(runner, rows, divergence),
    )
    for name, figure, is_sound in (
        ("the mean divergence of next-token distributions", quality.mean_divergence, quality.mean_divergence <= MAX_DIVERGENCE),
        ("the share of tokens that are likeliest before and after", quality.agreement, quality.agreement >= MIN_AGREEMENT),
        ("the scorer", quality.mean_scorer_difference, quality.mean_scorer_difference <= MAX_SCORER_DIFFERENCE),
    ):
        if not is_sound:  # also refuses NaN
            raise ParityError(f"8-bit arithmetic does this model too much harm: {name} is off, {figure:.3g}; export it in fp32")
    if texts is not None:
        quality = _with_scores(quality, checkpoint, runner, texts)
    progress.done("compare answers in 8 bits")
    return quality


class Divergence:
    """Divergence of teacher-forced rows from the eager model in single precision."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Compare with a checkpoint's model."""
        self.reference = EagerReference(checkpoint.model)
        self.config = checkpoint.model.config
        self.divergences: list[float] = []
        self.differences: list[float] = []
        self.num_agreed = 0
        self.label_log_probs: dict[int, list[float]] = {}

    def observe(self, rows: list[Row], ids: Ints, log_probs: Floats) -> None:
        """Compare one step's candidates: all V, or of a large vocabulary the best.

        Raises:
            ParityError: If they are no distribution in order, or padding is a candidate of a model that predicts none.
        """
        expected = self.reference.log_probs(rows)
        found = np.full_like(expected, np.nan)
        np.put_along_axis(found, ids, log_probs, 1)
        if not is_ordered(ids, log_probs):
            raise ParityError("candidates are not in order of log-probability, the lower id first where they are equal")
        if self.config.padding != "predicted":
            refuse_padding(found, self.config.pad_id)
        masses = np.exp(log_probs, dtype=np.float64).sum(1)
        is_whole = log_probs.shape[1] == self.config.target_vocab_size
        lowest = 1 - MAX_MASS_ERROR if is_whole and self.config.padding != "masked" else 0.0
        if not ((masses > lowest) & (masses < 1 + MAX_MASS_ERROR)).all():  # also refuses NaN
            raise ParityError("probabilities do not sum to 1")
        self.divergences += _divergences(np.take_along_axis(expected, ids, 1), log_probs, is_whole).tolist()
        self.num_agreed += int((ids[:, 0] == expected.argmax(1)).sum())
        for i, row in enumerate(rows):
            label = [*row.inputs, self.config.eos_id][row.position + 1]
            # A token that is not among the best is no likelier than the last of them.
            label_log_prob = float(log_probs[i, -1] if np.isnan(found[i, label]) else found[i, label])
            self.differences.append(abs(label_log_prob - float(expected[i, label])))
            self.label_log_probs.setdefault(id(row), []).append(label_log_prob)


def _divergences(expected: Floats, found: Floats, is_whole: bool) -> NDArray[np.float64]:
    """Return the divergence of candidates' distributions from eager's, `[n, K]` → `[n]`; the rest of 1 counts as one token."""
    left, right = expected.astype(np.float64), found.astype(np.float64)
    is_possible = ~np.isneginf(left)
    weights = np.exp(left)
    differences = np.where(is_possible, left, 0) - np.where(is_possible, right, 0)
    total: NDArray[np.float64] = (weights * differences).sum(1)
    if not is_whole:
        rests = [np.maximum(1 - np.exp(log_probs).sum(1), np.finfo(np.float64).tiny) for log_probs in (left, right)]
        total += rests[0] * (np.log(rests[0]) - np.log(rests[1]))
    return total


def answer_rows(checkpoint: Checkpoint) -> list[Row]:
    """Return the model's own greedy answers to `greedy_sources` as teacher-forced rows."""
    sources = greedy_sources(checkpoint)[-NUM_SOURCES:]
    rows = []
    for start in range(0, len(sources), 4 * NUM_SLOTS):
        batch = sources[start : start + 4 * NUM_SLOTS]
        asked = greedy_rows(checkpoint.model, batch, MAX_ANSWER_TOKENS)
        limit = min(row.num_steps for row in asked)
        for row, answer in zip(asked, greedy_search(checkpoint.model, batch, limit), strict=True):
            inputs = [*row.inputs, *answer.ids][:limit]
            rows.append(Row(row.source, inputs, len(inputs)))
    return rows


def _scorer_difference(runner: OnnxRunner, rows: Sequence[Row], divergence: Divergence) -> float:
    """Return the mean difference between the scorer's log-probabilities and the decode step's."""
    differences: list[float] = []
    for start in range(0, len(rows), NUM_SLOTS):
        batch = rows[start : start + NUM_SLOTS]
        pairs = [pair_of(row, runner.config.eos_id) for row in batch]
        for row, log_probs in zip(batch, runner.score(pairs)[0], strict=True):
            expected = divergence.label_log_probs[id(row)]
            differences += np.abs(log_probs[: len(expected)] - expected).tolist()
    return float(np.mean(differences))


def _with_scores(quality: Quality, checkpoint: Checkpoint, runner: OnnxRunner, texts: QualityTexts) -> Quality:
    """Translate texts with both models, refuse too great a loss, and add the changes of BLEU and chrF."""
    from dragoman.model.evaluate import translate  # sacreBLEU is slow to load, and optional
    from dragoman.model.quality import score

    before = score(translate(checkpoint.model, checkpoint.tokenizers, texts.sources), texts.references)
    after = score(_translate(runner, checkpoint, texts.sources), texts.references)
    bleu, chrf = after.bleu - before.bleu, after.chrf - before.chrf
    for name, change, allowed, was in (("BLEU", bleu, MAX_BLEU_LOSS, before.bleu), ("chrF", chrf, MAX_CHRF_LOSS, before.chrf)):
        if change < -allowed:
            raise ParityError(f"8-bit arithmetic costs {-change:.2f} {name} of {was:.2f}; {allowed:g} is the most that is accepted")
    return msgspec.structs.replace(quality, bleu_change=bleu, chrf_change=chrf)


def _translate(runner: OnnxRunner, checkpoint: Checkpoint, texts: Sequence[str]) -> list[str]:
    """Translate texts greedily with the graphs."""
    from dragoman.model.evaluate import MAX_NEW_TOKENS

    config, tokenizers = checkpoint.model.config, checkpoint.tokenizers
    sources = tokenizers.source.encode_batch(texts)
    for number, ids in enumerate(sources, start=1):
        if len(ids) >= config.max_source_positions:
            raise InputError(f"line {number}: {len(ids) + 1} tokens where the model takes {config.max_source_positions}")
    rows = greedy_rows(checkpoint.model, sources, MAX_NEW_TOKENS)
    for start in range(0, len(order := sorted(rows, key=lambda row: len(row.source))), MAX_ROWS):
        drive(runner, order[start : start + MAX_ROWS], 2 * NUM_SLOTS, 1, False)
    return [tokenizers.target.decode([token for token in row.inputs[1:] if token != config.eos_id]) for row in rows]


def check_half_answers(checkpoint: Checkpoint, half: Transformer) -> None:
    """Decode with eager models in half and in single precision.

    Raises:
        ParityError: If too many answers differ, or a log-probability of equal tokens does by more than the limit.
    """
    sources, limit = greedy_sources(checkpoint), LIMITS["bf16"]
    num_tokens = min(half.config.max_target_positions, MAX_NEW_TOKENS)
    num_parted = 0
    for start in range(0, len(sources), 4 * NUM_SLOTS):
        chunk = sources[start : start + 4 * NUM_SLOTS]
        pairs = zip(greedy_search(half, chunk, num_tokens), greedy_search(checkpoint.model, chunk, num_tokens), strict=True)
        for found, expected in pairs:
            num_parted += found.ids != expected.ids
            same = [
                i
                for i, (a, b) in enumerate(zip(found.ids, expected.ids, strict=False))
                if found.ids[: i + 1] == expected.ids[: i + 1]
            ]
            difference = max((abs(found.log_probs[i] - expected.log_probs[i]) for i in same), default=0.0)
            if not difference <= limit:
                raise ParityError(f"bf16 changes a log-probability by {difference:.3g}; the limit is {limit:.3g}")
    check_half_agreement(num_parted, len(sources), "bf16")


def check_half_agreement(num_parted: int, num_sources: int, precision: str) -> None:
    """Refuse a model with too many other answers in half precision."""
    if num_parted > (1 - MIN_HALF_AGREEMENT[precision]) * num_sources:
        raise ParityError(
            f"{num_parted} of {num_sources} greedy answers differ from those of single precision; "
            f"at most {1 - MIN_HALF_AGREEMENT[precision]:.0%} may in {precision}"
        )


def check_half_scores(checkpoint: Checkpoint, half: Transformer, texts: QualityTexts) -> None:
    """Translate texts in PyTorch, in half and in single precision.

    Raises:
        ParityError: If BLEU or chrF lose too much.
    """
    from dragoman.model.evaluate import translate
    from dragoman.model.quality import score

    before, after = (
        score(translate(model, checkpoint.tokenizers, texts.sources), texts.references) for model in (checkpoint.model, half)
    )
    for name, loss, allowed in (
        ("BLEU", before.bleu - after.bleu, MAX_BLEU_LOSS),
        ("chrF", before.chrf - after.chrf, MAX_CHRF_LOSS),
    ):
        if not loss <= allowed:
            raise ParityError(f"half precision costs {loss:.2f} {name}; {allowed:g} is the most that is accepted")
