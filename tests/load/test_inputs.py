"""Requests and their times are drawn as the options say: arrivals, texts, traces, injections and targets."""

import gzip
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dragoman.load.conditions import parse_fields, parse_lengths, parse_number, parse_shares, parse_slos, parse_time
from dragoman.load.connection import make_server
from dragoman.load.items import Items, read_texts
from dragoman.load.plan import Injections, Server
from dragoman.load.schedule import Arrivals, Entry, due_times, measure_trace, read_trace
from dragoman.load.scrape import full_url
from dragoman.model.errors import InputError
from tests.load.conftest import make_plan

HOSTS = {"one": ["10.0.0.1", "fd00::1"], "two": ["10.0.0.2"], "six": ["fd00::6"], "10.0.0.9": ["10.0.0.9"], "fd00::9": ["fd00::9"]}


def lookup(host: str, port: str) -> list[str]:
    if host not in HOSTS:
        raise OSError(-2, "Name or service not known")
    return HOSTS[host]


def test_arrivals_have_the_rate_and_the_burstiness_of_each_moment_and_depend_on_the_seed() -> None:
    assert list(due_times(Arrivals(8.0, "constant"), 2.0, 0)) == [i / 8 for i in range(16)]
    one, again, other = (list(due_times(Arrivals(50.0, "gamma", 0.5, 200.0), 10.0, seed)) for seed in (1, 1, 2))
    assert one == again == sorted(one) != other and one[0] >= 0 and one[-1] < 10.0
    for shape, burstiness in (("poisson", 1.0), ("gamma", 0.25), ("gamma", 4.0)):
        gaps = np.diff(list(due_times(Arrivals(100.0, shape, burstiness), 300.0, seed=4)))
        assert gaps.min() >= 0
        assert gaps.mean() == pytest.approx(0.01, rel=0.04)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)
        if shape == "poisson":
            assert np.median(gaps) == pytest.approx(0.01 * np.log(2), rel=0.04)
    for first, last in ((20.0, 180.0), (180.0, 20.0)):
        times = np.array(list(due_times(Arrivals(first, "constant", ramp_to=last), 10.0, 0)))
        assert len(times) == pytest.approx(1000, abs=2)
        for second in range(10):
            expected = first + (last - first) * (second + 0.5) / 10
            assert ((times >= second) & (times < second + 1)).sum() == pytest.approx(expected, abs=2)


def test_lengths_follow_their_distribution() -> None:
    def lengths(text: str) -> list[int]:
        drawn, draws = parse_lengths(text), random.Random(5)
        return [drawn.draw(draws) for _ in range(4000)]

    assert set(lengths("12")) == set(lengths("constant:12")) == {12}
    assert set(lengths("uniform:3:6")) == {3, 4, 5, 6}
    for kind in ("normal", "lognormal"):
        drawn = lengths(f"{kind}:20:5")
        assert np.mean(drawn) == pytest.approx(20, abs=0.4) and np.std(drawn) == pytest.approx(5, abs=0.4)
    assert min(lengths("normal:2:30")) == 1
    assert len(Items(make_plan(work={"words": parse_lengths("7")})).make(0).requests[0].text.split()) == 7


