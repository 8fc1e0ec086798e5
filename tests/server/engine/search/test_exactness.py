"""Every search, with any options, finds what the reference does, with the candidates it asks for as with the whole vocabulary."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.engine.search.hypothesis import TargetSide
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.searches import SeparateSearch, search_for
from tests.examples import num_examples
from tests.server.engine.search.tables import make_table


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `make_table`: flat, ordinary and peaked ones, with ties and without, that end at once or hardly ever."""
    vocab_size = draw(st.one_of(st.integers(5, 30), st.integers(5, 200)))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "vocab_size": vocab_size,
        "num_choices": draw(st.one_of(st.just(0), st.integers(4, vocab_size))),
        "is_padding_predicted": draw(st.booleans()),
        "scale": draw(st.sampled_from([0.0, 0.3, 1.0, 3.0, 10.0])),
        "levels": draw(st.sampled_from([None, None, 3, 8])),
        "end_bias": draw(st.sampled_from([-8.0, 0.0, 2.0, 6.0])),
    }


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of `SearchOptions` that say which search it is."""
    kind = draw(st.sampled_from(["greedy", "beam", "sampled", "alternatives"]))
    if kind == "beam":
        num_beams = draw(st.integers(2, 8))
        return {
            "num_beams": num_beams,
            "num_answers": draw(st.integers(1, num_beams)),
            "length_penalty": draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0])),
            "is_stopped_early": draw(st.booleans()),
        }
    if kind == "alternatives":
        return {"has_alternatives": True, "num_answers": draw(st.integers(1, 8))}
    if kind == "sampled":
        sampling = Sampling(
            seed=draw(st.integers(0, 2**64 - 1)),
            temperature=draw(st.sampled_from([0.1, 0.5, 1.0, 1.3, 5.0, 100.0])),
            top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 60, 300])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.01])),
        )
        return {"sampling": sampling, "num_answers": draw(st.integers(1, 4))}
    return {}


@st.composite
def requests(draw: st.DrawFn, vocab_size: int) -> Request:
    """A request with any search and any rules."""
    tokens = st.integers(1, vocab_size - 1)
    max_new_tokens = draw(st.integers(1, 10))
    prefix = draw(st.lists(st.integers(2, vocab_size - 1), max_size=5))
    num_forced = draw(st.integers(0, len(prefix)))
    options = SearchOptions(
        min_new_tokens=draw(st.integers(0, max_new_tokens - 1)),
        repetition_penalty=draw(st.sampled_from([0.01, 0.7, 0.9, 1.0, 1.0, 1.2, 3.0])),
        no_repeat_ngram_size=draw(st.integers(0, 4)),
        suppressed_tokens=draw(st.lists(tokens, max_size=vocab_size)),
        forced_prefix=prefix,
        num_top_log_probs=draw(st.sampled_from([0, 0, 1, 20])),
        num_forced=num_forced,
        is_end_forced=draw(st.booleans()),
        **draw(searches()),
    )
    return Request(0, [1], max_new_tokens, 0.0, search=options)


def search_of(request: Request, target: TargetSide) -> Search:
    return search_for(request, target) or SeparateSearch(request, target)


@settings(max_examples=num_examples(250, of=800), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_candidates_asked_for_are_as_good_as_all_of_them_and_answers_are_the_references(data: st.DataObject) -> None:
    arguments = data.draw(models())
    request = data.draw(requests(arguments["vocab_size"]))
    model = make_table(**arguments)
    found, expected = model.drive(search_of, request), model.drive(search_of, request, sees_all=True)
    assert found.answers == expected.answers == model.reference(request)
    assert found.certain == expected.certain
    for earlier, later in zip(found.certain, found.certain[1:], strict=False):
        assert later[: len(earlier)] == earlier, "certain tokens are never taken back"
    assert found.certain[-1] == found.answers[0].token_ids
    assert found.max_live <= request.search.num_slots


def test_the_property_is_tried_with_less_than_everything() -> None:
    """Otherwise the comparison would compare the whole vocabulary with itself."""
    model, one = make_table(1, 200, 1.0), SearchOptions(sampling=Sampling(1))
    for options in (GREEDY, SearchOptions(num_beams=8), one, *(SearchOptions(repetition_penalty=by) for by in (0.9, 2.0))):
        assert max(model.drive(search_of, Request(0, [1], 5, 0.0, search=options)).widths) < 100
    flat = make_table(1, 200, 0.0).drive(search_of, Request(0, [1], 10, 0.0, search=one))
    assert flat.num_again, "a flat distribution must need the whole vocabulary at times"
