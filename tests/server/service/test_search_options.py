"""Search options of requests at their limits, and models' defaults: each stands in for what a request does not have."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.server.engine.messages import GREEDY, Sampling, SearchOptions
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.requests import GenerateRequest, default_max_new_tokens, search_options
from tests.examples import num_examples

NAN, INFINITY, EOS, MAX_NEW = float("nan"), float("inf"), 2, 32
MANY = settings(max_examples=num_examples(200, of=2000), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MakeModel = Callable[..., Any]
DRAWN = {"do_sample": True, "seed": 1}


def options(model: Any, max_new_tokens: int = MAX_NEW, prefix_ids: tuple[int, ...] = (), **fields: Any) -> SearchOptions:
    request, template = GenerateRequest(text="a", **fields), model.templates.find()
    return search_options(request, model.manifest, model.max_slots_per_request, max_new_tokens, prefix_ids, template.search)


def refusal(model: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        options(model, **fields)
    return caught.value.message


def with_defaults(make_model: MakeModel, **fields: Any) -> Any:
    return make_model(defaults=Defaults(**fields), eos_id=EOS)


def test_options_without_effect_share_the_greedy_ones(make_model: MakeModel) -> None:
    ones = dict.fromkeys(("num_beams", "num_return_sequences", "length_penalty", "repetition_penalty"), 1)
    drawn_at_zero = {"do_sample": True, "temperature": 0.0, "top_k": 5, "top_p": 0.9, "seed": 7}
    for fields in ({}, ones, {"return_log_probs": True, "priority": 3, "truncate": True}, {"top_p": 1.0}, drawn_at_zero):
        assert options(make_model(), **fields) is GREEDY
    assert options(make_model(defaults=Defaults(do_sample=True)), temperature=0.0) is GREEDY


MOST = {"length_penalty": 10.0, "repetition_penalty": 100.0, "min_new_tokens": 31, "no_repeat_ngram_size": 48}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_beams": 8, "num_return_sequences": 8}, {"num_beams": 8, "num_answers": 8}),
        ({"num_beams": 2, "early_stopping": True}, {"num_beams": 2, "is_stopped_early": True}),
        ({"length_penalty": -10.0}, {"length_penalty": -10.0}),
        (MOST, MOST),
        ({"suppressed_tokens": [329, 9, 329]}, {"suppressed_tokens": [9, 329]}),
        ({"suppressed_tokens": list(range(256))}, {"suppressed_tokens": list(range(256))}),
        ({"top_log_probs": 20}, {"num_top_log_probs": 20}),
        ({"return_alternatives": True, "num_return_sequences": 8}, {"num_answers": 8, "has_alternatives": True}),
        ({"do_sample": True, "seed": 0}, {"sampling": Sampling(0, 1.0, 0, 1.0)}),
        (
            {"do_sample": True, "seed": 2**64 - 1, "num_return_sequences": 8, "temperature": 100.0, "top_k": 330, "top_p": 1.0},
            {"num_answers": 8, "sampling": Sampling(2**64 - 1, 100.0, 330, 1.0)},
        ),
    ],
    ids=str,
)
def test_every_option_reaches_the_engine_up_to_its_limit(make_model: MakeModel, fields: Any, expected: Any) -> None:
    assert options(make_model(), **fields) == SearchOptions(**expected)
    prefixed = options(make_model(), prefix_ids=(7, 8), **fields)
    assert prefixed == SearchOptions(**expected, forced_prefix=[7, 8])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[({"num_beams": n}, f"num_beams: {n} is not in 1 to 8, max_slots_per_request of model en-de") for n in (-1, 0, 9)],
        ({"num_return_sequences": 0}, "num_return_sequences: 0 is not in 1 to 1"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2 is not in 1 to 1, unless num_beams is at least as many"),
        *[({"num_beams": 3, "num_return_sequences": n}, f"num_return_sequences: {n} is not in 1 to 3, num_beams") for n in (0, 4)],
        *[
            ({field: True, "num_return_sequences": 9}, "num_return_sequences: 9 is not in 1 to 8, max_slots_per_request of model")
            for field in ("do_sample", "return_alternatives")
        ],
        ({"num_beams": 2, "do_sample": True}, "do_sample: does not go with num_beams above 1, which is 2"),
        ({"num_beams": 2, "return_alternatives": True}, "return_alternatives: does not go with num_beams above 1"),
        ({"do_sample": True, "return_alternatives": True}, "return_alternatives: does not go with do_sample"),
        ({"early_stopping": True}, "early_stopping: goes with num_beams above 1 only"),
        *[
            ({field: value}, f"{field}: goes with do_sample only")
            for field, value in (("temperature", 1.0), ("top_k", 5), ("top_p", 0.9), ("seed", 0))
        ],
        *[({**DRAWN, "temperature": n}, f"temperature: {n:g} is not above 0 and at most 100") for n in (-1.0, 101.0)],
        *[({**DRAWN, "temperature": n}, f"temperature: {n:g} is not above 0") for n in (NAN, INFINITY)],
        *[({**DRAWN, "top_p": n}, f"top_p: {n:g} is not above 0 and at most 1") for n in (0.0, 1.5, NAN)],
        *[({**DRAWN, "top_k": n}, f"top_k: {n} is not in 0 to 330, target_vocab_size of model en-de") for n in (-1, 331)],
        *[({**DRAWN, "seed": n}, f"seed: {n} is not in 0 to {2**64 - 1}") for n in (-1, 2**64)],
        *[({"length_penalty": n}, f"length_penalty: {n:g} is not in -10 to 10") for n in (10.5, -10.5, NAN, -INFINITY)],
        ({"min_new_tokens": 32}, "min_new_tokens: 32 is not less than max_new_tokens, which is 32"),
        ({"min_new_tokens": -1}, "min_new_tokens: -1 is negative"),
        *[({"repetition_penalty": n}, f"repetition_penalty: {n:g} is not above 0 and at most 100") for n in (0.0, 100.5, NAN)],
        *[
            ({"no_repeat_ngram_size": n}, f"no_repeat_ngram_size: {n} is not in 0 to 48, max_target_tokens of model en-de")
            for n in (-1, 49)
        ],
        *[
            ({"suppressed_tokens": [4, n]}, f"suppressed_tokens: {n} is not in 0 to 329, the target vocabulary of model en-de")
            for n in (-1, 330)
        ],
        *[({"top_log_probs": n}, f"top_log_probs: {n} is not in 0 to 20") for n in (-1, 21)],
    ],
    ids=str,
)
def test_options_out_of_range_or_in_conflict_are_named(make_model: MakeModel, fields: Any, message: str) -> None:
    assert refusal(make_model(), **fields).startswith(message)


def test_some_token_must_be_left_to_generate(make_model: MakeModel) -> None:
    model = make_model(target_vocab_size=10, eos_id=4)
    others = [i for i in range(10) if i != 4]
    assert options(model, suppressed_tokens=[4]).suppressed_tokens == [4]
    assert options(model, suppressed_tokens=others).suppressed_tokens == others
    assert refusal(model, suppressed_tokens=list(range(10))).startswith("suppressed_tokens: they leave no token of the 10")
    assert refusal(model, suppressed_tokens=others, min_new_tokens=1).startswith("suppressed_tokens: they leave no token")
    few, fields = make_model(target_vocab_size=6), {"return_alternatives": True, "suppressed_tokens": [0]}
    assert options(few, num_return_sequences=5, **fields).num_answers == 5
    message = "num_return_sequences: 6 alternatives, but model en-de has 5 tokens"
    assert refusal(few, num_return_sequences=6, **fields).startswith(message)


# Defaults of models


GIVEN = [("length_penalty", 2.0, 0.0), ("repetition_penalty", 1.3, 1.0), ("min_new_tokens", 5, 0), ("no_repeat_ngram_size", 3, 0)]
BEAMS = {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True}
DRAWS = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "num_return_sequences": 2}


@pytest.mark.parametrize(
    ("defaults", "fields", "expected"),
    [
        ({"num_beams": 4}, {"num_beams": 2}, {"num_beams": 2}),
        *[({name: default}, {}, {name: default}) for name, default, _ in GIVEN],
        *[({name: default}, {name: given}, {name: given}) for name, default, given in GIVEN],
        (BEAMS, {}, {"num_beams": 4, "num_answers": 3, "is_stopped_early": True}),
        (BEAMS, {"early_stopping": False}, {"num_beams": 4, "num_answers": 3}),
        (BEAMS, {"num_return_sequences": 1}, {"num_beams": 4, "is_stopped_early": True}),
        (DRAWS, {"seed": 3}, {"num_answers": 2, "sampling": Sampling(3, 0.5, 7, 0.9)}),
        (DRAWS, {"seed": 3, "top_k": 0}, {"num_answers": 2, "sampling": Sampling(3, 0.5, 0, 0.9)}),
        (DRAWS, {"seed": 3, "temperature": 1.0, "top_p": 1.0}, {"num_answers": 2, "sampling": Sampling(3, 1.0, 7, 1.0)}),
        (DRAWS, {"do_sample": False}, {}),
        # Options that the request excludes are dropped.
        ({"num_beams": 4, "early_stopping": True}, DRAWN, {"sampling": Sampling(1)}),
        (BEAMS, {"num_beams": 1}, {}),
        ({"num_beams": 4, "num_return_sequences": 4}, {"num_beams": 3}, {"num_beams": 3}),
        ({"num_beams": 4, "num_return_sequences": 2}, {"num_beams": 3}, {"num_beams": 3, "num_answers": 2}),
        (BEAMS, {"return_alternatives": True}, {"has_alternatives": True}),
        (DRAWS | {"num_return_sequences": 4}, {"num_beams": 2}, {"num_beams": 2}),
        (DRAWS, {"return_alternatives": True, "num_return_sequences": 2}, {"num_answers": 2, "has_alternatives": True}),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.5}, {}, {}),
        ({"temperature": 0.5, "top_k": 5}, DRAWN, {"sampling": Sampling(1, 0.5, 5)}),
        ({"early_stopping": True}, {}, {}),
        ({"early_stopping": True}, {"num_beams": 2}, {"num_beams": 2, "is_stopped_early": True}),
    ],
    ids=str,
)
def test_defaults_are_overridden_one_by_one_and_dropped_in_conflict(
    make_model: MakeModel, defaults: Any, fields: Any, expected: Any
) -> None:
    assert options(with_defaults(make_model, **defaults), **fields) == SearchOptions(**expected)


@pytest.mark.parametrize("fields", [{"num_beams": 1}, {"do_sample": True}])
def test_a_penalty_of_beam_search_is_not_applied_without_beams(make_model: MakeModel, fields: Any) -> None:
    """Transformers takes it off log-probabilities in beam search, off logits otherwise."""
    model = with_defaults(make_model, num_beams=4, repetition_penalty=1.2)
    assert "repetition_penalty: has to be said without beams: the model's, 1.2," in refusal(model, **fields)
    assert options(model, repetition_penalty=1.1, **fields).repetition_penalty == pytest.approx(1.1)
    assert options(model, num_beams=2).repetition_penalty == options(model, return_alternatives=True).repetition_penalty == 1.2


def test_slots_of_a_request_are_limited_and_seeds_are_drawn(make_model: MakeModel) -> None:
    model = make_model()
    model.max_slots_per_request = 4
    for fields in ({"num_beams": 4}, {"do_sample": True}):
        assert options(model, num_return_sequences=4, **fields).num_slots == 4
    for fields in ({"num_beams": 5}, {"do_sample": True, "num_return_sequences": 5}):
        assert "5 is not in 1 to 4, max_slots_per_request of model en-de" in refusal(model, **fields)
    seeds = {options(model, do_sample=True).sampling.seed for _ in range(8)}  # type: ignore[union-attr]
    assert len(seeds) == 8 and all(0 <= seed < 2**64 for seed in seeds)


def test_a_default_of_the_least_gives_way_to_a_smaller_limit(make_model: MakeModel) -> None:
    model = with_defaults(make_model, min_new_tokens=9)
    for max_new_tokens, expected in ((10, 9), (9, 8), (3, 2), (1, 0)):
        assert options(model, max_new_tokens).min_new_tokens == expected
        assert options(model, max_new_tokens, num_beams=2).min_new_tokens == expected


def test_suppressed_tokens_are_added_to_the_models(make_model: MakeModel) -> None:
    model = with_defaults(make_model, suppressed_tokens=[9, 5, 9])
    assert options(model).suppressed_tokens == [5, 9]
    assert options(model, suppressed_tokens=[7, 5]).suppressed_tokens == [5, 7, 9]
    assert options(model, suppressed_tokens=list(range(20, 276))).suppressed_tokens == [5, 9, *range(20, 276)]


def test_a_forced_end_holds_unless_the_request_rules_it_out(make_model: MakeModel) -> None:
    model, several = with_defaults(make_model, is_end_forced=True), {"return_alternatives": True, "num_return_sequences": 2}
    for max_new_tokens, fields, is_forced in ((32, {}, True), (32, {"num_beams": 2}, True), (1, {}, True), (2, several, True)):
        assert options(model, max_new_tokens, **fields).is_end_forced is is_forced
    assert not options(model, suppressed_tokens=[EOS]).is_end_forced
    assert not options(model, 1, **several).is_end_forced, "all alternatives would be the end"


def test_options_of_requests_without_any_are_made_once(make_model: MakeModel) -> None:
    model = with_defaults(make_model, num_beams=4, no_repeat_ngram_size=3, min_new_tokens=4, suppressed_tokens=[5])
    assert options(model) is options(model, priority=3) is options(model, 5)
    assert options(model, 4) == msgspec.structs.replace(options(model), min_new_tokens=3)
    assert default_max_new_tokens(make_model().manifest) == 32
    assert default_max_new_tokens(with_defaults(make_model, max_new_tokens=7).manifest) == 7


def test_forced_tokens_of_languages_come_before_the_callers(make_model: MakeModel) -> None:
    german = Language(code="de", target_prefix=[50, 51])
    model = make_model(languages=Languages(target=[german]), template=Template(target_prefix=[49]), defaults=Defaults(num_beams=2))
    assert options(model) == SearchOptions(num_beams=2, forced_prefix=[49, 50, 51], num_forced=3)
    found = search_options(
        GenerateRequest(text="a", forced_prefix="x"), model.manifest, 8, 9, [7, 8], model.templates.find("", "de").search
    )
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
    if given.get("num_beams", 1) > 1:  # a penalty of beam search is no default without beams, and refused there
        given.pop("repetition_penalty", None)
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
    """Nor does it matter whether options are taken from the manifest, or checked and merged for each request."""
    model = make_model(defaults=defaults)
    once, each = options(model, max_new_tokens), options(model, max_new_tokens, return_log_probs=True)
    if once.sampling is not None and each.sampling is not None:
        each = msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, seed=once.sampling.seed))
    assert once == each
    with suppress(InvalidRequest):
        plainly = options(make_model(), max_new_tokens, **fields)
        found = options(model, max_new_tokens, **fields)
        same = {"num_beams": "num_beams", "num_return_sequences": "num_answers", "length_penalty": "length_penalty"}
        for field in fields.keys() & same.keys():
            assert getattr(found, same[field]) == getattr(plainly, same[field])
        assert found.has_alternatives == plainly.has_alternatives
        return
    with pytest.raises(InvalidRequest):
        options(make_model(), max_new_tokens, **fields)
