"""Transformers' own answers: a folder's model, tokeniser and `generation_config`, asked as its documentation says.

`generate` gets nothing but the settings that a test asks for: no list of banned tokens, no penalties of our own.
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

from tests.oracles.checkpoints import load_tokenizer
from tests.oracles.texts import sources
from tests.oracles.variants import VARIANTS

T5_LANGUAGES = {"de": "German", "fr": "French", "ro": "Romanian"}
# Disturbances that are tried before a difference counts as one.
NUM_TRIES = 24
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One hypothesis: ids after the decoder's start without end-of-sequence, and the value that beam search ranks by."""

    tokens: tuple[int, ...]
    is_ended: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class Question:
    """A text with its languages, as Transformers' tokeniser spells them."""

    text: str
    source: str | None = None
    target: str | None = None


def questions(name: str, count: int) -> list[Question]:
    """Return texts, with the variant's pairs of languages in turn."""
    pairs = VARIANTS[name].pairs
    return [Question(text, *pairs[i % len(pairs)]) for i, text in enumerate(sources(count))]


Beams = Sequence[Sequence[Answer]]


class Noise(transformers.LogitsProcessor):
    """Disturb log-probabilities by at most an amplitude, as rounding might: an answer that changes by it was a tie."""

    def __init__(self, amplitude: float, seed: int) -> None:
        self._amplitude, self._noise = amplitude, torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.rand(scores.shape, generator=self._noise, dtype=scores.dtype)
        return scores + self._amplitude * (2 * noise - 1)


class Reference:
    """A checkpoint of a variant in Transformers, in double precision."""

    def __init__(self, folder: Path, name: str) -> None:
        self.variant, self.tokenizer = VARIANTS[name], load_tokenizer(folder)
        self._is_t5 = name.startswith("t5")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        kind: Any = getattr(transformers, self.variant.model)
        self.model: Any = kind.from_pretrained(folder, attn_implementation="eager").eval().double()
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        self.defaults = settings | self._task()
        self.has_max_length = "max_length" in self.defaults

    def _task(self) -> dict[str, Any]:
        tasks: dict[str, dict[str, Any]] = getattr(self.model.config, "task_specific_params", None) or {}
        chosen = [task for name, task in tasks.items() if self.variant.task and name.startswith(self.variant.task)]
        return {key: value for key, value in chosen[0].items() if key != "prefix"} if chosen else {}

    def source_ids(self, question: Question) -> list[int]:
        """Return the encoder's input, special tokens included."""
        said, text = self.variant.said, question.text
        if question.source is not None and said in ("forced", "start"):
            self.tokenizer.src_lang = question.source
        if question.target is not None and "{}" in said:
            text = said.format(T5_LANGUAGES[question.target] if self._is_t5 else question.target) + text
        return list(self.tokenizer(text)["input_ids"])

    def told(self, question: Question) -> dict[str, int]:
        """Return the argument of `generate` that chooses the target language."""
        if question.target is None or self.variant.said not in ("forced", "start"):
            return {}
        name = "forced_bos_token_id" if self.variant.said == "forced" else "decoder_start_token_id"
        if hasattr(self.tokenizer, "get_lang_id"):
            return {name: int(self.tokenizer.get_lang_id(question.target))}
        return {name: int(self.tokenizer.convert_tokens_to_ids(question.target))}

    def forced(self, question: Question) -> list[int]:
        """Return the tokens that every answer is forced to begin with."""
        forced = self.told(question).get("forced_bos_token_id", self.defaults.get("forced_bos_token_id"))
        return [] if forced is None else [int(forced)]

    def target_ids(self, text: str) -> list[int]:
        """Return a target's own tokens, end-of-sequence included, those that are forced not."""
        ids = self.tokenizer(text_target=text, add_special_tokens=False)["input_ids"]
        return [*ids, int(self.model.config.eos_token_id)]

    def generate(self, asked: Sequence[Question], noise: Noise | None = None, **settings: Any) -> list[list[Answer]]:
        """Answer questions, in their order, all hypotheses that are returned; settings override the checkpoint's own."""
        rows = [self.source_ids(question) for question in asked]
        answers: list[list[Answer]] = [[] for _ in asked]
        for target in {question.target: None for question in asked}:
            indices = [i for i, question in enumerate(asked) if question.target == target]
            beams = self._batch([rows[i] for i in indices], self.told(asked[indices[0]]), noise, settings)
            for i, beam in zip(indices, beams, strict=True):
                answers[i] = beam
        return answers

    @torch.inference_mode()
    def _batch(self, rows: list[list[int]], told: dict[str, int], noise: Noise | None, settings: Settings) -> list[list[Answer]]:
        ids, mask = self._padded(rows)
        options = {"return_dict_in_generate": True, "output_scores": True} | self._task() | told | settings
        processors = transformers.LogitsProcessorList([noise] if noise else [])
        found = self.model.generate(input_ids=ids, attention_mask=mask, logits_processor=processors, **options)
        scores = getattr(found, "sequences_scores", None)
        answers = [self._answer(row, None if scores is None else scores[i]) for i, row in enumerate(found.sequences.tolist())]
        each = len(answers) // len(rows)
        return [answers[start : start + each] for start in range(0, len(answers), each)]

    def _answer(self, row: list[int], score: Tensor | None) -> Answer:
        tokens, end = row[1:], self.model.config.eos_token_id
        is_ended = end in tokens
        return Answer(tuple(tokens[: tokens.index(end)] if is_ended else tokens), is_ended, None if score is None else float(score))

    @torch.inference_mode()
    def score(self, question: Question, target: str) -> list[float]:
        """Return the log-probability of each of a target's tokens, end-of-sequence included, those that are forced not.

        Where a checkpoint bans padding, it still has a part of the probability, unless the checkpoint says `renormalize_logits`.
        """
        forced, own = self.forced(question), self.target_ids(target)
        ids, mask = self._padded([self.source_ids(question)])
        start = self.told(question).get("decoder_start_token_id", self.model.generation_config.decoder_start_token_id)
        fed = torch.tensor([[start, *forced, *own[:-1]]])
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=fed).logits[0]
        if self.defaults.get("renormalize_logits"):
            logits[:, [word for [word] in self.defaults.get("bad_words_ids", [])]] = -torch.inf
        log_probs = logits.log_softmax(-1)[len(forced) :]
        return [float(log_probs[t, token]) for t, token in enumerate(own)]

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [self.model.config.pad_token_id] * (width - len(row)) for row in rows])
        return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])

    def differences(
        self, asked: Sequence[Question], ours: Beams, theirs: Beams, rounding: float, **settings: Any
    ) -> tuple[list[int], list[int]]:
        """Compare our hypotheses with those of `generate` with the same settings, token by token and in order, best first.

        Return indices of questions whose answers differ only by a tie (with rounding errors in log-probabilities and scores,
        Transformers gives ours, too), and of those that differ otherwise.
        """
        ties, others = list[int](), list[int]()
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if _tokens(our) == _tokens(their):
                pairs = [(a.score, b.score) for a, b in zip(our, their, strict=True) if a.score is not None and b.score is not None]
                if any(abs(a - b) > rounding for a, b in pairs):
                    others.append(i)
                continue
            again = (self.generate([asked[i]], Noise(rounding, seed), **settings)[0] for seed in range(NUM_TRIES))
            (ties if any(_tokens(beam) == _tokens(our) for beam in again) else others).append(i)
        return ties, others


def _tokens(beam: Sequence[Answer]) -> list[tuple[tuple[int, ...], bool]]:
    return [(answer.tokens, answer.is_ended) for answer in beam]
