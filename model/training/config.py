"""Configuration of a training run: the TOML file, parsed once, every unknown or invalid setting named."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.errors import InputError
from dragoman.model.text.byte_level import ByteLevelTokenizer

MIN_VOCAB_SIZE = 300
_STRICT = ConfigDict(extra="forbid")
Probability = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class TrainingConfigError(InputError):
    """A training configuration that cannot be used; the message names the file and the setting."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class DataConfig:
    """Parallel text: one sentence a line, UTF-8, `.gz` where the name says so; paths are relative to the data folder.

    A language model (`model.architecture` is `decoder`) reads the target's text alone: sources are left out.
    """

    target: str
    validation_target: str
    source: str = ""
    validation_source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class TokenizerConfig:
    """The vocabulary, learnt from both sides of the training text."""

    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE)]  # tokens, specials and bytes included
    bpe_dropout: Probability = 0.0  # probability that a merge is skipped when training text is encoded (Provilkov et al., 2020)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class ScheduleConfig:
    """Schedule of a training run."""

    max_steps: Count  # optimiser steps at the most
    max_tokens: Count = 4096  # size of a batch, padding included: rows times the longer of its longest source and target
    max_length: Count = 256  # pairs with more tokens than this on a side are left out (and counted in `summary.json`)
    # Peak, reached after `warmup_steps` and then falling with 1/√step (Vaswani et al., 2017, section 5.3).
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5e-3
    warmup_steps: Count = 2000  # steps of linear warm-up
    # Last steps before `max_steps`, over which the rate falls linearly to zero on top of 1/√step.
    cooldown_steps: Annotated[int, Field(ge=0)] = 0
    adam_beta1: Probability = 0.9  # adam's decay of the first moment
    adam_beta2: Probability = 0.98  # adam's decay of the second moment
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # decoupled weight decay (AdamW)
    label_smoothing: Probability = 0.1  # probability mass spread evenly over the vocabulary
    # Weight of the divergence between two passes over each batch (Liang et al., 2021, alpha); 0 for a single pass.
    r_drop: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # gradients are scaled down to this Euclidean norm
    validate_every: Count = 1  # epochs between validations; each writes a checkpoint
    average_last: Count = 5  # newest validated checkpoints averaged into the final model
    patience: Annotated[int, Field(ge=0)] = 0  # validations without a better BLEU before training stops; 0 never stops early
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1  # of initial weights, batches, dropout and BPE-dropout
    # Run forward and backward in bfloat16 autocast; faster on GPUs and on CPUs that multiply it (AVX512-BF16, AMX).
    is_bf16: bool = False

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of optimiser step `step`, counted from 1."""
        rate: float = self.learning_rate * min(step / self.warmup_steps, (self.warmup_steps / step) ** 0.5)
        if self.cooldown_steps:
            rate *= min(1.0, (self.max_steps + 1 - step) / (self.cooldown_steps + 1))
        return max(rate, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class TrainingConfig:
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]  # of the model, for example `en-de`
    data: DataConfig  # where the text is
    tokenizer: TokenizerConfig  # the vocabulary
    training: ScheduleConfig  # the schedule
    # Fields of `ModelConfig` that differ from its defaults; vocabulary sizes and special tokens come from the tokeniser.
    model: dict[str, Any] = Field(default_factory=dict)
    # Directory of a checkpoint to go on from, relative to the working directory; empty to start from random weights. Its vocabulary
    # is used instead of learning one. Its model may differ in its dropouts, and have narrower feed-forward layers and, if it is
    # pre-norm, fewer layers: then it is grown, see `dragoman.model.growth.grown`.
    initial_checkpoint: str = ""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file that leaves out nothing but what has a default.

        Raises:
            TrainingConfigError: If it is missing, is not TOML, or has an unknown, missing or invalid setting.
        """
        return cls.parse(tomllib.loads(read_toml(path)), str(path))

    @classmethod
    def parse(cls, fields: dict[str, Any], origin: str, lines: Mapping[str, int] | None = None) -> Self:
        """Check parsed TOML; `origin` is named in errors, and the line of a setting where `lines` has it.

        Raises:
            TrainingConfigError: Listing every setting that is unknown, missing or invalid.
        """
        try:
            return TypeAdapter(cls).validate_python(fields)
        except ValidationError as error:
            faults = [(".".join(map(str, fault["loc"])), _reason(fault["type"], fault["msg"])) for fault in error.errors()]
            raise TrainingConfigError(complaint(origin, faults, lines or {})) from error


def read_toml(path: Path) -> str:
    """Return the text of a file that is TOML.

    Raises:
        TrainingConfigError: If it is missing, or is not TOML (with the line).
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")  # editors for Windows put a mark before the text
        tomllib.loads(text)
    except OSError as error:
        raise TrainingConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TrainingConfigError(f"{path}: not TOML: not UTF-8 (at line {line})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TrainingConfigError(f"{path}: not TOML: {error}") from error
    return text


def complaint(origin: str, faults: Sequence[tuple[str, str]], lines: Mapping[str, int]) -> str:
    """Return one line that names the file, and for each fault its line, where that is known, its setting and the reason."""
    parts = [f"{setting}: {reason}" for setting, reason in faults]
    for i, (setting, _) in enumerate(faults):
        while setting and setting not in lines:
            setting = setting.rpartition(".")[0]
        if setting:
            parts[i] = f"line {lines[setting]}: {parts[i]}"
    return in_one_line(f"{origin}{', ' if parts[0].startswith('line ') else ': '}{'; '.join(parts)}")


def in_one_line(message: str) -> str:
    """Return a message without the control characters that names in a file can have."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)


def model_config(config: TrainingConfig, tokenizer: ByteLevelTokenizer) -> ModelConfig:
    """Complete the configuration's `[model]` table with what the tokeniser decides.

    Raises:
        TrainingConfigError: Naming the setting that is unknown, invalid, or not the configuration's to choose.
    """
    decided = {
        "source_vocab_size": tokenizer.vocab_size,
        "target_vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "eos_id": tokenizer.eos_id,
        "decoder_start_id": tokenizer.start_id,
    }
    if taken := sorted(decided.keys() & config.model.keys()):
        raise TrainingConfigError(f"model.{taken[0]}: set by the tokeniser")
    try:
        return ModelConfig.from_dict(config.model | decided)
    except ModelConfigError as error:
        raise TrainingConfigError(f"model: {error}") from error


def _reason(kind: str, message: str) -> str:
    """Say in words of TOML what pydantic says in those of Python."""
    reasons = {"unexpected_keyword_argument": "unknown setting", "missing": "missing", "dataclass_type": "must be a table"}
    return reasons.get(kind, message)
