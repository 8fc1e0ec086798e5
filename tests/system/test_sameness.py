"""Sameness: a request's tokens, log-probabilities and scores are the same bits whatever else the engine has to do.

Each request is first answered alone. Then all of them arrive in random orders, staggered, among requests that are cancelled on the
way, in engines of different sizes.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.server.engine.engine import Engine
from dragoman.server.engine.loading import load_engine
from dragoman.server.engine.messages import Answer, Request, Sampling, SearchOptions
from dragoman.server.engine.scheduler import Limits

NUM_REQUESTS = 300
NUM_ORDERS = 20
ORDERS_BY_DEFAULT = 3
"""Orders tried unless `TEST_LONG` is set: each size once, on one thread and on two; all of them take minutes."""

MAX_SOURCE_TOKENS = 100
SIZES = (64, 8, 24)  # slots; the widest request needs 6
AHEAD = (16, 0, 3)
ORIGIN, DECOY = b"front", b"decoy"

Answers = dict[int, list[Answer]]
Making = Callable[[random.Random], SearchOptions]


def _rules(rng: random.Random) -> dict[str, object]:
    """Pick some of the options that every search takes."""
    options: dict[str, object] = {
        "min_new_tokens": rng.randint(1, 3),
        "repetition_penalty": rng.choice([0.8, 1.2, 2.0]),
        "no_repeat_ngram_size": rng.randint(1, 3),
        "suppressed_tokens": rng.sample(range(3, 300), rng.randint(1, 40)),
        "num_top_log_probs": rng.randint(1, 20),
        "forced_prefix": [rng.randint(3, 4999) for _ in range(rng.randint(1, 6))],
        "length_penalty": rng.choice([0.0, 0.6, 2.0]),
    }
    return {name: options[name] for name in rng.sample(sorted(options), rng.randint(0, 2))}


def _greedy(rng: random.Random) -> SearchOptions:
    return SearchOptions()


def _greedy_with_rules(rng: random.Random) -> SearchOptions:
    return SearchOptions(**_rules(rng))


def _beam(rng: random.Random) -> SearchOptions:
    num_beams = rng.randint(2, 6)
    num_answers = rng.choice([1, num_beams])
    return SearchOptions(num_beams=num_beams, num_answers=num_answers, is_stopped_early=rng.random() < 0.5, **_rules(rng))


def _sampled(rng: random.Random) -> SearchOptions:
    sampling = Sampling(
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.3, 0.7, 1.0, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 5, 40, 300]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
    )
    return SearchOptions(sampling=sampling, num_answers=rng.choice([1, 1, 4]), **_rules(rng))


def _alternatives(rng: random.Random) -> SearchOptions:
    return SearchOptions(has_alternatives=True, num_answers=rng.randint(2, 6), **_rules(rng))


KINDS: list[Making] = [_greedy, _beam, _sampled, _greedy_with_rules, _beam, _alternatives]


def _source(rng: random.Random, captions: list[str], tokenizer: ByteLevelTokenizer, eos_id: int) -> list[int]:
    """Return 1 to 100 tokens of text, end-of-sequence included."""
    words = tokenizer.encode_batch([" ".join(rng.sample(captions, 12))])[0]
    start = rng.randint(0, 5)
    length = rng.choice([rng.randint(0, 3), rng.randint(4, 20), rng.randint(0, MAX_SOURCE_TOKENS - 1), MAX_SOURCE_TOKENS - 1])
    return [*words[start : start + length], eos_id]


@pytest.fixture(scope="module")
def bundle(shipped_bundle: Callable[..., Path]) -> Bundle:
    return Bundle.open(shipped_bundle("en-de"))


@pytest.fixture(scope="module")
def int8_bundle(shipped_bundle: Callable[..., Path]) -> Bundle:
    return Bundle.open(shipped_bundle("en-de", "int8"))


@pytest.fixture(scope="module")
def requests(bundle: Bundle, captions: list[str]) -> list[Request]:
    """Requests of all kinds, with sources and limits of all lengths."""
    rng, tokenizer = random.Random(1), bundle.tokenizers().source
    return [
        Request(
            id,
            _source(rng, captions, tokenizer, bundle.manifest.eos_id),
            rng.choice([4, 8, 16, 32]),
            arrival=0.0,
            priority=rng.choice([0, 0, 0, 2]),
            is_streamed=rng.random() < 0.3,
            search=KINDS[id % len(KINDS)](rng),
        )
        for id in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def alone(bundle: Bundle, requests: list[Request]) -> Answers:
    return _answer_alone(bundle, requests)


def _answer_alone(bundle: Bundle, requests: list[Request]) -> Answers:
    """Return every request's answers from an engine that has nothing else to do, on one thread."""
    engine = _engine(bundle, 8, num_threads=1)
    answers: Answers = {}
    for request in requests:
        engine.submit(ORIGIN, request)
        while engine.has_work:
            engine.step()
        answers |= _take_answers(engine)
    assert len(answers) == len(requests)
    return answers


