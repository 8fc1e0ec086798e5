"""Answers of eager PyTorch to compare a server's with: the model of a checkpoint, searched one batch after another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import Hypothesis, Start, beam_search, greedy_search

ROUNDING = 1e-4


class Oracle:
    """A checkpoint in PyTorch.

    Attributes:
        tokenizers: Of source and target.
    """

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint.load(folder)
        self.tokenizers, self._model = checkpoint.tokenizers, checkpoint.model

    def greedy(self, texts: Sequence[str], max_new_tokens: int, forced: Sequence[int] = ()) -> list[Hypothesis]:
        """Return the likeliest token at each place, in batches of sources of like lengths."""
        sources = self.tokenizers.source.encode_batch(list(texts))
        order = sorted(range(len(texts)), key=lambda i: len(sources[i]))
        found: dict[int, Hypothesis] = {}
        for start in range(0, len(order), 64):
            batch = order[start : start + 64]
            begin = (Start(forced=[list(forced)] * len(batch)),) if forced else ()
            found |= zip(batch, greedy_search(self._model, [sources[i] for i in batch], max_new_tokens, *begin), strict=True)
        return [found[i] for i in range(len(texts))]

    def beams(self, texts: Sequence[str], num_beams: int, max_new_tokens: int, penalty: float = 1.0) -> list[list[Hypothesis]]:
        return beam_search(self._model, self.tokenizers.source.encode_batch(list(texts)), num_beams, max_new_tokens, penalty)

    def log_probs(self, text: str, target: Sequence[int]) -> list[float]:
        [source] = self.tokenizers.source.encode_batch([text])
        whole, first = self._model.prompt(source)
        with torch.inference_mode():
            hidden = self._model.observe(whole, [first, *target[:-1]]).hidden
            return list(self._model.decoder.log_probs(hidden)[torch.arange(len(target)), torch.tensor(target)].tolist())

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizers.target.decode(list(tokens)))

    def check_greedy(self, texts: Sequence[str], served: Sequence[Sequence[int]], max_new_tokens: int = 256) -> None:
        """Fail if a served answer is another than ours, unless the first other token is as likely but for rounding."""
        eos = self._model.config.eos_id
        for text, ours, theirs in zip(texts, served, self.greedy(texts, max_new_tokens), strict=True):
            if list(ours) != theirs.ids:
                pairs = zip([*ours, eos], [*theirs.ids, eos], strict=False)
                place = next(i for i, (mine, yours) in enumerate(pairs) if mine != yours)
                served_to, own = ([*ids, eos][: place + 1] for ids in (ours, theirs.ids))
                assert self.log_probs(text, own)[-1] - self.log_probs(text, served_to)[-1] < ROUNDING, text


def agree(answer: Any, expected: Hypothesis) -> None:
    assert list(answer.tokens) == expected.ids
    assert [token.log_prob for token in answer.log_probs] == pytest.approx(expected.log_probs, abs=ROUNDING)
