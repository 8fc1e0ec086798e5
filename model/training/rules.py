"""Rules that choose the settings which a configuration leaves out and which have no single good default.

Rules follow the size of the text, counted once. What they chose is part of the run's record: a resumed run does not choose again.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dragoman.model.config import ROTARY_MULTIPLE, UNUSED
from dragoman.model.training.sampler import bucket

# Target tokens up to which a text counts as tiny, small and medium.
SIZES = (200_000, 2_000_000, 20_000_000)


@dataclass(frozen=True, slots=True)
class TextSize:
    """Size of the training text, without pairs that are too long; tokens include the one special token of each side."""

    num_pairs: int  # pairs
    source_tokens: int  # tokens of all sources
    target_tokens: int  # tokens of all targets
    longer_tokens: int  # of each pair the longer side's tokens, summed: what batches are filled with

    @classmethod
    def of(cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Self:
        """Count rows of ids without special tokens."""
        lengths = [(len(source) + 1, len(target) + 1) for source, target in zip(sources, targets, strict=True)]
        source_tokens, target_tokens = (sum(side) for side in zip(*lengths, strict=True))
        return cls(len(lengths), source_tokens, target_tokens, sum(map(max, lengths)))


class Settings:
    """Settings stated or chosen so far, while rules are applied one after the other.

    Attributes:
        size: Of the text.
        num_batches: Tells for a batch size in tokens how many batches an epoch has.
    """

    def __init__(self, stated: Mapping[str, Any], size: TextSize, num_batches: Callable[[int], int]) -> None:
        self.size, self.num_batches = size, num_batches
        self._stated, self.chosen = stated, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        """Return a setting that is stated or was chosen."""
        return self._stated[name] if name in self._stated else self.chosen[name]

    def __contains__(self, name: str) -> bool:
        return name in self._stated or name in self.chosen

    @property
    def architecture(self) -> Any:
        """The stated architecture; `transformer` by default."""
        return _architecture({**self._stated, **self.chosen})

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotary."""
        return "model.positions" in self and self["model.positions"] == "rotary"

    def by_size(self, tiny: Any, small: Any, medium: Any, large: Any) -> Any:
        """Return one of four by how many target tokens there are."""
        return (tiny, small, medium, large)[bisect_left(SIZES, self.size.target_tokens)]


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for a setting that is left out."""

    setting: str  # its dotted name
    text: str  # the rule in words, as the documents have it
    choose: Callable[[Settings], Any]  # the rule; what it reads has been stated or chosen before


def vocab_size_for(num_words: int) -> int:
    """Return the size of the vocabulary for a text of so many words, both sides together; its growth follows Heaps' law."""
    return min(32_000, max(300, 260 + round(5 * math.sqrt(num_words))))