def test_lines_of_a_file_are_drawn_or_the_file_is_named(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfa dog\r\n\n  a cat \n"
    for name, written in (("texts", content), ("texts.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(written)
        items = Items(make_plan(work={"texts": str(tmp_path / name)}))
        assert {items.make(number).requests[0].text for number in range(50)} == {"a dog", "a cat"}
    whole = gzip.compress(random.Random(0).randbytes(1000).hex().encode())
    contents = {"blank": b"\n \n", "latin": b"caf\xe9\n", "plain.gz": b"a dog\n"}
    contents |= {"cut.gz": whole[:-20], "broken.gz": whole[:20] + bytes(100)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    for name in (*contents, "folder", "missing"):
        with pytest.raises(InputError, match=name):
            read_texts(tmp_path / name)
    for name in ("blank", "latin", "missing"):
        with pytest.raises(InputError, match=name):
            measure_trace(tmp_path / name)


def test_a_trace_has_numbers_and_objects_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('0.5\n\n{"at": 1, "text": "a dog", "num_beams": 4}\n{"at": 1, "words": 7, "max_new_tokens": 3}\n')
    assert list(read_trace(path)) == [Entry(0.5), Entry(1.0, "a dog", None, 4), Entry(1.0, None, 7, None, 3)]
    assert measure_trace(path) == (3, 1.0)
    for line, reason in (
        ("soon", "malformed"),
        ("-1", ">= 0"),
        ("NaN", "malformed"),
        ("0.5", "due before"),
        ('{"text": "a"}', "at"),
        ('{"at": 2, "beams": 3}', "beams"),
        ('{"at": 2, "words": 0}', "words"),
        ('{"at": 2, "words": 1, "text": "a"}', "exclude"),
        ("[1]", "got `array`"),
        ("[" * 100_000, "got `array`"),
        ('{"at": 1e999}', "at"),
    ):
        path.write_text(f"1.0\n{line}\n")
        with pytest.raises(InputError, match=f"trace, line 2: .*{reason}"):
            measure_trace(path)


def test_a_call_depends_on_the_seed_and_its_number_alone() -> None:
    plan = make_plan(seed=3, run_id="run", work={"mix": {"unary": 0.5, "batch": 0.5}, "batch_size": 4})
    one, other = Items(plan), Items(plan)
    made = [one.make(number) for number in range(30)]
    assert made == [other.make(number) for number in reversed(range(30))][::-1]
    ids = [request.request_id for item in made for request in item.requests]
    assert len(set(ids)) == len(ids) > 60 and all(request_id.startswith("run-") for request_id in ids)


def test_kinds_widths_and_injections_have_their_shares() -> None:
    injections = Injections(cancel_share=0.1, deadline_share=0.1, slow_share=0.1, malformed_share=0.1)
    items = Items(make_plan(injections=injections, work={"mix": {"unary": 0.75, "stream": 0.25}, "beams": {1: 0.5, 4: 0.5}}))
    made = [items.make(number) for number in range(5000)]
    groups = Counter(item.group for item in made)
    expected = {"unary": 0.45, "stream": 0.15, "cancel": 0.1, "deadline": 0.1, "slow": 0.1, "malformed": 0.1}
    assert {name: count / 5000 for name, count in groups.items()} == pytest.approx(expected, abs=0.02)
    beams = Counter(item.requests[0].num_beams for item in made if item.group != "malformed")
    assert set(beams) == {1, 4} and beams[1] / beams[4] == pytest.approx(1, abs=0.1)


def test_slow_readers_read_streams_and_malformed_requests_come_alone_and_are_wrong() -> None:
    for name, kind in (("slow", "stream"), ("malformed", "unary")):
        items = Items(make_plan(injections=Injections(**{f"{name}_share": 1.0}), work={"mix": {"batch": 1.0}}))
        assert {(item.kind, len(item.requests)) for item in map(items.make, range(50))} == {(kind, 1)}
    right, wrong = Items(make_plan()), Items(make_plan(injections=Injections(malformed_share=1.0)))
    kinds = set()
    for number in range(60):
        (request,), (usual,) = wrong.make(number).requests, right.make(number).requests
        changed = {field.name for field, _ in request.ListFields()} - {field.name for field, _ in usual.ListFields()}
        kinds.add(tuple(sorted(changed)) or ("text",) * (not request.text.strip()))
    assert kinds >= {("text",), ("max_new_tokens",), ("num_beams",), ("do_sample", "temperature"), ("priority",), ("model",)}


def test_fields_of_the_work_reach_the_request_and_a_trace_overrides_them() -> None:
    texts = ("do_sample=true", "temperature=0.5", "early_stopping=FALSE", "top_k=0", "priority=-3", "model_version=canary")
    fields = parse_fields([*texts, "truncate=true", "suppressed_tokens=5,7", "forced_prefix=a=b", "max_new_tokens=9"])
    items = Items(make_plan(work={"beams": {2: 1.0}, "fields": fields | {"source_language": "en"}}))
    request = items.make(0).requests[0]
    sent = {field.name: value for field, value in request.ListFields()}
    options = {"do_sample": True, "temperature": 0.5, "early_stopping": False, "top_k": 0, "priority": -3, "truncate": True}
    others = {"model_version": "canary", "source_language": "en", "forced_prefix": "a=b", "max_new_tokens": 9, "num_beams": 2}
    assert {name: sent[name] for name in (*options, *others)} == options | others and [*sent["suppressed_tokens"]] == [5, 7]
    assert not (request.HasField("min_new_tokens") or request.model)
    request = items.make(0, Entry(1.0, "a dog", None, 4, 5)).requests[0]
    assert (request.text, request.num_beams, request.max_new_tokens) == ("a dog", 4, 5)
    request = items.make(0, Entry(1.0, words=8)).requests[0]
    assert (len(request.text.split()), request.num_beams, request.max_new_tokens) == (8, 2, 9)


TARGETS = {
    # One server is left to gRPC.
    "dns:///dragoman:8500": Server("dns:///dragoman:8500"),
    "ipv4:10.0.0.1:1,10.0.0.2:2": Server("ipv4:10.0.0.1:1,10.0.0.2:2"),
    "http://localhost/": Server("localhost:8500"),
    # Several are one target of all addresses.
    "one:1, two:2,10.0.0.9:3": Server("ipv4:10.0.0.1:1,10.0.0.2:2,10.0.0.9:3", "one"),
    "one:1,six:65535": Server("ipv6:[fd00::1]:1,[fd00::6]:65535", "one"),
    "[fd00::9]:1,six:2": Server("ipv6:[fd00::9]:1,[fd00::6]:2", "fd00::9"),
    "two:1,two:1": Server("ipv4:10.0.0.2:1", "two"),
}
WRONG = "|,|one:99999|https://one|one:1,two|one:1,:2|one:1,two:x|one:1,two:0|one:1,two:65536|one:1,unknown:2|two:1,six:2"


def test_servers_become_one_target_or_are_named() -> None:
    assert {text: make_server(text, lookup) for text in TARGETS} == TARGETS
    assert make_server("https://localhost", lookup, is_secure=True) == Server("localhost:8500")
    for text in WRONG.split("|"):
        with pytest.raises(InputError, match="--server"):
            make_server(text, lookup)


def test_times_numbers_shares_limits_and_addresses_are_read() -> None:
    times = {"0.5s": 0.5, ".5s": 0.5, "2s": 2.0, "500ms": 0.5, "20us": 2e-5, "1e-3s": 0.001}
    assert [parse_time(text, "--x") for text in times] == pytest.approx(list(times.values()))
    assert [parse_number(text, "--x") for text in ("0.5", "1%", ".5", "1e-3")] == pytest.approx([0.5, 0.01, 0.5, 0.001])
    assert parse_slos("e2e=500ms, ttft=0.1s") == {"e2e": 0.5, "ttft": 0.1} and parse_slos("") == {}
    assert parse_shares("unary=7,stream=3", "--mix") == pytest.approx({"unary": 0.7, "stream": 0.3})
    assert parse_shares("batch", "--mix") == {"batch": 1.0}
    assert parse_shares("unary=0,stream=1", "--mix") == {"stream": 1.0}
    assert full_url("host:9000") == "http://host:9000/metrics" and full_url("https://host/own") == "https://host/own"
