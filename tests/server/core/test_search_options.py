from typing import Any

import pytest

from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.core.search_options import check_length_penalty, search_options
from dragoman.server.engine.messages import GREEDY, Sampling, SearchOptions
from dragoman.server.errors import InvalidRequest

NAN, INFINITY = float("nan"), float("inf")


def options(model: Any, prefix_ids: tuple[int, ...] = (), max_new_tokens: int = 32, **fields: Any) -> SearchOptions:
    return search_options(GenerateRequest(text="a", **fields), model, max_new_tokens, prefix_ids, model.frames.find())


def test_request_without_options_shares_the_greedy_ones(make_model: Any) -> None:
    plain = GenerateRequest(model="en-de", text="a", max_new_tokens=9, truncate=True, request_id="r", priority=3)
    model = make_model()
    assert search_options(plain, model, 9, (), model.frames.find()) is GREEDY


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 1},
        {"num_return_sequences": 1},
        {"length_penalty": 1.0},
        {"repetition_penalty": 1.0},
        {"return_log_probs": True},
    ],
)
def test_options_that_say_what_is_done_anyway_are_greedy_too(make_model: Any, fields: Any) -> None:
    assert options(make_model(), **fields) is GREEDY


def test_every_option_reaches_the_engine(make_model: Any) -> None:
    model = make_model()
    beams = options(
        model,
        prefix_ids=(7, 8),
        num_beams=4,
        num_return_sequences=3,
        length_penalty=0.5,
        early_stopping=True,
        min_new_tokens=5,
        repetition_penalty=1.5,
        no_repeat_ngram_size=3,
        suppressed_tokens=[20, 9, 20],
        forced_prefix="given",
        top_log_probs=6,
    )
    assert beams == SearchOptions(
        num_beams=4,
        num_answers=3,
        length_penalty=0.5,
        is_stopped_early=True,
        min_new_tokens=5,
        repetition_penalty=1.5,
        no_repeat_ngram_size=3,
        suppressed_tokens=[9, 20],
        forced_prefix=[7, 8],
        num_top_log_probs=6,
    )
    samples = options(model, do_sample=True, num_return_sequences=8, temperature=0.5, top_k=10, top_p=0.25, seed=2**64 - 1)
    assert samples == SearchOptions(num_answers=8, sampling=Sampling(2**64 - 1, 0.5, 10, 0.25))
    alternatives = options(model, return_alternatives=True, num_return_sequences=8)
    assert alternatives == SearchOptions(num_answers=8, has_alternatives=True)


def test_sampling_without_settings_draws_from_the_model_as_it_is(make_model: Any) -> None:
    sampling = options(make_model(), do_sample=True).sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)


def test_seed_is_drawn_anew_for_each_request_that_has_none(make_model: Any) -> None:
    seeds = [options(make_model(), do_sample=True).sampling for _ in range(8)]
    assert len({sampling.seed for sampling in seeds if sampling is not None}) == 8
    assert all(sampling is not None and 0 <= sampling.seed < 2**64 for sampling in seeds)


def test_seed_of_zero_is_a_seed(make_model: Any) -> None:
    assert options(make_model(), do_sample=True, seed=0).sampling == Sampling(0)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 8, "num_return_sequences": 8},
        {"do_sample": True, "temperature": 100.0, "top_p": 1.0, "top_k": 330},
        {"length_penalty": -10.0},
        {"length_penalty": 10.0},
        {"repetition_penalty": 100.0},
        {"min_new_tokens": 31},
        {"no_repeat_ngram_size": 48},
        {"suppressed_tokens": list(range(256))},
        {"suppressed_tokens": [329]},
        {"top_log_probs": 20},
    ],
    ids=str,
)
def test_limits_themselves_are_allowed(make_model: Any, fields: Any) -> None:
    assert options(make_model(), **fields) is not GREEDY


