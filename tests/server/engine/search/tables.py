"""A table in place of a model, and a search that is driven by it with as many candidates as it asks for, or with all there are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dragoman.server.engine.messages import Answer, Request
from dragoman.server.engine.search.hypothesis import TargetSide
from dragoman.server.engine.search.search import Search
from dragoman.server.runtime.runner import Candidates
from tests.server.engine.bench import EOS, PAD, START, reference_answers

MAX_TOKENS = 16

Table = NDArray[np.float32]


@dataclass
class Driven:
    """A search that is over: its certain tokens and K of each step, how often more had to be seen, most live hypotheses at once."""

    search: Search
    certain: list[list[int]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    num_again: int = 0
    max_live: int = 1

    @property
    def answers(self) -> list[Answer]:
        return self.search.answers()


class TableModel:
    """A model whose next token depends on the last one only: `[V, V]` log-probabilities.

    Args:
        log_probs: Those; tokens that are not choices have none.
        choices: Tokens that a step chooses from, rising; all where they are not given.
    """

    def __init__(self, log_probs: Table, choices: NDArray[np.int64] | None = None) -> None:
        self.log_probs = log_probs
        self.choices = np.arange(len(log_probs)) if choices is None else choices
        self.target = TargetSide(len(log_probs), EOS, START, MAX_TOKENS, len(self.choices))

    def candidates(self, rows: Table, num_candidates: int) -> Candidates:
        chosen = rows[:, self.choices]
        places = np.argsort(-chosen, axis=1, kind="stable")[:, :num_candidates]
        return Candidates(self.choices[places], np.take_along_axis(chosen, places, 1))

    def row(self, tokens: Sequence[int]) -> Table:
        row: Table = self.log_probs[tokens[-1] if tokens else START]
        return row

    def reference(self, request: Request) -> list[Answer]:
        return reference_answers(request, lambda _, history: self.log_probs[history[-1]], self.choices)

    def drive(
        self,
        search_class: Callable[[Request, TargetSide], Search],
        request: Request,
        *,
        sees_all: bool = False,
        has_log_probs: bool = False,
    ) -> Driven:
        search = search_class(request, self.target)
        driven = Driven(search)
        for _ in range(len(request.search.forced_prefix) + request.max_new_tokens + 1):
            before = search.live
            rows = np.stack([self.row(hypothesis.token_ids) for hypothesis in before])
            width = self.target.num_choices if sees_all else search.num_candidates
            assert width <= self.target.num_choices
            driven.widths.append(width)
            candidates = self.candidates(rows, width)
            parents = search.advance(replace(candidates, all_log_probs=list(rows)) if has_log_probs else candidates)
            while parents is None:
                assert width < self.target.num_choices, "everything was not enough"
                assert search.live is before, "a search that has to see more must not have changed"
                driven.num_again += 1
                for row, wider in list(search.wanted.items()):
                    search.take_refetched(row, self.candidates(rows[row : row + 1], wider))
                parents = search.resume()
            driven.certain.append(search.certain_tokens)
            driven.max_live = max(driven.max_live, len(search.live))
            if not parents:
                return driven
            assert len(parents) == len(search.live) <= search.max_rows
            for parent, hypothesis in zip(parents, search.live, strict=True):
                assert hypothesis.token_ids[:-1] == before[parent].token_ids
        raise AssertionError("the search does not end")


def make_table(
    seed: int,
    vocab_size: int,
    scale: float,
    levels: int | None = None,
    end_bias: float = 0.0,
    *,
    is_padding_predicted: bool = False,
    num_choices: int = 0,
) -> TableModel:
    """Make a random model: `scale` 0 makes its distribution flat, `levels` of its logits make ties.

    Padding is a token like others where it is predicted; `num_choices` tokens can be chosen, all where it is 0.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (vocab_size, vocab_size))
    if levels is not None:
        logits = np.round(logits * levels / 4) * 4 / levels
    logits *= scale
    logits[:, EOS] += end_bias
    if not is_padding_predicted:
        logits[:, PAD] = -np.inf
    choices = None
    if num_choices:
        others = rng.choice(np.arange(START, vocab_size), num_choices - START, replace=False)
        choices = np.array([PAD, EOS, *np.sort(others)])
        logits[:, np.setdiff1d(np.arange(vocab_size), choices)] = -np.inf
    top = logits.max(1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    return TableModel(log_probs.astype(np.float32), choices)