def _num_heads(width: Any, is_rotary: bool) -> int:
    """Return about one head for 64 of the width, at least 4 where they divide it into heads that can be had."""
    multiple = ROTARY_MULTIPLE if is_rotary else 1
    if not isinstance(width, int) or width < 1 or width % multiple:
        return 1  # refused later, by name
    return next(heads for heads in range(max(4, width // 64), 0, -1) if width % (heads * multiple) == 0)


def _max_tokens(settings: Settings) -> int:
    longer = settings.size.longer_tokens
    return min(4096, max(longer // 100, 16 * longer // settings.size.num_pairs, 128))


def _num_steps_per_epoch(settings: Settings) -> int:
    return settings.num_batches(settings["training.max_tokens"])


def _learning_rate(settings: Settings) -> float:
    rate = 1 / math.sqrt(settings["model.d_model"] * settings["training.warmup_steps"])
    return float(f"{min(3e-3, rate):.2g}")


def _validate_every(settings: Settings) -> int:
    steps: int = settings["training.max_steps"]
    return max(1, round(steps / 20 / _num_steps_per_epoch(settings)))


VOCAB_SIZE = "tokenizer.vocab_size"
VOCAB_SIZE_TEXT = "260 + 5·√(words of both sides), from 300 to 32,000"
USUAL_DEPTHS, DEPTHS = (2, 4, 4, 6), {"rnn": (1, 1, 2, 2)}
_SIZES = "up to 200,000 target tokens, 2 million, 20 million, beyond"
_DEPTH = f"2, 4, 4, 6, of an rnn 1, 1, 2, 2: {_SIZES}"
RULES = (
    Rule("model.d_model", f"128, 128, 256, 512: {_SIZES}", lambda it: it.by_size(128, 128, 256, 512)),
    Rule(
        "model.num_heads",
        "d_model / 64, at least 4; fewer where that does not divide d_model, or makes no heads that rotary positions go with",
        lambda it: _num_heads(it["model.d_model"], it.is_rotary),
    ),
    Rule("model.num_encoder_layers", _DEPTH, lambda it: it.by_size(*DEPTHS.get(it.architecture, USUAL_DEPTHS))),
    Rule("model.num_decoder_layers", _DEPTH, lambda it: it.by_size(*DEPTHS.get(it.architecture, USUAL_DEPTHS))),
    Rule("model.encoder_ffn_dim", "4 · d_model", lambda it: 4 * it["model.d_model"]),
    Rule("model.decoder_ffn_dim", "4 · d_model", lambda it: 4 * it["model.d_model"]),
    Rule("model.norm", "pre", lambda it: "pre"),
    Rule("model.dropout", f"0.3, 0.2, 0.2, 0.1: {_SIZES}", lambda it: it.by_size(0.3, 0.2, 0.2, 0.1)),
    Rule(
        "training.max_tokens",
        "a hundredth of the text's tokens (each pair's longer side), at least 128 and 16 average pairs, at most 4096",
        _max_tokens,
    ),
    Rule(
        "training.max_steps",
        "75 epochs, at least 1,000 steps, at most 100,000",
        lambda it: min(100_000, max(1000, 75 * _num_steps_per_epoch(it))),
    ),
    Rule(
        "training.warmup_steps",
        "a tenth of max_steps, at most 2,000",
        lambda it: min(2000, max(1, it["training.max_steps"] // 10)),
    ),
    Rule("training.cooldown_steps", "a third of max_steps", lambda it: it["training.max_steps"] // 3),
    Rule("training.learning_rate", "1/√(d_model · warmup_steps), at most 0.003", _learning_rate),
    Rule("training.validate_every", "about 20 times in max_steps, at most once an epoch", _validate_every),
)


def unused(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the settings, by dotted name, that mean nothing to the architecture stated; an unknown one is refused later."""
    return frozenset(f"model.{name}" for name in UNUSED.get(_architecture(settings), ()))


def _architecture(settings: Mapping[str, Any]) -> Any:
    """Return the architecture; nothing that can be looked up where it is no name."""
    architecture = settings.get("model.architecture", "transformer")
    return architecture if isinstance(architecture, str) else None


def choose(
    stated: Mapping[str, Any], sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], initial: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Choose every setting that has a rule and is not stated.

    Args:
        stated: The configuration's settings, by dotted name.
        sources: The text's ids without special tokens.
        targets: The same number of rows.
        initial: The model's settings in the checkpoint to go on from, which stand where the configuration states none.

    Returns:
        What was chosen, by dotted name; without the vocabulary's size, with which the ids were made.
    """

    def num_batches(max_tokens: int) -> int:
        return len(bucket(sources, targets, max_tokens, np.random.default_rng(0)))

    settings = Settings(stated, TextSize.of(sources, targets), num_batches)
    if initial is not None:
        settings.chosen |= {f"model.{name}": value for name, value in initial.items() if f"model.{name}" not in stated}
    without = unused({**stated, **settings.chosen})
    for rule in RULES:
        if rule.setting not in settings and rule.setting not in without:
            settings.chosen[rule.setting] = rule.choose(settings)
    return settings.chosen
