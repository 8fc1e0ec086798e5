"""What Transformers answers: a folder's model, tokeniser and `generation_config`, asked as its documentation says.

Nothing is added to `generate` but what a test asks for: no list of banned tokens, no penalties of our own.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.families.checkpoints import load_tokenizer
from benchmarks.families.variants import VARIANTS

T5_LANGUAGES = {"de": "German", "fr": "French", "ro": "Romanian"}
BATCH = 50
"""Sources decoded together: of like lengths, so that little is padded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One hypothesis.

    Attributes:
        tokens: Ids after the decoder's start, forced ones included, end-of-sequence not.
        is_ended: Whether end-of-sequence follows.
        score: What beam search ranks by; None for greedy search.
    """

    tokens: tuple[int, ...]
    is_ended: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class Question:
    """A text with its languages, as Transformers' tokeniser spells them."""

    text: str
    source: str | None = None
    target: str | None = None


class Noise(transformers.LogitsProcessor):
    """Disturb what a search sees by as much as rounding might: what it then answers otherwise was a tie.

    Args:
        amplitude: Largest disturbance of a log-probability.
        seed: Decides it.
    """

    def __init__(self, amplitude: float, seed: int) -> None:
        self._amplitude, self._noise = amplitude, torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [N, V] with noise on them."""
        noise = torch.rand(scores.shape, generator=self._noise, dtype=scores.dtype)
        return scores + self._amplitude * (2 * noise - 1)


class Reference:
    """A checkpoint in Transformers.

    Args:
        folder: The checkpoint.
        name: Its variant.
        precision: "double" or "single".
    """

    def __init__(self, folder: Path, name: str, precision: str = "double") -> None:
        self.variant = VARIANTS[name]
        self.tokenizer = load_tokenizer(folder)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        kind: Any = getattr(transformers, self.variant.model)
        self.model: Any = kind.from_pretrained(folder, attn_implementation="eager").eval()
        if precision == "double":
            self.model = self.model.double()
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        self.defaults = settings | self._task()
        self.has_max_length = "max_length" in self.defaults

    def _task(self) -> dict[str, Any]:
        """Return the parameters of the variant's task, the text before a source left out: all its translations have the same."""
        tasks: dict[str, dict[str, Any]] = getattr(self.model.config, "task_specific_params", None) or {}
        chosen = [task for name, task in tasks.items() if self.variant.task and name.startswith(self.variant.task)]
        return {key: value for key, value in chosen[0].items() if key != "prefix"} if chosen else {}

    def source_ids(self, question: Question) -> list[int]:
        """Return what the encoder reads, special tokens included."""
        variant, text = self.variant, question.text
        if question.source is not None and variant.said in ("forced", "start"):
            self.tokenizer.src_lang = question.source
        if question.target is not None and "{}" in variant.said:
            is_t5 = variant.name.startswith("t5")
            text = variant.said.format(T5_LANGUAGES[question.target] if is_t5 else question.target) + text
        return list(self.tokenizer(text)["input_ids"])

    def told(self, question: Question) -> dict[str, int]:
        """Return what `generate` is told of the target language."""
        if question.target is None or self.variant.said not in ("forced", "start"):
            return {}
        return {
            "forced_bos_token_id" if self.variant.said == "forced" else "decoder_start_token_id": self.language_id(question.target)
        }

    def language_id(self, language: str) -> int:
        """Return the token that stands for a language."""
        if hasattr(self.tokenizer, "get_lang_id"):
            return int(self.tokenizer.get_lang_id(language))
        return int(self.tokenizer.convert_tokens_to_ids(language))

    def forced(self, question: Question) -> list[int]:
        """Return the tokens that every answer is forced to begin with."""
        forced = self.told(question).get("forced_bos_token_id", self.defaults.get("forced_bos_token_id"))
        return [] if forced is None else [int(forced)]

    def target_ids(self, text: str) -> list[int]:
        """Return a target's own tokens, end-of-sequence included, those that are forced not."""
        ids = self.tokenizer(text_target=text, add_special_tokens=False)["input_ids"]
        return [*ids, int(self.model.config.eos_token_id)]

    def score(self, question: Question, target: str) -> list[float]:
        """Return the log-probability of each of a target's tokens, end-of-sequence included, those that are forced not."""
        forced, ids = self.forced(question), self.target_ids(target)
        log_probs = self.log_probs(question, [*forced, *ids])[len(forced) :]
        return [float(log_probs[t, token]) for t, token in enumerate(ids)]

    def generate(self, questions: Sequence[Question], noise: Noise | None = None, **settings: Any) -> list[list[Answer]]:
        """Answer questions, in their order, all hypotheses that are returned; settings override the checkpoint's own."""
        rows = [self.source_ids(question) for question in questions]
        answers: list[list[Answer]] = [[] for _ in questions]
        for target in {question.target: None for question in questions}:
            indices = [i for i, question in enumerate(questions) if question.target == target]
            indices.sort(key=lambda i: len(rows[i]))
            for start in range(0, len(indices), BATCH):
                part = indices[start : start + BATCH]
                for i, beam in zip(
                    part, self._batch([rows[i] for i in part], self.told(questions[part[0]]), noise, settings), strict=True
                ):
                    answers[i] = beam
        return answers

    @torch.inference_mode()
    def _batch(
        self, rows: list[list[int]], told: dict[str, int], noise: Noise | None, settings: dict[str, Any]
    ) -> list[list[Answer]]:
        ids, mask = self._padded(rows)
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=transformers.LogitsProcessorList([noise] if noise else []),
            return_dict_in_generate=True,
            output_scores=True,
            **{**self._task(), **told, **settings},
        )
        scores = getattr(found, "sequences_scores", None)
        answers = [self._answer(row, None if scores is None else scores[i]) for i, row in enumerate(found.sequences.tolist())]
        each = len(answers) // len(rows)
        return [answers[start : start + each] for start in range(0, len(answers), each)]

    def _answer(self, row: list[int], score: Tensor | None) -> Answer:
        tokens, end = row[1:], self.model.config.eos_token_id
        is_ended = end in tokens
        return Answer(tuple(tokens[: tokens.index(end)] if is_ended else tokens), is_ended, None if score is None else float(score))

    @torch.inference_mode()
    def log_probs(self, question: Question, tokens: Sequence[int]) -> Tensor:
        """Return the log-probabilities [T, V] at each of a target's tokens, given those before it, as a search sees them.

        Where a checkpoint bans padding, it still has a part of the probability, unless the checkpoint says `renormalize_logits`.
        """
        ids, mask = self._padded([self.source_ids(question)])
        start = self.told(question).get("decoder_start_token_id", self.model.generation_config.decoder_start_token_id)
        target = torch.tensor([[start, *tokens[:-1]]])
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits[0]
        if self.defaults.get("renormalize_logits"):
            logits[:, [word for [word] in self.defaults.get("bad_words_ids", [])]] = -torch.inf
        return logits.log_softmax(-1)

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [self.model.config.pad_token_id] * (width - len(row)) for row in rows])
        return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
