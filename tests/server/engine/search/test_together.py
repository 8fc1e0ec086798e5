"""Searches that go on together do what each would have done by itself, to the last bit."""

from typing import Any

import numpy as np
import pytest

from dragoman.server.engine.messages import Request, Sampling, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.choice import search_for
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.target import TargetSide
from dragoman.server.engine.search.together import advances
from tests.server.engine.bench import EOS, START
from tests.server.engine.search.tables import TableModel, make_table

VOCAB_SIZE = 12
TARGET = TargetSide(VOCAB_SIZE, EOS, START, 16)

MIXED = [
    SearchOptions(num_beams=2),
    SearchOptions(num_beams=4, num_answers=3),
    SearchOptions(num_beams=4, is_stopped_early=True),
    SearchOptions(num_beams=4, length_penalty=0.2),
    SearchOptions(num_beams=4, forced_prefix=[5, 3]),
    SearchOptions(num_beams=4, is_end_forced=True),
    SearchOptions(num_beams=4, num_top_log_probs=3),
    SearchOptions(num_beams=4, no_repeat_ngram_size=2),
    SearchOptions(num_beams=4, suppressed_tokens=[4]),
    SearchOptions(num_beams=8),  # of more extensions than the vocabulary has tokens
    SearchOptions(num_answers=2, sampling=Sampling(1)),
]


def searches() -> list[Search]:
    found = [search_for(Request(i, [7, EOS], 9, 0.0, search=options), TARGET) for i, options in enumerate(MIXED)]
    return [search for search in found if search is not None]


def state(search: Search) -> Any:
    return search.live, search.num_candidates, search.wanted, search.num_generated, search.max_rows


def go_on(model: TableModel, random: np.random.Generator) -> None:
    """Give all searches the same steps, once together and once apart, in rows that are in no order, and compare after each."""
    together, apart = searches(), searches()
    while together:
        counts = [len(search.live) for search in together]
        shuffled = random.permutation(sum(counts) + 3).tolist()
        rows = [[shuffled.pop() for _ in range(count)] for count in counts]
        log_probs = np.zeros((sum(counts) + 3, VOCAB_SIZE), np.float32)
        for search, own in zip(together, rows, strict=True):
            log_probs[own] = [model.row(hypothesis.token_ids) for hypothesis in search.live]
        candidates = model.candidates(log_probs, VOCAB_SIZE)
        parents = [advance() for advance in advances(together, rows, candidates)]
        assert parents == [one.advance(candidates.of(own, one.num_candidates)) for one, own in zip(apart, rows, strict=True)]
        for one, other in zip(together, apart, strict=True):
            assert state(one) == state(other)
            if not one.live:
                assert one.answers() == other.answers()
        running = [i for i, search in enumerate(together) if search.live]
        together, apart = [together[i] for i in running], [apart[i] for i in running]


IMPOSSIBLE = np.full((VOCAB_SIZE, VOCAB_SIZE), -np.inf, np.float32)
IMPOSSIBLE[:, :6] = np.log(np.random.default_rng(3).dirichlet(np.ones(6), VOCAB_SIZE))
MODELS = [make_table(seed, VOCAB_SIZE, 2.0, None, 1.0) for seed in range(6)]
EQUAL = TableModel(np.full((VOCAB_SIZE, VOCAB_SIZE), -2.5, np.float32))


@pytest.mark.parametrize("model", [*MODELS, EQUAL, TableModel(IMPOSSIBLE)])
def test_searches_that_go_on_together_do_what_each_does_alone(model: TableModel) -> None:
    go_on(model, np.random.default_rng(0))


def test_beams_without_rules_are_ranked_together_and_others_see_their_own_candidates() -> None:
    unruled = [isinstance(search, BeamSearch) and search.is_unruled for search in searches()]
    assert unruled == [True, True, True, True, False, True, False, False, False, True, False]
