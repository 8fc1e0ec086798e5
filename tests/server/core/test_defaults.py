"""A model's defaults: each stands in for what a request does not say, gives way to what it does, and is never why it is refused."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.server.core.defaults import default_max_new_tokens
from dragoman.server.core.requests import GenerateRequest
from dragoman.server.core.search_options import search_options
from dragoman.server.engine.messages import GREEDY, Sampling, SearchOptions
from dragoman.server.errors import InvalidRequest
from tests.examples import num_examples

EOS, MAX_NEW = 2, 32
MANY = settings(max_examples=num_examples(300, of=2000), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

MakeModel = Callable[..., Any]


def options(model: Any, max_new_tokens: int = MAX_NEW, **fields: Any) -> SearchOptions:
    return search_options(GenerateRequest(text="a", **fields), model, max_new_tokens, (), model.frames.find())


def with_defaults(make_model: MakeModel, **fields: Any) -> Any:
    return make_model(defaults=Defaults(**fields), eos_id=EOS)


def test_a_model_without_defaults_has_the_greedy_options(make_model: MakeModel) -> None:
    assert options(with_defaults(make_model)) is GREEDY


OVERRIDDEN: list[tuple[str, Any, Any, str]] = [
    ("num_beams", 4, 2, "num_beams"),
    ("num_beams", 4, 1, "num_beams"),
    ("length_penalty", 2.0, 0.0, "length_penalty"),
    ("repetition_penalty", 1.3, 1.0, "repetition_penalty"),
    ("min_new_tokens", 5, 0, "min_new_tokens"),
    ("no_repeat_ngram_size", 3, 0, "no_repeat_ngram_size"),
]


@pytest.mark.parametrize(("field", "default", "given", "option"), OVERRIDDEN)
def test_a_default_holds_until_the_request_says_otherwise(
    make_model: MakeModel, field: str, default: Any, given: Any, option: str
) -> None:
    model = with_defaults(make_model, **{field: default})
    assert getattr(options(model), option) == default
    assert getattr(options(model, return_log_probs=True), option) == default, "beside another option too"
    assert getattr(options(model, **{field: given}), option) == given
    others = {name: getattr(options(model, **{field: given}), name) for name in SearchOptions.__struct_fields__ if name != option}
    assert others == {name: getattr(GREEDY, name) for name in others}


def test_defaults_of_beams_and_of_draws_are_overridden_one_by_one(make_model: MakeModel) -> None:
    beams = with_defaults(make_model, num_beams=4, num_return_sequences=3, early_stopping=True)
    assert options(beams) == SearchOptions(num_beams=4, num_answers=3, is_stopped_early=True)
    assert options(beams, early_stopping=False) == SearchOptions(num_beams=4, num_answers=3)
    assert options(beams, num_return_sequences=1) == SearchOptions(num_beams=4, is_stopped_early=True)
    draws = with_defaults(make_model, do_sample=True, temperature=0.5, top_k=7, top_p=0.9, num_return_sequences=2)
    assert options(draws, seed=3) == SearchOptions(num_answers=2, sampling=Sampling(3, 0.5, 7, 0.9))
    assert options(draws, seed=3, top_k=0).sampling == Sampling(3, 0.5, 0, 0.9)
    assert options(draws, seed=3, temperature=1.0, top_p=1.0).sampling == Sampling(3, 1.0, 7, 1.0)
    assert options(draws, do_sample=False) == GREEDY


def test_every_request_draws_with_a_seed_of_its_own(make_model: MakeModel) -> None:
    draws = with_defaults(make_model, do_sample=True)
    seeds = {options(draws).sampling.seed for _ in range(8)}  # type: ignore[union-attr]
    assert len(seeds) == 8


DROPPED: list[tuple[dict[str, Any], dict[str, Any], SearchOptions]] = [
    ({"num_beams": 4, "early_stopping": True}, {"do_sample": True, "seed": 1}, SearchOptions(sampling=Sampling(1))),
    ({"num_beams": 4, "early_stopping": True}, {"num_beams": 1}, GREEDY),
    ({"num_beams": 4, "num_return_sequences": 4}, {"num_beams": 3}, SearchOptions(num_beams=3)),
    ({"num_beams": 4, "num_return_sequences": 2}, {"num_beams": 3}, SearchOptions(num_beams=3, num_answers=2)),
    ({"num_beams": 4, "num_return_sequences": 4}, {"num_beams": 1}, GREEDY),
    (
        {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
        {"return_alternatives": True},
        SearchOptions(has_alternatives=True),
    ),
    (
        {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "num_return_sequences": 4},
        {"num_beams": 2},
        SearchOptions(num_beams=2),
    ),
    (
        {"do_sample": True, "temperature": 0.5, "num_return_sequences": 4},
        {"return_alternatives": True, "num_return_sequences": 2},
        SearchOptions(num_answers=2, has_alternatives=True),
    ),
    ({"temperature": 0.5, "top_k": 5, "top_p": 0.5}, {}, GREEDY),
    ({"temperature": 0.5, "top_k": 5}, {"do_sample": True, "seed": 1}, SearchOptions(sampling=Sampling(1, 0.5, 5))),
    ({"early_stopping": True}, {}, GREEDY),
    ({"early_stopping": True}, {"num_beams": 2}, SearchOptions(num_beams=2, is_stopped_early=True)),
]


@pytest.mark.parametrize(("defaults", "fields", "expected"), DROPPED)
def test_a_default_that_does_not_go_with_the_request_is_dropped(
    make_model: MakeModel, defaults: dict[str, Any], fields: dict[str, Any], expected: SearchOptions
) -> None:
    model = with_defaults(make_model, **defaults)
    assert options(model, **fields) == expected


def test_a_default_of_the_least_gives_way_to_a_smaller_limit(make_model: MakeModel) -> None:
    model = with_defaults(make_model, min_new_tokens=9)
    for max_new_tokens, expected in ((10, 9), (9, 8), (3, 2), (1, 0)):
        assert options(model, max_new_tokens).min_new_tokens == expected
        assert options(model, max_new_tokens, num_beams=2).min_new_tokens == expected


def test_what_the_request_asks_for_itself_is_refused_as_ever(make_model: MakeModel) -> None:
    model = with_defaults(make_model, num_beams=4, do_sample=False)
    for fields, field in (
        ({"num_beams": 9}, "num_beams"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_return_sequences": 5}, "num_return_sequences"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_k": 3}, "top_k"),
        ({"num_beams": 2, "do_sample": True}, "do_sample"),
        ({"num_beams": 1, "early_stopping": True}, "early_stopping"),
        ({"min_new_tokens": MAX_NEW}, "min_new_tokens"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            options(model, **fields)


def test_suppressed_tokens_are_added_to_the_models(make_model: MakeModel) -> None:
    model = with_defaults(make_model, suppressed_tokens=[9, 5, 9])
    assert options(model).suppressed_tokens == [5, 9]
    assert options(model, suppressed_tokens=[7, 5]).suppressed_tokens == [5, 7, 9]
    assert options(model, suppressed_tokens=list(range(20, 276))).suppressed_tokens == [5, 9, *range(20, 276)]
    with pytest.raises(InvalidRequest, match=r"^suppressed_tokens: 257 tokens; at most 256 are allowed$"):
        options(model, suppressed_tokens=[7] * 257)


def test_a_forced_end_holds_unless_the_request_rules_it_out(make_model: MakeModel) -> None:
    model = with_defaults(make_model, is_end_forced=True)
    assert options(model).is_end_forced and options(model, num_beams=2).is_end_forced
    assert options(model, max_new_tokens=1).is_end_forced
    assert not options(model, suppressed_tokens=[EOS]).is_end_forced
    assert options(model, 2, return_alternatives=True, num_return_sequences=2).is_end_forced
    assert not options(model, 1, return_alternatives=True, num_return_sequences=2).is_end_forced, "they would all be the end"


def test_the_models_own_limit_of_new_tokens_comes_before_the_bundles(make_model: MakeModel) -> None:
    assert default_max_new_tokens(make_model().manifest) == 32
    assert default_max_new_tokens(with_defaults(make_model, max_new_tokens=7).manifest) == 7


def test_options_of_requests_without_any_are_made_once(make_model: MakeModel) -> None:
    model = with_defaults(make_model, num_beams=4, no_repeat_ngram_size=3, min_new_tokens=4, suppressed_tokens=[5])
    assert options(model) is options(model, priority=3) is options(model, 5)
    assert options(model, 4) == msgspec.structs.replace(options(model), min_new_tokens=3)


def test_forced_tokens_of_languages_come_before_the_callers_and_count(make_model: MakeModel) -> None:
    german = Language(code="de", target_prefix=[50, 51])
    model = make_model(languages=Languages(target=[german]), template=Template(target_prefix=[49]), defaults=Defaults(num_beams=2))
    assert options(model) == SearchOptions(num_beams=2, forced_prefix=[49, 50, 51], num_forced=3)
    found = search_options(GenerateRequest(text="a", forced_prefix="x"), model, 9, [7, 8], model.frames.find("", "de"))
    assert found == SearchOptions(num_beams=2, forced_prefix=[49, 50, 51, 7, 8], num_forced=3)


@st.composite
def possible_defaults(draw: st.DrawFn) -> Defaults:
    """Defaults that a manifest may have for a model of 32 new tokens and 8 slots a request."""
    fields = {
        "num_beams": st.integers(1, 8),
        "num_return_sequences": st.integers(1, 8),
        "length_penalty": st.sampled_from([-1.0, 0.0, 2.0]),
        "early_stopping": st.booleans(),
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.5, 1.0]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.5]),
        "min_new_tokens": st.integers(0, 31),
        "no_repeat_ngram_size": st.integers(0, 4),
    }
    given = {name: draw(values) for name, values in fields.items() if draw(st.booleans())}
    if given.get("do_sample"):
        given.pop("num_beams", None)
    elif given.get("num_return_sequences", 1) > given.get("num_beams", 1):
        given.pop("num_return_sequences", None)
    suppressed = draw(st.lists(st.integers(0, 329), max_size=6))
    return Defaults(**given, suppressed_tokens=suppressed, is_end_forced=draw(st.booleans()))


REQUESTED = {
    "num_beams": st.integers(0, 9),
    "num_return_sequences": st.integers(0, 9),
    "length_penalty": st.sampled_from([0.5, 11.0]),
    "early_stopping": st.booleans(),
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([0.0, 0.7]),
    "top_k": st.sampled_from([0, 9, 400]),
    "top_p": st.sampled_from([0.0, 0.7]),
    "seed": st.integers(0, 3),
    "repetition_penalty": st.sampled_from([0.0, 1.2]),
    "min_new_tokens": st.integers(0, 32),
    "no_repeat_ngram_size": st.sampled_from([0, 2, 49]),
    "suppressed_tokens": st.lists(st.integers(0, 331), max_size=3),
    "return_alternatives": st.booleans(),
    "top_log_probs": st.integers(0, 21),
}
SOME_FIELDS = st.sets(st.sampled_from(sorted(REQUESTED)), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: REQUESTED[name] for name in sorted(names)})
)


@MANY
@given(defaults=possible_defaults(), fields=SOME_FIELDS, max_new_tokens=st.integers(1, 32))
def test_a_default_is_never_why_a_request_is_refused(
    make_model: MakeModel, defaults: Defaults, fields: dict[str, Any], max_new_tokens: int
) -> None:
    with suppress(InvalidRequest):
        plainly = options(make_model(), max_new_tokens, **fields)
        found = options(make_model(defaults=defaults), max_new_tokens, **fields)
        asked = {"num_beams": "num_beams", "num_return_sequences": "num_answers", "length_penalty": "length_penalty"}
        for field in fields.keys() & asked.keys():
            assert getattr(found, asked[field]) == getattr(plainly, asked[field]), "what is asked for is had"
        assert found.has_alternatives == plainly.has_alternatives
        return
    with pytest.raises(InvalidRequest):
        options(make_model(), max_new_tokens, **fields)


@MANY
@given(defaults=possible_defaults(), max_new_tokens=st.integers(1, 32))
def test_the_options_made_once_are_those_that_would_be_made(make_model: MakeModel, defaults: Defaults, max_new_tokens: int) -> None:
    """The two ways differ in how they are made: checked and merged for each request, or taken from the manifest."""
    model = make_model(defaults=defaults)
    once, each = options(model, max_new_tokens), options(model, max_new_tokens, return_log_probs=True)
    if once.sampling is not None and each.sampling is not None:
        each = msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, seed=once.sampling.seed))
    assert once == each
