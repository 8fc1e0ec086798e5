"""Checks of an import: the written checkpoint holds the weights that were read, and, on request, computes as Transformers does."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.generation import Languages, around
from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.report import Report
from dragoman.model.languages import LanguageTable

# Of the largest logit, at least 1: sums in another order differ by less.
TOLERANCE: Final = 1e-4
_ROWS, _SOURCE, _TARGET = 4, 16, 12
TEXTS: Final = (
    "The house is small.",
    "What does it cost, 12.50 or 3,000?",
    "Größe und Maß: schön, daß es (fast) regnet!",
    "L’été dernier, elle a dit : « peut-être ».",
    "Он сказал: «Привет».",
    "今天天气很好。",
)


def verify_written(directory: Path, checkpoint: Checkpoint, is_half: bool, report: Report) -> None:
    """Read a written checkpoint: it has every weight as it was read, and its logits are numbers.

    Raises:
        CheckpointError: If it cannot be read.
        ForeignError: If a weight is another, or a logit is no number.
    """
    written = Checkpoint.load(directory)
    parameters = dict(written.model.named_parameters())
    for name, parameter in checkpoint.model.named_parameters():
        expected = parameter.half().float() if is_half else parameter
        if not torch.equal(parameters[name], expected):
            raise ForeignError(f"{directory}: {name} was written as another")
    logits = _logits(written, *_inputs(written))
    if not logits.isfinite().all():
        raise ForeignError(f"{directory}: random tokens make logits that are no numbers")
    count = sum(parameter.numel() for parameter in parameters.values())
    how = "rounded to half precision" if is_half else "bit for bit what was read"
    report.checked.append(f"{count:,} weights read again from the checkpoint, {how}; logits of random tokens are finite")


def verify_against_transformers(source: Path, checkpoint: Checkpoint, report: Report) -> None:
    """Load the foreign folder in Transformers, too, and compare logits of random tokens.

    Raises:
        ForeignError: If it is not installed, cannot read the folder, or computes something else.
    """
    try:
        from transformers import AutoModelForSeq2SeqLM
    except ImportError as error:
        raise ForeignError("--check compares with Transformers, which is not installed: pip install transformers") from error
    _quieten()
    try:
        theirs = AutoModelForSeq2SeqLM.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ForeignError(f"{source}: Transformers cannot read it: {error}") from error
    sources, lengths, targets = _inputs(checkpoint)
    mask = torch.arange(sources.shape[1]) < lengths[:, None]
    with torch.no_grad():
        expected: Tensor = theirs(
            input_ids=sources,
            attention_mask=mask.long(),
            decoder_input_ids=targets,
            decoder_attention_mask=torch.ones_like(targets),
        ).logits
    difference = (_logits(checkpoint, sources, lengths, targets) - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    if not difference <= TOLERANCE * scale:
        raise ForeignError(
            f"{source}: logits differ from those of Transformers by {difference:.1e}, where {TOLERANCE * scale:.1e} is allowed"
        )
    report.checked.append(
        f"logits of {_ROWS} random sources are within {difference:.1e} of those of Transformers (the largest is {scale:.1f})"
    )
    _compare_texts(source, checkpoint, report)


def _quieten() -> None:
    """Switch off Transformers' progress bars and messages."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _compare_texts(source: Path, checkpoint: Checkpoint, report: Report) -> None:
    """Report the number of texts whose ids are those of Transformers' tokeniser."""
    from transformers import AutoTokenizer

    languages = checkpoint.languages or Languages()
    default = LanguageTable(languages.source, languages.default_source).default
    language = default or next(iter(languages.source), None)
    try:
        theirs = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        if language is not None and hasattr(theirs, "src_lang"):
            theirs.src_lang = language.code
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        report.checked.append(f"Transformers cannot read the tokeniser: {' '.join(str(error).split())[:200]}")
        return
    said = around(checkpoint.template, language, None, checkpoint.model.config.eos_id)
    ours = [[*said.source_prefix, *ids, *said.source_suffix] for ids in checkpoint.tokenizers.source.encode_batch(TEXTS)]
    equal = sum(ids == theirs(text)["input_ids"] for ids, text in zip(ours, TEXTS, strict=True))
    report.checked.append(f"ids of {equal} of {len(TEXTS)} texts, special tokens included, are those of Transformers’ tokeniser")


def _inputs(checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor]:
    """Return random sources `[B, S]`, their lengths `[B]` and targets `[B, T]`, of one generator's numbers."""
    config = checkpoint.model.config
    chosen = torch.Generator().manual_seed(0)
    size = min(_SOURCE, config.max_source_positions), min(_TARGET, config.max_target_positions)
    sources = torch.randint(config.source_vocab_size, (_ROWS, size[0]), generator=chosen)
    # Padding within a text would be another length.
    sources = sources.where(sources != config.pad_id, config.eos_id)
    lengths = torch.randint(1, size[0] + 1, (_ROWS,), generator=chosen)
    sources = sources.where(torch.arange(size[0]) < lengths[:, None], config.pad_id)
    targets = torch.randint(config.target_vocab_size, (_ROWS, size[1]), generator=chosen)
    targets = targets.where(targets != config.pad_id, config.eos_id)
    targets[:, 0] = config.decoder_start_id
    return sources, lengths, targets


def _logits(checkpoint: Checkpoint, sources: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """Return the logits of a teacher-forced pass `[B, T, V]`."""
    with torch.no_grad():
        logits: Tensor = checkpoint.model(sources, lengths, targets)
    return logits