def test_a_request_may_take_a_part_of_the_slots(make_model: Any) -> None:
    model = make_model()
    model.max_slots, model.max_slots_per_request = 64, 4
    assert options(model, num_beams=4, num_return_sequences=4).num_slots == 4
    assert options(model, do_sample=True, num_return_sequences=4).num_slots == 4
    for fields in ({"num_beams": 5}, {"do_sample": True, "num_return_sequences": 5}):
        with pytest.raises(InvalidRequest, match="5 is not in 1 to 4, max_slots_per_request of model en-de"):
            options(model, **fields)


def test_end_of_sequence_may_be_suppressed(make_model: Any) -> None:
    model = make_model()
    assert options(model, suppressed_tokens=[model.manifest.eos_id]).suppressed_tokens == [model.manifest.eos_id]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 0}, "num_beams: 0 is not in 1 to 8, max_slots_per_request of model en-de"),
        ({"num_beams": 9}, "num_beams: 9 is not in 1 to 8, max_slots_per_request of model en-de"),
        ({"num_return_sequences": 0}, "num_return_sequences: 0 is not in 1 to 1"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2 is not in 1 to 1, unless num_beams is at least as many"),
        ({"num_beams": 3, "num_return_sequences": 4}, "num_return_sequences: 4 is not in 1 to 3, num_beams"),
        ({"num_beams": 3, "num_return_sequences": 0}, "num_return_sequences: 0 is not in 1 to 3, num_beams"),
        (
            {"do_sample": True, "num_return_sequences": 9},
            "num_return_sequences: 9 is not in 1 to 8, max_slots_per_request of model en-de",
        ),
        (
            {"return_alternatives": True, "num_return_sequences": 9},
            "num_return_sequences: 9 is not in 1 to 8, max_slots_per_request",
        ),
        ({"num_beams": 2, "do_sample": True}, "do_sample: does not go with num_beams above 1, which is 2"),
        ({"num_beams": 2, "return_alternatives": True}, "return_alternatives: does not go with num_beams above 1"),
        ({"do_sample": True, "return_alternatives": True}, "return_alternatives: does not go with do_sample"),
        ({"early_stopping": True}, "early_stopping: goes with num_beams above 1 only"),
        ({"early_stopping": True, "num_beams": 1}, "early_stopping: goes with num_beams above 1 only"),
        ({"temperature": 1.0}, "temperature: goes with do_sample only"),
        ({"top_k": 5}, "top_k: goes with do_sample only"),
        ({"top_p": 1.0}, "top_p: goes with do_sample only"),
        ({"seed": 0}, "seed: goes with do_sample only"),
        ({"num_beams": 4, "seed": 1}, "seed: goes with do_sample only"),
        ({"do_sample": True, "temperature": 0.0}, "temperature: 0 is not above 0 and at most 100"),
        ({"do_sample": True, "temperature": -1.0}, "temperature: -1 is not above 0"),
        ({"do_sample": True, "temperature": 101.0}, "temperature: 101 is not above 0"),
        ({"do_sample": True, "temperature": NAN}, "temperature: nan is not above 0"),
        ({"do_sample": True, "temperature": INFINITY}, "temperature: inf is not above 0"),
        ({"do_sample": True, "top_p": 0.0}, "top_p: 0 is not above 0 and at most 1"),
        ({"do_sample": True, "top_p": 1.5}, "top_p: 1.5 is not above 0"),
        ({"do_sample": True, "top_p": NAN}, "top_p: nan is not above 0"),
        ({"do_sample": True, "top_k": 331}, "top_k: 331 is not in 0 to 330, target_vocab_size of model en-de"),
        ({"length_penalty": 10.5}, "length_penalty: 10.5 is not in -10 to 10"),
        ({"length_penalty": NAN}, "length_penalty: nan is not in -10 to 10"),
        ({"length_penalty": -INFINITY}, "length_penalty: -inf is not in -10 to 10"),
        ({"min_new_tokens": 32}, "min_new_tokens: 32 is not less than max_new_tokens, which is 32"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0 is not above 0 and at most 100"),
        ({"repetition_penalty": 100.5}, "repetition_penalty: 100.5 is not above 0"),
        ({"repetition_penalty": NAN}, "repetition_penalty: nan is not above 0"),
        ({"no_repeat_ngram_size": 49}, "no_repeat_ngram_size: 49 is not in 0 to 48, max_target_tokens of model en-de"),
        ({"suppressed_tokens": [3] * 257}, "suppressed_tokens: 257 tokens; at most 256 are allowed"),
        ({"suppressed_tokens": [4, 330]}, "suppressed_tokens: 330 is not in 0 to 329, the target vocabulary of model en-de"),
        ({"top_log_probs": 21}, "top_log_probs: 21 is not in 0 to 20"),
        # What gRPC cannot send, and other faces can.
        ({"top_log_probs": -1}, "top_log_probs: -1 is not in 0 to 20"),
        ({"do_sample": True, "top_k": -1}, "top_k: -1 is not in 0 to 330, target_vocab_size of model en-de"),
        ({"do_sample": True, "seed": -1}, "seed: -1 is not in 0 to 18446744073709551615"),
        ({"do_sample": True, "seed": 2**64}, "seed: 18446744073709551616 is not in 0 to 18446744073709551615"),
        ({"min_new_tokens": -1}, "min_new_tokens: -1 is negative"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: -1 is not in 0 to 48, max_target_tokens of model en-de"),
        ({"suppressed_tokens": [-1, 4]}, "suppressed_tokens: -1 is not in 0 to 329, the target vocabulary of model en-de"),
        ({"num_beams": -1}, "num_beams: -1 is not in 1 to 8, max_slots_per_request of model en-de"),
    ],
    ids=str,
)
def test_what_is_out_of_range_or_does_not_go_together_is_named(make_model: Any, fields: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options(make_model(), **fields)
    assert caught.value.message.startswith(message)


def test_tokens_that_leave_nothing_to_generate_cannot_be_suppressed(make_model: Any) -> None:
    model = make_model(target_vocab_size=10, eos_id=4)
    others = [i for i in range(10) if i != 4]
    assert options(model, suppressed_tokens=others).suppressed_tokens == others
    with pytest.raises(InvalidRequest, match=r"^suppressed_tokens: they leave no token of the 10"):
        options(model, suppressed_tokens=list(range(10)))
    with pytest.raises(InvalidRequest, match=r"^suppressed_tokens: they leave no token"):
        options(model, suppressed_tokens=others, min_new_tokens=1)


def test_alternatives_are_at_most_as_many_as_there_are_tokens(make_model: Any) -> None:
    model = make_model(target_vocab_size=6)
    assert options(model, return_alternatives=True, num_return_sequences=5, suppressed_tokens=[0]).num_answers == 5
    with pytest.raises(InvalidRequest, match=r"^num_return_sequences: 6 alternatives, but model en-de has 5 tokens"):
        options(model, return_alternatives=True, num_return_sequences=6, suppressed_tokens=[0])


def test_length_penalty_of_a_score_is_checked_alike() -> None:
    assert check_length_penalty(ScoreRequest()) == 1.0
    assert check_length_penalty(ScoreRequest(length_penalty=0.0)) == 0.0
    with pytest.raises(InvalidRequest, match=r"^length_penalty: 11 is"):
        check_length_penalty(ScoreRequest(length_penalty=11))


def test_tokens_to_suppress_are_counted_before_anything_is_made_of_them(make_model: Any) -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            return 4_100_000

        def __iter__(self) -> Any:
            raise AssertionError("looked at")

    for fields in ({}, {"return_alternatives": True, "num_return_sequences": 2}):
        with pytest.raises(InvalidRequest, match=r"^suppressed_tokens: 4100000 tokens; at most 256 are allowed$"):
            options(make_model(), (), 8, suppressed_tokens=Endless(), **fields)
