"""Schedules that cannot work, and text that a schedule does not suit: one line each, beginning with the setting to change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dragoman.model.quality import MAX_NEW_TOKENS
from dragoman.model.training.config import ScheduleConfig, TrainingConfig

MIN_STEPS_PER_EPOCH = 4
MAX_SHARE = 0.05  # of lines that may be unsuitable without a word


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of the text that a schedule is compared with."""

    num_pairs: int  # pairs that are trained on
    num_left_out: int  # pairs that are too long
    longest_pair: int  # tokens of the longest side of any pair that is trained on, its special token included
    num_steps_per_epoch: int  # batches that the text makes
    vocab_size: int  # tokens that could be learnt
    validation: tuple[
        Sequence[Sequence[int]], Sequence[Sequence[int]]
    ]  # ids of the validation text, sources and targets, without special tokens


def warnings(config: TrainingConfig, facts: Facts) -> list[str]:
    """Return what is likely to be a mistake, each as one line."""
    return [*_of_the_schedule(config.training, facts), *_of_the_text(config, facts)]


def _of_the_schedule(schedule: ScheduleConfig, facts: Facts) -> Iterator[str]:
    """Yield what cannot work whatever the text says."""
    steps, epoch, end = schedule.max_steps, facts.num_steps_per_epoch, f"training ends after {schedule.max_steps:,} steps"
    if schedule.warmup_steps >= steps > 1:
        yield f"training.warmup_steps: the learning rate rises for {schedule.warmup_steps:,} steps, but {end}"
    elif schedule.warmup_steps + schedule.cooldown_steps > steps > 1:
        yield (
            f"training.cooldown_steps: the learning rate rises for {schedule.warmup_steps:,} steps and falls for "
            f"{schedule.cooldown_steps:,}, but {end}: it never gets to learning_rate"
        )
    if steps < epoch:
        yield f"training.max_steps: {steps:,} steps are fewer than the {epoch:,} of an epoch: part of the text is never seen"
    if steps < epoch * schedule.validate_every:
        yield (
            f"training.validate_every: the first validation would come after {epoch * schedule.validate_every:,} steps, but {end}: "
            "there is one at the end only, and no checkpoint before"
        )
    if epoch < MIN_STEPS_PER_EPOCH <= facts.num_pairs // 2:
        yield (
            f"training.max_tokens: an epoch of {facts.num_pairs:,} pairs is {epoch} step{'s'[: epoch > 1]}: smaller batches learn "
            "more in the same time"
        )
    if schedule.max_tokens < facts.longest_pair:
        yield (
            f"training.max_tokens: the longest pair has {facts.longest_pair:,} tokens, more than a batch of "
            f"{schedule.max_tokens:,}: it makes a batch of its own"
        )


def _of_the_text(config: TrainingConfig, facts: Facts) -> Iterator[str]:
    """Yield what this text makes of the settings."""
    all_pairs = facts.num_pairs + facts.num_left_out
    if facts.num_left_out > MAX_SHARE * all_pairs:
        limit = config.training.max_length
        yield (
            f"training.max_length: {facts.num_left_out:,} of {all_pairs:,} pairs are longer than {limit} tokens, "
            "or than the model takes, and are left out"
        )
    if facts.vocab_size < config.tokenizer.vocab_size:
        yield (f"tokenizer.vocab_size: {facts.vocab_size:,} tokens can be learnt of this text, not {config.tokenizer.vocab_size:,}")
    for side, rows in zip(("source", "target"), facts.validation, strict=True):
        longest, line = max((len(ids) + 1, -number) for number, ids in enumerate(rows, start=1))
        if side == "target" and longest > MAX_NEW_TOKENS:
            yield (
                f"data.validation_target: line {-line} has {longest:,} tokens, but a translation that is scored ends after "
                f"{MAX_NEW_TOKENS}"
            )
        num_longer = sum(len(ids) + 1 > facts.longest_pair for ids in rows)
        if num_longer > MAX_SHARE * len(rows):
            yield (
                f"data.validation_{side}: {num_longer:,} of {len(rows):,} lines are longer than any pair that is trained on "
                f"({facts.longest_pair:,} tokens) and will hardly be translated well"
            )
