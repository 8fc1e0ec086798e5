"""Beam search with terms: the best answers that have them, whatever they are; rules, ends, and terms that cannot be met."""

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.server.engine.messages import Request, SearchOptions
from dragoman.server.engine.search.searches import search_for
from dragoman.server.engine.search.terms import TermSearch
from tests.examples import num_examples
from tests.server.engine.bench import EOS, PAD
from tests.server.engine.search.tables import TableModel, make_table

# More than all sequences that there are: nothing is ever dropped.
ALL = 5000


def request(terms: list[list[list[int]]], max_new_tokens: int = 12, **options: Any) -> Request:
    return Request(0, [7, EOS], max_new_tokens, 0.0, search=SearchOptions(**{"num_beams": 4} | options, terms=terms))


def num_missing(tokens: Sequence[int], terms: list[list[list[int]]]) -> int:
    """Return how many terms a sequence misses; none shares a token with another."""
    missing = [each for each in terms if each]
    since: list[int] = []
    for token in tokens:
        since.append(token)
        ended = [(len(ids), -i) for i, each in enumerate(missing) for ids in each if since[-len(ids) :] == ids]
        if ended:
            del missing[-max(ended)[1]]
            since = []
    return len(missing)


def sequences(model: TableModel, length: int) -> Iterator[tuple[list[int], float, bool]]:
    """Yield all answers of at most `length` tokens: ids, total log-probability, whether end-of-sequence is last."""
    begun: list[tuple[list[int], float]] = [([], 0.0)]
    for step in range(length):
        longer = []
        for ids, total in begun:
            for token, log_prob in enumerate(model.row(ids).tolist()):
                if token == EOS:
                    yield ids, total + log_prob, True
                elif token != PAD:
                    longer.append(([*ids, token], total + log_prob))
                    if step == length - 1:
                        yield *longer[-1], False
        begun = longer


@st.composite
def term_lists(draw: st.DrawFn, vocab_size: int, length: int) -> list[list[list[int]]]:
    ids = st.lists(st.integers(2, vocab_size - 1), min_size=1, max_size=length)
    return draw(st.lists(st.lists(ids, min_size=1, max_size=3), min_size=1, max_size=3))


@settings(max_examples=num_examples(40, of=400), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_with_room_for_all_hypotheses_the_answers_are_the_best_that_miss_fewest_terms(data: st.DataObject) -> None:
    model = make_table(data.draw(st.integers(0, 2**32 - 1)), 6, 2.0, end_bias=data.draw(st.sampled_from([-2.0, 0.0, 3.0])))
    length = data.draw(st.integers(1, 4))
    terms = data.draw(term_lists(6, 2))
    penalty = data.draw(st.sampled_from([0.0, 1.0]))
    asked = request(terms, length, num_beams=ALL, num_answers=5, length_penalty=penalty)
    found = model.drive(TermSearch, asked, has_log_probs=data.draw(st.booleans())).answers
    everything = [
        (num_missing(ids, terms), -total / (len(ids) + is_eos) ** penalty, ids) for ids, total, is_eos in sequences(model, length)
    ]
    best = sorted(everything)[: len(found)]
    assert len(found) == min(5, len(everything))
    assert [num_missing(answer.token_ids, terms) for answer in found] == [missing for missing, _, _ in best]
    for answer, (_, cost, _) in zip(found, best, strict=True):
        assert abs(answer.score + cost) < 1e-5


@settings(max_examples=num_examples(60, of=600), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_narrow_search_has_the_terms_exact_scores_and_no_more_rows_than_beams(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([12, 40, 300]))
    model = make_table(data.draw(st.integers(0, 2**32 - 1)), vocab_size, 2.0, end_bias=data.draw(st.sampled_from([0.0, 3.0])))
    terms = data.draw(term_lists(vocab_size, 3))
    num_beams = data.draw(st.sampled_from([2, 4, 8]))
    prefix = data.draw(st.lists(st.integers(2, vocab_size - 1), max_size=3))
    asked, has_log_probs = request(terms, 16 - len(prefix), num_beams=num_beams, forced_prefix=prefix), data.draw(st.booleans())
    driven = model.drive(search_for_terms, asked, has_log_probs=has_log_probs)
    [answer] = driven.answers
    assert not has_log_probs or (driven.num_again == 0 and max(driven.widths) <= 2 * num_beams)
    assert driven.max_live <= num_beams
    assert num_missing(answer.token_ids, terms) == 0 or len(terms) > 1 or num_beams < 4 or answer.reason == "length"
    tokens = [*answer.token_ids, EOS] if answer.reason == "eos" else answer.token_ids
    exact = [float(model.row(tokens[:place])[tokens[place]]) for place in range(len(prefix), len(tokens))]
    assert answer.log_probs == exact
    assert driven.certain[-1] == answer.token_ids
    for earlier, later in zip(driven.certain, driven.certain[1:], strict=False):
        assert later[: len(earlier)] == earlier, "certain tokens are never taken back"


def search_for_terms(request: Request, target: Any) -> TermSearch:
    search = search_for(request, target)
    assert isinstance(search, TermSearch)
    return search
