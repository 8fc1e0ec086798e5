"""What a search does with the candidates it asks for is what it does with the whole vocabulary, whatever its options."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.engine.search.choice import search_for
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.separate import SeparateSearch
from dragoman.server.engine.search.target import TargetSide
from tests.examples import num_examples

SOME = settings(max_examples=num_examples(60, of=150), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(SOME, max_examples=num_examples(200, of=500))


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
    """Make a request's search, of plain greedy requests too."""
    return search_for(request, target) or SeparateSearch(request, target)


@MANY
@given(st.data())
def test_candidates_asked_for_are_as_good_as_all_of_them(table_model: Callable[..., Any], data: st.DataObject) -> None:
    arguments = data.draw(models())
    request = data.draw(requests(arguments["vocab_size"]))
    model = table_model(**arguments)
    found, expected = model.drive(search_of, request), model.drive(search_of, request, sees_all=True)
    assert found.answers == expected.answers
    assert found.certain == expected.certain


@SOME
@given(st.data())
def test_certain_tokens_are_never_taken_back(table_model: Callable[..., Any], data: st.DataObject) -> None:
    arguments = data.draw(models())
    request = data.draw(requests(arguments["vocab_size"]))
    driven = table_model(**arguments).drive(search_of, request)
    for earlier, later in zip(driven.certain, driven.certain[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert driven.certain[-1] == driven.answers[0].token_ids


@SOME
@given(st.data())
def test_answers_keep_to_the_rules(table_model: Callable[..., Any], data: st.DataObject) -> None:
    arguments = data.draw(models())
    request = data.draw(requests(arguments["vocab_size"]))
    options, model = request.search, table_model(**arguments)
    driven = model.drive(search_of, request)
    assert 1 <= len(driven.answers) <= options.num_answers
    assert driven.max_live <= options.num_slots
    for answer in driven.answers:
        prefix, generated = answer.token_ids[: len(options.forced_prefix)], answer.token_ids[len(options.forced_prefix) :]
        is_eos = answer.reason == "eos"
        assert prefix == options.forced_prefix
        assert len(answer.log_probs) == len(generated) + is_eos <= request.max_new_tokens
        never = {1, *options.suppressed_tokens, *([] if arguments["is_padding_predicted"] else [0])}
        assert not set(generated) & never and set(generated) <= set(model.choices.tolist())
        is_forced = options.is_end_forced and len(answer.log_probs) == request.max_new_tokens
        assert is_eos or not is_forced
        assert not is_eos or is_forced or len(generated) >= options.min_new_tokens
        size = options.no_repeat_ngram_size
        ngrams = [tuple(answer.token_ids[i : i + size]) for i in range(len(answer.token_ids) - size + 1)]
        first_new = max(len(prefix) - size + 1, 0)  # the prefix itself may repeat what it likes
        assert not size or all(ngram not in ngrams[:i] for i, ngram in enumerate(ngrams) if i >= first_new)
        assert (
            [len(top) for top in answer.top_ids] == [min(options.num_top_log_probs, len(model.choices))] * len(answer.log_probs)
            if options.num_top_log_probs
            else answer.top_ids == []
        )


def test_the_property_is_tried_with_less_than_everything(table_model: Callable[..., Any]) -> None:
    """Otherwise the comparison would compare the whole vocabulary with itself."""
    model = table_model(1, 200, 1.0)
    for options in (
        GREEDY,
        SearchOptions(num_beams=8),
        SearchOptions(sampling=Sampling(1)),
        SearchOptions(repetition_penalty=2.0),
        SearchOptions(repetition_penalty=0.9),
    ):
        assert max(model.drive(search_of, Request(0, [1], 5, 0.0, search=options)).widths) < 100
    flat = table_model(1, 200, 0.0).drive(search_of, Request(0, [1], 10, 0.0, search=SearchOptions(sampling=Sampling(1))))
    assert flat.num_again, "a flat distribution must need the whole vocabulary at times"
