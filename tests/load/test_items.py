from collections import Counter

import pytest

from dragoman.load.items import Items
from dragoman.load.plan import Injections
from dragoman.load.trace import Entry


def test_a_call_depends_on_the_seed_and_its_number_only(make_plan) -> None:
    plan = make_plan(seed=3, run_id="run", work={"mix": {"unary": 0.5, "batch": 0.5}, "batch_size": 3})
    one, other = Items(plan), Items(plan)
    backwards = [other.make(number) for number in reversed(range(30))]
    assert [one.make(number) for number in range(30)] == backwards[::-1]


def test_shares_are_kept(make_plan) -> None:
    injections = Injections(cancel_share=0.1, deadline_share=0.1, slow_share=0.1, malformed_share=0.1)
    items = Items(make_plan(injections=injections, work={"mix": {"unary": 0.75, "stream": 0.25}, "beams": {1: 0.5, 4: 0.5}}))
    made = [items.make(number) for number in range(5000)]
    groups = Counter(item.group for item in made)
    expected = {"unary": 0.45, "stream": 0.15, "cancel": 0.1, "deadline": 0.1, "slow": 0.1, "malformed": 0.1}
    assert {name: count / 5000 for name, count in groups.items()} == pytest.approx(expected, abs=0.02)
    beams = Counter(item.requests[0].num_beams for item in made if item.group != "malformed")
    assert set(beams) == {1, 4} and beams[1] / beams[4] == pytest.approx(1, abs=0.1)


def test_slow_readers_read_streams_and_malformed_requests_come_alone(make_plan) -> None:
    for name, kinds in (("slow", {"stream"}), ("malformed", {"unary"})):
        items = Items(make_plan(injections=Injections(**{f"{name}_share": 1.0}), work={"mix": {"batch": 1.0}}))
        made = [items.make(number) for number in range(50)]
        assert {item.kind for item in made} == kinds
        assert all(len(item.requests) == 1 for item in made)


def test_every_malformed_request_differs_from_a_right_one(make_plan) -> None:
    right = Items(make_plan())
    wrong = Items(make_plan(injections=Injections(malformed_share=1.0)))
    kinds = set()
    for number in range(60):
        request = wrong.make(number).requests[0]
        changed = {field.name for field, _ in request.ListFields()} - {
            field.name for field, _ in right.make(number).requests[0].ListFields()
        }
        kinds.add(tuple(sorted(changed)) or ("text",) * (not request.text.strip()))
    assert kinds >= {("text",), ("max_new_tokens",), ("num_beams",), ("do_sample", "temperature"), ("priority",), ("model",)}


def test_a_trace_says_what_a_call_asks(make_plan) -> None:
    items = Items(make_plan(work={"max_new_tokens": 9, "beams": {2: 1.0}}))
    request = items.make(0, Entry(1.0, "a dog", None, 4, 5)).requests[0]
    assert (request.text, request.num_beams, request.max_new_tokens) == ("a dog", 4, 5)
    request = items.make(0, Entry(1.0, words=8)).requests[0]
    assert (len(request.text.split()), request.num_beams, request.max_new_tokens) == (8, 2, 9)


def test_ids_of_a_run_are_unique_and_name_it(make_plan) -> None:
    items = Items(make_plan(run_id="load-1", work={"mix": {"batch": 1.0}, "batch_size": 4}))
    ids = [request.request_id for number in range(20) for request in items.make(number).requests]
    assert len(set(ids)) == 80 and all(request_id.startswith("load-1-") for request_id in ids)


def test_fields_of_the_search_reach_the_request(make_plan) -> None:
    request = Items(make_plan(work={"search": {"do_sample": True, "temperature": 0.5}, "priority": 3})).make(0).requests[0]
    assert (request.do_sample, request.temperature, request.priority) == (True, 0.5, 3)


def test_what_the_search_denies_is_sent_and_what_it_leaves_out_is_not(make_plan) -> None:
    request = Items(make_plan(work={"search": {"early_stopping": False, "top_k": 0}})).make(0).requests[0]
    assert request.HasField("early_stopping") and request.HasField("top_k")
    assert not (request.HasField("do_sample") or request.source_language)


def test_a_version_reaches_the_request(make_plan) -> None:
    assert Items(make_plan(work={"model_version": "canary"})).make(0).requests[0].model_version == "canary"


def test_languages_reach_the_request(make_plan) -> None:
    request = Items(make_plan(work={"source_language": "en", "target_language": "de"})).make(0).requests[0]
    assert (request.source_language, request.target_language) == ("en", "de")
