"""The parity gate: runs exported graphs under ONNX Runtime against the checkpoint they came from. Export fails when it fails."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dragoman.export.architectures import architecture_of
from dragoman.export.choice_parity import check_one_candidate
from dragoman.export.encoder_parity import check_sources_apart
from dragoman.export.greedy_parity import check_greedy
from dragoman.export.parity import Comparison, EagerReference, ParityError, ParityReport, drive, stretches
from dragoman.export.processor import processor_kind
from dragoman.export.progress import STEPS, Progress
from dragoman.export.prompt_parity import check_pieces
from dragoman.export.row import Row
from dragoman.export.running import OnnxRunner
from dragoman.export.scorer_parity import ScorerComparison, check_scorer, pair_of
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.network import Network

TOLERANCE = 1e-4
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


def verify(checkpoint: Checkpoint, directory: Path, tolerance: float = TOLERANCE, progress: Progress | None = None) -> ParityReport:
    """Compare the graphs in a directory with the checkpoint.

    Five things must hold. Teacher-forced rows of many lengths, batched at different positions, give the log-probabilities of eager
    full-sequence passes: over the whole vocabulary, or if that is large, some over the whole and the others over their best, which
    no other token may belong to. Some of them, decoded alone, give bit-identical results, and asked for one candidate the first of
    those they gave. Sources, too, give the same bits alone and in any mixture (see `encoder_parity`), prompts in any pieces (see
    `prompt_parity`). Greedy decoding takes at each
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
        check_sources([runner], rows)
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
    pairs = [pair_of(row, config.eos_id) for row in rows]
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


def check_sources(runners: Sequence[OnnxRunner], rows: Sequence[Row]) -> None:
    """Encode the sources of rows in every way in which a server may.

    Raises:
        ParityError: If a source's bits are not always the same.
    """
    if runners[0].has_prompts:
        check_pieces(runners, rows)
    else:
        check_sources_apart(runners, rows)


def forced_rows(config: ModelConfig) -> list[Row]:
    """Draw teacher-forced rows: random lengths, the shortest there can be, and one as long as the model goes (up to 1,024)."""
    random = np.random.default_rng(1)
    if architecture_of(config).has_prompts:
        return _rows_of_prompts(config, random)

    def row(num_source: int, num_target: int) -> Row:
        source = _random_ids(random, config.source_vocab_size, config.pad_id, num_source - 1)
        target = _random_ids(random, config.target_vocab_size, config.pad_id, num_target - 1)
        return Row([*source, config.eos_id], [config.decoder_start_id, *target], num_target)

    max_source, max_target = min(config.max_source_positions, MAX_ROW_TOKENS), min(config.max_target_positions, MAX_ROW_TOKENS)
    lengths = [(int(random.integers(1, max_source + 1)), int(random.integers(1, max_target + 1))) for _ in range(NUM_ROWS - 2)]
    longest = min(config.max_source_positions, MAX_LONGEST_ROW), min(config.max_target_positions, MAX_LONGEST_ROW)
    return [row(*pair) for pair in ((1, max_target), *lengths[: NUM_ROWS // 2], longest, *lengths[NUM_ROWS // 2 :])]


def _rows_of_prompts(config: ModelConfig, random: np.random.Generator) -> list[Row]:
    """Draw the same of a model whose sources are prompts, which take room from targets; one is empty, and one of one token."""
    room, most = config.max_target_positions, architecture_of(config).max_source_ids(config)

    def row(num_source: int, num_target: int) -> Row:
        source = _random_ids(random, config.source_vocab_size, config.pad_id, min(num_source, most))
        target = _random_ids(random, config.target_vocab_size, config.pad_id, min(num_target, room - len(source)) - 1)
        return Row(source, [config.decoder_start_id, *target], 1 + len(target))

    longest = min(room, 2 * MAX_LONGEST_ROW)
    first = [row(0, MAX_ROW_TOKENS), row(1, MAX_ROW_TOKENS), row(longest // 2, MAX_LONGEST_ROW), row(longest - 1, 2)]
    lengths = [(int(random.integers(0, MAX_ROW_TOKENS + 1)), int(random.integers(1, MAX_ROW_TOKENS + 1))) for _ in range(NUM_ROWS)]
    rest = [row(*pair) for pair in lengths[: NUM_ROWS - len(first)]]
    return [*first[:2], *rest[: NUM_ROWS // 2], *first[2:], *rest[NUM_ROWS // 2 :]]


def by_candidates(rows: Sequence[Row], vocab_size: int) -> list[tuple[list[Row], int]]:
    """Return rows with how many candidates they are compared over: all, or for most rows of a large vocabulary the best."""
    if vocab_size <= LARGE_VOCABULARY:
        return [(list(rows), vocab_size)]
    whole = _hardest(rows)[:NUM_WHOLE_ROWS]
    rest = [row for row in rows if all(row is not other for other in whole)]
    return [(whole, vocab_size), (rest, NUM_BEST)]


def greedy_sources(checkpoint: Checkpoint) -> list[list[int]]:
    """Return ids of texts, without special tokens: random ones of many lengths, and sentences."""
    config, architecture = checkpoint.model.config, architecture_of(checkpoint.model.config)
    random = np.random.default_rng(2)
    room = architecture.max_source_ids(config)
    if architecture.has_prompts:
        room = min(room, config.max_target_positions // 2)  # the other half is for the answer
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
