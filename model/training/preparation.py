"""Preparation of a training run without torch: settings, text, vocabulary, the run or checkpoint to continue."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.model.checkpoint_folder import CheckpointFolder
from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.corpus import DataError, read_parallel, read_texts
from dragoman.model.errors import InputError
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.training.config import (
    MIN_VOCAB_SIZE,
    DataConfig,
    TrainingConfig,
    TrainingConfigError,
    complaint,
    in_one_line,
    model_config,
)
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.record import RunRecord, refuse_output
from dragoman.model.training.rules import VOCAB_SIZE, TextSize, choose, unused, vocab_size_for
from dragoman.model.training.sampler import PairSampler, bucket
from dragoman.model.training.warnings import Facts, warnings

DECIDED = ("source_vocab_size", "target_vocab_size", "pad_id", "eos_id", "decoder_start_id")
Texts = tuple[list[str], list[str]]
Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class Preparation:
    """A training run that can begin, or go on."""

    config: TrainingConfig  # every setting, chosen ones included
    model_config: ModelConfig  # of the model to train
    output: Path  # where the checkpoint goes
    tokenizer: ByteLevelTokenizer  # the vocabulary
    sampler: PairSampler  # the training text
    validation: Texts  # the validation text, sources and targets
    record: RunRecord  # report
    warnings: list[str]  # warnings, a line each

    def summary(self) -> list[str]:
        """Say in a line what is trained on, and in another one what was chosen by rule."""
        text, about = self.record.text, self.config.name
        left_out = f" ({self.sampler.num_left_out:,} too long)" if self.sampler.num_left_out else ""
        lines = [
            f"{about}: {text['num_pairs']:,} pairs{left_out}, {text['source_tokens']:,} source tokens, {text['target_tokens']:,} "
            f"target tokens, vocabulary of {self.tokenizer.vocab_size:,}"
        ]
        initial = self.config.initial_checkpoint
        chosen = {name: value for name, value in self.record.chosen.items() if not (initial and name.startswith("model."))}
        if initial:
            lines.append(f"{about}: goes on from {initial}, whose model it is where [model] says nothing else")
        if chosen:
            lines.append(f"{about}: by rule " + ", ".join(f"{name} {json.dumps(value)}" for name, value in chosen.items()))
        return lines


def prepare(file: TrainingFile, data_dir: Path, output: Path) -> Preparation:
    """Read the text, learn or reload the vocabulary and complete the configuration; nothing is written.

    Args:
        file: What to do.
        data_dir: Where the files that the configuration names lie.
        output: Where the checkpoint goes, or the run to resume, whose choices stand.

    Raises:
        InputError: If the output cannot be used.
        DataError: If the text cannot be used.
        CheckpointError: If the checkpoint to go on from cannot be read.
        TrainingConfigError: If the configuration does not fit the text, or is not the one `output` was started with.
    """
    refuse_output(output)
    begun = RunRecord.load(output)
    path = file.fields.get("initial_checkpoint")
    initial = CheckpointFolder.load(Path(path)) if isinstance(path, str) and path else None
    sketch, sketched_model = _sketch(file, initial)
    limits = sketched_model.max_source_positions, sketched_model.max_target_positions
    texts, validation = _read(file, sketch.data, data_dir, sketched_model.has_source)
    if begun is not None:
        begun.refuse_missing(file, (VOCAB_SIZE, "training.max_steps"), output)
    chosen = _without(file.stated, begun.chosen if begun else {VOCAB_SIZE: _vocab_size(texts, initial)})
    with_vocabulary = file.complete({"training.max_steps": 1} | chosen)
    tokenizer = (
        initial.tokenizers.byte_level()
        if initial
        else ByteLevelTokenizer.train(texts[0] + texts[1], with_vocabulary.tokenizer.vocab_size)
    )
    sampler = _sampler(file, with_vocabulary, tokenizer, texts, limits)
    validation_ids = _encode_validation(with_vocabulary, data_dir, tokenizer, validation, limits)
    if begun is None:
        chosen |= choose(file.stated, *sampler.plain, _model_settings(initial))
    config, size = file.complete(chosen), TextSize.of(*sampler.plain)
    with _blaming(file):
        model = model_config(config, tokenizer)
    vocab_size = tokenizer.vocab_size if initial is None and VOCAB_SIZE in file.stated else config.tokenizer.vocab_size
    told = [line for line in _warnings(config, sampler, vocab_size, validation_ids) if line.partition(":")[0] not in chosen]
    if begun is not None:
        begun.refuse_other(asdict(config), output)
        told += begun.changes(asdict(size))
    record = RunRecord(asdict(config), chosen, asdict(size))
    return Preparation(config, model, output, tokenizer, sampler, validation, record, told)


def _warnings(config: TrainingConfig, sampler: PairSampler, vocab_size: int, validation: tuple[Rows, Rows]) -> list[str]:
    """Hold the configuration against the text, of which so many tokens could be learnt."""
    facts = Facts(
        num_pairs=sampler.num_pairs,
        num_left_out=sampler.num_left_out,
        longest_pair=max(len(ids) + 1 for side in sampler.plain for ids in side),
        num_steps_per_epoch=len(bucket(*sampler.plain, config.training.max_tokens, np.random.default_rng(0))),
        vocab_size=vocab_size,
        validation=validation,
    )
    return warnings(config, facts)


def _sketch(file: TrainingFile, initial: CheckpointFolder | None) -> tuple[TrainingConfig, ModelConfig]:
    """Check what is stated, with stand-ins for what rules choose; of the model it tells how many positions there are."""
    stand_ins: dict[str, Any] = {VOCAB_SIZE: MIN_VOCAB_SIZE, "training.max_steps": 1}
    stated = file.stated.get("model.architecture")
    if initial is not None and stated not in (None, initial.config.architecture):
        raise TrainingConfigError(
            f"initial_checkpoint: its architecture is {initial.config.architecture}, the configuration's {stated}"
        )
    base = _model_settings(initial) or ({"num_heads": 1} if "model.num_heads" not in unused(file.stated) else {})
    config = file.complete(stand_ins | {f"model.{name}": value for name, value in base.items()})
    with _blaming(file):
        model = model_config(config, initial.tokenizers.byte_level() if initial else ByteLevelTokenizer.train((), MIN_VOCAB_SIZE))
    if initial is not None:
        try:
            replace(model, **{name: getattr(initial.config, name) for name in DECIDED}).refuse_to_shrink(initial.config)
        except ModelConfigError as error:
            raise TrainingConfigError(f"initial_checkpoint: {error}") from error
    return config, model


@contextmanager
def _blaming(file: TrainingFile) -> Iterator[None]:
    """Name the file, and the line where it is known, in what is wrong with the model."""
    try:
        yield
    except TrainingConfigError as error:
        words = re.findall(r"\w+", str(error))
        line = next((file.lines[f"model.{word}"] for word in words if f"model.{word}" in file.lines), None)
        raise TrainingConfigError(in_one_line(f"{file.origin}{'' if line is None else f', line {line}'}: {error}")) from error


def _read(file: TrainingFile, data: DataConfig, data_dir: Path, has_source: bool) -> tuple[Texts, Texts]:
    """Read the training text and the validation text; sources of a model that has none are empty."""
    named = ("source", data.source, data.target), ("validation_source", data.validation_source, data.validation_target)
    reason = "missing" if has_source else "a language model has no source: leave it out"
    if faults := [(f"data.{name}", reason) for name, source, _ in named if bool(source) != has_source]:
        raise TrainingConfigError(complaint(file.origin, faults, file.lines))
    texts, validation = (
        read_parallel(data_dir / source, data_dir / target) if has_source else _alone(read_texts(data_dir / target))
        for _, source, target in named
    )
    return texts, validation


def _alone(texts: list[str]) -> Texts:
    """Return texts with empty sources."""
    return [""] * len(texts), texts


def _without(stated: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in chosen.items() if name not in stated}


def _vocab_size(texts: Texts, initial: CheckpointFolder | None) -> int:
    """Return the size of the vocabulary to learn; where there is one already, its size as far as a configuration can state it."""
    if initial is not None:
        return max(MIN_VOCAB_SIZE, initial.tokenizers.byte_level().vocab_size)
    return vocab_size_for(sum(len(line.split()) for side in texts for line in side))


def _model_settings(initial: CheckpointFolder | None) -> dict[str, Any] | None:
    """Return the initial model's settings that a configuration can state."""
    if initial is None:
        return None
    return {name: value for name, value in initial.config.to_dict().items() if name not in DECIDED}


def _sampler(
    file: TrainingFile, config: TrainingConfig, tokenizer: ByteLevelTokenizer, texts: Texts, limits: tuple[int, int]
) -> PairSampler:
    """Encode the training text."""
    max_lengths = min(config.training.max_length, limits[0]), min(config.training.max_length, limits[1])
    try:
        return PairSampler(tokenizer, texts, max_lengths, config.tokenizer.bpe_dropout, config.training.seed)
    except InputError as error:
        raise TrainingConfigError(complaint(file.origin, [("training.max_length", str(error))], file.lines)) from error


def _encode_validation(
    config: TrainingConfig, data_dir: Path, tokenizer: ByteLevelTokenizer, texts: Texts, limits: tuple[int, int]
) -> tuple[Rows, Rows]:
    """Encode the validation text; what the model has no positions for is refused, where of training text it is left out."""
    sides = tokenizer.encode_batch(texts[0]), tokenizer.encode_batch(texts[1])
    for name, rows, limit in zip((config.data.validation_source, config.data.validation_target), sides, limits, strict=True):
        for number, ids in enumerate(rows, start=1):
            if len(ids) >= limit:
                raise DataError(f"{data_dir / name}, line {number}: {len(ids) + 1} tokens where the model has {limit} positions")
    return sides
