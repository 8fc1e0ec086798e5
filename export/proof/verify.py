"""Parity check of exported graphs: run them under ONNX Runtime and compare them with the checkpoint. Export fails when it fails."""

import copy
from pathlib import Path

from dragoman.export.arguments import QualityTexts
from dragoman.export.fields import Precision
from dragoman.export.half import DTYPES, halved
from dragoman.export.processor import processor_kind
from dragoman.export.progress import STEPS, Progress
from dragoman.export.proof.batching import NUM_SLOTS, check_alone, check_one_candidate, check_sources, drive
from dragoman.export.proof.cases import (
    EagerReference,
    by_candidates,
    forced_rows,
    greedy_sources,
    hardest_first,
    num_whole_rows,
    pair_of,
    stretches,
)
from dragoman.export.proof.comparison import Comparison, ScorerComparison, check_greedy, check_scorer
from dragoman.export.proof.quality import LIMITS, check_half_agreement, check_half_answers, check_half_scores
from dragoman.export.proof.report import ParityReport
from dragoman.export.proof.sessions import OnnxRunner, open_runner
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.network import Network
from dragoman.model.networks.transformer import transformer_of

# Largest difference of a log-probability or an attention weight. bf16 is compared in a copy widened to single precision, with the
# model of the same rounded weights; the two differ by rounding between layers.
TOLERANCES = {"fp32": 1e-4, "fp16": LIMITS["fp16"], "bf16": 1e-3}
NUM_ROWS_ALONE = 4


def verify(
    checkpoint: Checkpoint,
    directory: Path,
    precision: Precision = "fp32",
    texts: QualityTexts | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare the graphs in a directory with the checkpoint.

    Five things must hold:

    - Teacher-forced rows of many lengths, batched at different positions, give the log-probabilities of eager full-sequence passes:
      over the whole vocabulary, or if that is large, some over the whole and the others over their best, which no other token may
      belong to.
    - Some of them, decoded alone, give bit-identical results, and asked for one candidate the first of those they gave.
    - Sources give the same bits alone and in any batch, prompts in any pieces (see `batching`).
    - Greedy decoding takes at each step the token that the eager model would take, except at a tie within the tolerance.
    - The scorer gives the same rows the eager model's log-probabilities and attention weights.

    Where eager single precision itself is off by more than the tolerance, graphs may be as far from double precision as it is,
    times a small factor (see `eager`). Half precision is compared with single precision, see `TOLERANCES`; the effect of
    bfloat16 arithmetic on answers is measured in eager PyTorch.

    Args:
        checkpoint: Of the graphs; its tokeniser makes the sentences.
        directory: Of the graphs.
        precision: fp32, fp16 or bf16; int8 is checked by `verify_quantized`.
        texts: Texts that half precision must translate as well as single precision.
        progress: Reports each comparison.

    Raises:
        BundleError: If the graphs cannot be loaded or have other inputs and outputs.
        ParityError: Naming the figure that is off.
    """
    progress = progress or Progress(STEPS[precision])
    model, half = checkpoint.model, None
    if precision in DTYPES:
        half = halved(transformer_of(model), DTYPES[precision])
        if texts is not None:
            check_half_scores(checkpoint, half, texts)
        model = copy.deepcopy(half).float() if precision == "bf16" else model
    with open_runner(directory, model.config, precision) as runner:
        report = _compare(checkpoint, runner, model, TOLERANCES[precision], progress)
    if precision == "fp16":
        check_half_agreement(report.num_token_mismatches, report.num_sentences, precision)
    if precision == "bf16":
        assert half is not None
        check_half_answers(checkpoint, half)
        progress.done("compare answers")
    return report


def _compare(checkpoint: Checkpoint, runner: OnnxRunner, model: Network, tolerance: float, progress: Progress) -> ParityReport:
    """Compare graphs with a model, see `verify`; the checkpoint's tokeniser makes the sentences."""
    config = model.config
    is_exact_alone = runner.device != "cuda"  # without equal bits alone and in a batch
    reference, rows = EagerReference(model), forced_rows(config)
    driven = [part for row in rows for part in stretches(reference, row)]
    comparison = Comparison(reference, tolerance)
    if is_exact_alone:
        check_sources([runner], rows)
    num_steps = 0
    for part, num_candidates in by_candidates(driven, config.target_vocab_size):
        num_steps += drive(runner, part, NUM_SLOTS, num_candidates, False, comparison.observe)
        if hardest := hardest_first(part)[: NUM_ROWS_ALONE * is_exact_alone]:
            for row in hardest:
                check_alone(runner, row, num_candidates)
            check_one_candidate(runner, hardest, NUM_SLOTS)
    progress.done("compare log-probabilities")
    sources = greedy_sources(checkpoint)
    num_tokens, num_mismatches = check_greedy(runner, reference, sources, tolerance)
    progress.done("compare greedy answers")
    pairs = [pair_of(row, config.eos_id) for row in rows]
    scores = ScorerComparison(reference, tolerance)
    check_scorer(runner, pairs, scores, NUM_SLOTS, NUM_ROWS_ALONE * is_exact_alone)
    progress.done("compare scores")
    return ParityReport(
        tolerance=max(comparison.largest_allowed, scores.largest_allowed),
        max_log_prob_difference=comparison.max_difference,
        num_rows=len(rows),
        num_whole_rows=num_whole_rows(len(rows), config.target_vocab_size),
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
        device=runner.device,
        processor=processor_kind(),
    )