def _engine(bundle: Bundle, max_slots: int, num_threads: int, max_ahead: int = 0) -> Engine:
    limits = Limits(
        max_slots, max_waiting_requests=10_000, max_waiting_tokens=10_000_000, prefill_tokens_per_step=400, max_ahead=max_ahead
    )
    return load_engine(bundle, limits, num_threads, is_warmed_up=False)


def _take_answers(engine: Engine) -> Answers:
    """Collect what has ended; what was not cancelled must have an answer."""
    answers: Answers = {}
    for origin, report in engine.take_reports().items():
        for end in report.finished:
            assert end.reason in ("eos", "length") or (origin, end.reason) == (DECOY, "cancelled")
            if origin == ORIGIN:
                answers[end.id] = end.answers
    return answers


def _answer_in_random_order(engine: Engine, requests: list[Request], rng: random.Random) -> Answers:
    """Submit everything in a random order with a few steps in between, and decoys that are cancelled a few steps later."""
    answers: Answers = {}
    cancellations: list[tuple[int, int]] = []  # the number of submissions before it, and whom it concerns
    for i, request in enumerate(rng.sample(requests, len(requests))):
        now = time.monotonic()
        if rng.random() < 0.15:
            decoy = Request(i, rng.choice(requests).source_ids, 60, now, search=rng.choice(requests).search)
            engine.submit(DECOY, decoy)
            cancellations.append((i + rng.randint(0, 12), i))
        engine.submit(ORIGIN, Request(*_fields(request, arrival=now)))
        for _ in range(rng.choice([0, 0, 0, 1, 2, 3, 6])):
            engine.step()
        for cancellation in [c for c in cancellations if c[0] <= i]:
            cancellations.remove(cancellation)
            engine.cancel(DECOY, cancellation[1])
        answers |= _take_answers(engine)
    while engine.has_work:
        engine.step()
        answers |= _take_answers(engine)
    return answers


def _fields(request: Request, arrival: float) -> tuple[object, ...]:
    values = {name: getattr(request, name) for name in request.__struct_fields__}
    return tuple((values | {"arrival": arrival}).values())


def _check(answers: Answers, alone: Answers, requests: list[Request]) -> None:
    assert answers.keys() == alone.keys()
    different = [requests[id] for id in alone if answers[id] != alone[id]]
    assert not different, f"{len(different)} requests have other answers than alone; the first is {different[0]}"


def test_the_requests_are_of_all_kinds(requests: list[Request], alone: Answers) -> None:
    """What follows would show little if answers were all short, ended all alike, or if no option changed anything."""
    lengths = {len(request.source_ids) for request in requests}
    assert {1, MAX_SOURCE_TOKENS} <= lengths and len(lengths) > 40
    assert {request.search.num_beams for request in requests} == {1, 2, 3, 4, 5, 6}
    assert {answer.reason for answers in alone.values() for answer in answers} == {"eos", "length"}
    assert len({len(answer.log_probs) for answers in alone.values() for answer in answers}) > 20


@pytest.mark.parametrize("order", range(NUM_ORDERS))
def test_answers_are_the_same_bits_in_any_order_of_arrival(
    bundle: Bundle, requests: list[Request], alone: Answers, order: int
) -> None:
    if order >= ORDERS_BY_DEFAULT and not os.environ.get("TEST_LONG"):
        pytest.skip("one of the orders that are tried with TEST_LONG=1")
    engine = _engine(bundle, SIZES[order % len(SIZES)], num_threads=1 + order % 2, max_ahead=AHEAD[order % len(AHEAD)])
    _check(_answer_in_random_order(engine, requests, random.Random(order)), alone, requests)


def test_answers_in_8_bits_are_the_same_bits_in_any_order_of_arrival(
    int8_bundle: Bundle, requests: list[Request], alone: Answers
) -> None:
    some = requests[::3]
    alone_in_8_bits = _answer_alone(int8_bundle, some)
    assert any(alone_in_8_bits[request.id] != alone[request.id] for request in some), "this is another arithmetic"
    for order in range(2):
        engine = _engine(int8_bundle, SIZES[order], num_threads=1 + order, max_ahead=AHEAD[order])
        _check(_answer_in_random_order(engine, some, random.Random(order)), alone_in_8_bits, some)
