"""The simulated deployment, and what is said of a surge."""

import itertools
import math
import random

import pytest

from benchmarks.simulation.balancing import Clients, Proxy
from benchmarks.simulation.cluster import Cluster, History, Rule
from benchmarks.simulation.controller import Behaviour, Direction, Policy
from benchmarks.simulation.costs import Costs, Job
from benchmarks.simulation.pod import Pod
from benchmarks.simulation.replica import SimulatedReplica, capacity
from benchmarks.simulation.surge import Surge, by_second, judge

FAST = Direction(0.0, (Policy(True, 100, 15), Policy(False, 4, 15)))
BEHAVIOUR = Behaviour(2, 10, FAST, Direction(300.0, (Policy(True, 25, 60),)))
COSTS = Costs(4, 64, [1, 16], [0.01, 0.1], 0.01, 0.0, 512, 1024, [Job(10, 10)])


def run(rule: Rule, surge: Surge, start_seconds: float = 30.0) -> History:
    cluster = Cluster(COSTS, BEHAVIOUR, rule, start_seconds, Proxy(), random.Random(1))
    return cluster.run(surge.rate, surge.seconds)


def test_every_request_ends_once() -> None:
    surge = Surge(10.0, 5.0, 60.0, 0.0, 120.0, 60.0)
    history = run(Rule("queue", 0.5, 16), surge)
    dues = [due for due, _ in history.requests]
    assert len(set(dues)) == len(dues)
    assert len(dues) == pytest.approx(10 * 120 + 50 * 120, rel=0.1)
    assert all(end > due for due, end in history.requests)


def test_pods_come_when_the_queue_grows_and_serve_after_their_start() -> None:
    surge = Surge(0.5 * capacity(COSTS), 8.0, 60.0, 0.0, 200.0, 0.0)
    pods = run(Rule("queue", 0.5, 16), surge).num_pods
    assert pods[59] == (2, 2)
    first_wanted = next(at for at, (wanted, _) in enumerate(pods) if wanted > 2)
    first_ready = next(at for at, (_, ready) in enumerate(pods) if ready > 2)
    assert 60 < first_wanted <= 100
    assert first_ready - first_wanted == pytest.approx(30, abs=1)


def test_the_cpu_grows_by_a_quarter_at_a_time_however_long_the_queue() -> None:
    surge = Surge(0.1 * capacity(COSTS), 80.0, 60.0, 0.0, 200.0, 0.0)
    wanted = [number for number, _ in run(Rule("cpu", cpu_percent=80), surge).num_pods]
    steps = [(before, after) for before, after in itertools.pairwise(wanted) if after != before]
    assert steps and all(after <= math.ceil(1.25 * before) for before, after in steps)


def test_a_rule_without_load_keeps_the_least() -> None:
    history = run(Rule("queue", 0.5, 16, 24), Surge(1.0, 1.0, 60.0, 0.0, 60.0, 0.0))
    assert set(history.num_pods) == {(2, 2)}


def pods(count: int) -> list[Pod]:
    return [Pod(SimulatedReplica(COSTS, lambda due, end: None), 0.0, 0) for _ in range(count)]


def test_a_proxy_takes_turns() -> None:
    ready, proxy = pods(3), Proxy()
    proxy.update(0.0, ready)
    chosen = [proxy.choose() for _ in range(6)]
    assert chosen[:3] == chosen[3:] and set(chosen) == set(ready)


def test_clients_find_new_pods_when_a_connection_ends() -> None:
    ready, clients = pods(3), Clients(1, 100.0, random.Random(1))
    clients.update(0.0, ready[:2])
    assert {clients.choose() for _ in range(20)} == set(ready[:2])
    clients.update(1.0, ready)
    assert {clients.choose() for _ in range(20)} == set(ready[:2])
    clients.update(111.0, ready)
    assert {clients.choose() for _ in range(20)} == set(ready)


def test_clients_leave_a_pod_that_goes_at_once() -> None:
    ready, clients = pods(3), Clients(1, 100.0, random.Random(1))
    clients.update(0.0, ready[:2])
    clients.update(1.0, ready[1:])
    assert {clients.choose() for _ in range(20)} == set(ready[1:])


def test_a_surge_rises_holds_and_falls() -> None:
    surge = Surge(10.0, 5.0, 100.0, 60.0, 40.0, 50.0)
    assert [surge.rate(at) for at in (0, 100, 130, 160, 199, 200, 249)] == [10.0, 10.0, 30.0, 50.0, 50.0, 10.0, 10.0]
    assert surge.seconds == 250


def test_a_surge_is_judged_by_the_requests_due_in_it() -> None:
    surge = Surge(1.0, 5.0, 10.0, 0.0, 10.0, 0.0)
    history = History([(5.0, 99.0), (11.0, 11.5), (12.0, 14.0), (13.0, math.inf), (14.0, 14.5)], [(2, 2)] * 15 + [(4, 3)] * 5)
    outcome = judge(surge, history, 1.0)
    assert outcome.share_good == 0.5 and outcome.share_refused == 0.25
    assert outcome.p95_seconds == math.inf
    assert (outcome.bad_seconds, outcome.pods_before, outcome.pods_most) == (2, 2.0, 3)
    assert outcome.pod_hours == pytest.approx((5 * 2 + 5 * 3) / 3600)
    assert by_second(history, 1.0, 10) == {0: (1, 0, 94.0), 10: (4, 2, math.inf)}
