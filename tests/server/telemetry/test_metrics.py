"""Metrics: names and labels that dashboards query, values of every observation, and series that come and go with models."""

import os
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from dragoman.server.engine.messages import Answer, Finished, Prefill, Request, Scored, ScoreRequest, Statistics, Step
from dragoman.server.telemetry.families import Histogram
from dragoman.server.telemetry.metrics import CODES, REFUSALS, Metrics
from dragoman.server.telemetry.server_metrics import OUTCOMES, VersionReading

REQUEST = Request(id=1, source_ids=[5, 6, 7, 2], max_new_tokens=10, arrival=100.0)


class Shown:
    """The server's metrics and their values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.now = 60.0
        self.metrics = Metrics(self.registry, "1.2.3", clock=lambda: self.now)
        self.metrics.add_model("en-de", "v1", "fp32", "cpu", 16)

    def value(self, name: str, model: str = "en-de", **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dragoman_{name}", {"model": model, **labels})

    def values(self, *names: str, **labels: str) -> list[float | None]:
        return [self.value(name, **labels) for name in names]

    def has(self, **values: float) -> None:
        assert {name: self.value(name) for name in values} == values

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def metrics(shown: Shown) -> Metrics:
    return shown.metrics


def finished(reason: Any = "eos", **changes: Any) -> Finished:
    times = {"admitted": 100.5, "prefill_seconds": 0.25, "first_token": 101.0, "ended": 102.0}
    answers = [Answer([8, 9], [-0.5, -0.5, -0.5], -0.5, "eos")]
    return Finished(**{"id": 1, "reason": reason, "answers": answers, "num_generated": 3} | times | changes)


def observe(metrics: Metrics, statistics: Statistics, replica: int = 0) -> None:
    """Observe the statistics of the only engine of a version."""
    metrics.observe_engine("en-de", statistics, replica)
    metrics.observe_queue("en-de", statistics, replica)


def test_labels_are_those_that_are_documented(shown: Shown, metrics: Metrics) -> None:
    metrics.observe_failure("en-de", "INTERNAL")
    metrics.set_engine("en-de", True, os.getpid())
    families = list(shown.registry.collect())
    for family in families:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metrics.labels[name]), name
        assert name in metrics.labels
    assert {shown.value("requests_failed_total", code=code) for code in CODES} == {0, 1}
    assert {shown.value("requests_rejected_total", reason=reason) for reason in REFUSALS} == {0}
    assert "_created" not in shown.text


def test_an_answer_is_observed_with_its_times_and_tokens(shown: Shown, metrics: Metrics) -> None:
    metrics.observe_finished("en-de", REQUEST, 4, finished())
    assert [shown.value("request_success_total", finish_reason=reason) for reason in ("eos", "length")] == [1, 0]
    sums = {
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.25,
        "time_to_first_token_seconds": 1.0,
        "request_decode_time_seconds": 1.0,
        "e2e_request_latency_seconds": 2.0,
        "inter_token_latency_seconds": 0.5,
        "request_prompt_tokens": 4,
        "request_generation_tokens": 3,
    }
    shown.has(prompt_tokens_total=4, generation_tokens_total=3, **{f"{name}_sum": value for name, value in sums.items()})
    shown.has(**{f"{name}_count": 1 for name in sums})
    # A single token has no time between tokens; of several answers the longest has it.
    metrics.observe_finished("en-de", REQUEST, 4, finished(num_generated=1, answers=[Answer([], [-0.5], -0.5, "eos")]))
    shown.has(inter_token_latency_seconds_count=1)
    answers = [Answer([8], [-0.5] * 2, -0.5, "eos"), Answer([8] * 4, [-0.5] * 5, -0.5, "eos")]
    metrics.observe_finished("en-de", REQUEST, 4, finished(answers=answers, num_generated=7))
    shown.has(inter_token_latency_seconds_sum=0.75, request_generation_tokens_sum=11)


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "step_failed", "draining", "queue_full"])
def test_a_failure_counts_its_tokens_but_no_latency(shown: Shown, metrics: Metrics, reason: str) -> None:
    was_admitted = reason != "queue_full"
    changes = {} if was_admitted else {"admitted": None, "first_token": None, "num_generated": 0}
    metrics.observe_finished("en-de", REQUEST, 4, finished(reason, **changes))
    shown.has(prompt_tokens_total=4 * was_admitted, generation_tokens_total=3 * was_admitted, e2e_request_latency_seconds_count=0)
    assert shown.value("request_success_total", finish_reason="eos") == 0


def test_a_scored_pair_counts_apart_from_answers(shown: Shown, metrics: Metrics) -> None:
    for model in ("en-de", "never heard of"):
        metrics.observe_scored(model, ScoreRequest(1, [5, 6, 1], [7, 1], 10.0), 3, Scored(1, "eos", [-1.0, -1.0], b"", 10.5))
    assert shown.value("request_success_total", finish_reason="scored") == 1
    shown.has(score_tokens_total=5, score_latency_seconds_sum=0.5, e2e_request_latency_seconds_count=0, prompt_tokens_total=0)


def test_failures_are_counted_by_status_and_cause_without_names_of_callers(shown: Shown, metrics: Metrics) -> None:
    for code, refusal in (
        *[("INTERNAL", ""), ("INTERNAL", ""), ("RESOURCE_EXHAUSTED", "queue_full"), ("DEADLINE_EXCEEDED", "")],
        ("DEADLINE_EXCEEDED", "deadline_unmet"),
    ):
        metrics.observe_failure("en-de", code, refusal)
    codes = ("INTERNAL", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED")
    assert [shown.value("requests_failed_total", code=code) for code in codes] == [2, 1, 2, 0]
    causes = ("queue_full", "deadline_unmet", "invalid")
    assert [shown.value("requests_rejected_total", reason=cause) for cause in causes] == [1, 1, 0]
    for i in range(50):
        metrics.observe_failure(f"invented-{i}", "NOT_FOUND")
        metrics.observe_finished(f"invented-{i}", REQUEST, 4, finished())
    assert shown.value("requests_failed_total", model="", code="NOT_FOUND") == 50 and "invented" not in shown.text


def test_silence_is_counted_from_the_last_message_of_a_ready_engine(shown: Shown, metrics: Metrics) -> None:
    def silence(at: float) -> float | None:
        shown.now = at
        return shown.value("engine_silence_seconds", replica="0")

    assert silence(60) == 0, "it has not been ready"
    metrics.set_engine("en-de", True, None)
    assert silence(62) == 2
    metrics.observe_engine("en-de", Statistics())
    assert silence(62.5) == 0.5
    metrics.set_engine("en-de", False, None)
    metrics.observe_engine("en-de", Statistics())
    assert silence(99) == 0


def test_gauges_show_the_last_statistics_while_the_model_is_ready(shown: Shown, metrics: Metrics) -> None:
    last = Statistics(
        num_waiting=5,
        num_waiting_tokens=6,
        num_running=7,
        num_slots=8,
        queue_seconds=0.25,
        cache_bytes_reserved=4096,
    )
    shown.has(model_ready=0)
    metrics.set_ready("en-de", True)
    observe(metrics, Statistics(num_waiting=1, num_waiting_tokens=2, num_running=3, num_slots=4))
    observe(metrics, last)
    shown.has(num_requests_waiting=5, num_tokens_waiting=6, num_requests_running=7, slots_in_use=8, slots=16)
    shown.has(kv_cache_usage_ratio=0.5, estimated_queue_seconds=0.25, cache_reserved_bytes=4096)
    shown.has(model_ready=1)
    metrics.set_ready("en-de", False)
    metrics.observe_restart("en-de")
    shown.has(model_ready=0, num_requests_running=0)
    assert shown.value("engine_restarts_total", replica="0") == 1


def test_steps_and_prefills_are_observed_each(shown: Shown, metrics: Metrics) -> None:
    observe(metrics, Statistics())
    observe(metrics, Statistics(steps=[Step(4, 0.0004), Step(3, 0.0009), Step(1, 0.0019)]))
    observe(metrics, Statistics(prefills=[Prefill(2, 9, 0.03, 1), Prefill(0, 0, 0.0, 4)]))
    shown.has(step_duration_seconds_count=3, step_batch_size_sum=8, prefill_duration_seconds_count=1)
    shown.has(prefill_duration_seconds_sum=0.03, requests_admitted_total=5)  # with those that were encoded before
    assert shown.value("step_duration_seconds_sum") == pytest.approx(0.0032)
    assert [shown.value("step_duration_seconds_bucket", le=le) for le in ("0.0005", "0.001", "0.002")] == [1, 2, 3]


def test_each_engine_has_its_series_and_the_model_the_sums(shown: Shown, metrics: Metrics) -> None:
    metrics.add_model("en-fr", "v1", "int8", "cpu", 32, num_replicas=2)
    for replica in (0, 1):
        metrics.set_engine("en-fr", True, None, replica)
    metrics.observe_engine("en-fr", Statistics(steps=[Step(3, 0.1)] * 2), 0)
    metrics.observe_engine("en-fr", Statistics(steps=[Step(5, 0.1)]), 1)
    metrics.observe_queue("en-fr", Statistics(num_waiting=4, num_running=6, num_slots=8))
    metrics.observe_restart("en-fr", 1)
    metrics.set_engine("en-fr", False, None, 0)
    for name, expected in {
        "up": [0, 1, None],
        "rows_total": [6, 5, None],
        "restarts_total": [0, 1, None],
    }.items():
        assert [shown.value(f"engine_{name}", model="en-fr", replica=str(replica)) for replica in range(3)] == expected, name
    sums = ("step_batch_size_sum", "slots_in_use", "kv_cache_usage_ratio", "num_requests_waiting")
    assert shown.values(*sums, model="en-fr") == [11, 8, 0.25, 4]
    metrics.remove_model("en-fr")
    assert "en-fr" not in shown.text


def test_versions_beside_each_other_add_up_to_the_model(shown: Shown, metrics: Metrics) -> None:
    metrics.add_engines("en-de", range(1, 3))
    metrics.set_ready("en-de", True)
    metrics.observe_queue("en-de", Statistics(num_waiting=1, num_running=2, num_slots=3, queue_seconds=0.5), 0)
    metrics.observe_queue("en-de", Statistics(num_waiting=10, num_running=20, num_slots=5, queue_seconds=0.25), 1)
    names = ("num_requests_waiting", "num_requests_running", "slots_in_use", "kv_cache_usage_ratio", "estimated_queue_seconds")
    assert shown.values(*names) == [11, 22, 8, 0.5, 0.5]
    metrics.remove_engines("en-de", range(1, 3))
    assert shown.values(*names) == [1, 2, 3, 3 / 16, 0.5]
    assert [shown.value("engine_up", replica=replica) for replica in "01"] == [0, None]
    metrics.set_ready("en-de", False)
    assert shown.values(*names) == [0] * 5


def test_models_and_devices_are_described(shown: Shown, metrics: Metrics) -> None:
    metrics.observe_load("en-de", 1.5)
    observe(metrics, Statistics(num_slots=16))
    assert shown.registry.get_sample_value("dragoman_build_info", {"version": "1.2.3"}) == 1
    old = {"version": "v1", "precision": "fp32", "device": "cpu"}
    assert (shown.value("model_info", **old), shown.value("model_load_seconds_sum")) == (1, 1.5)
    metrics.add_model("en-de", "v2", "fp16", "cuda", 32)
    assert shown.value("model_info", **old) is None
    assert shown.value("model_info", version="v2", precision="fp16", device="cuda") == 1
    shown.has(slots=32, kv_cache_usage_ratio=0.5)


def test_models_and_engines_that_are_gone_leave_no_series(shown: Shown, metrics: Metrics) -> None:
    """They may still finish what they have: an error here would end their attachment, and with it all that runs there."""
    metrics.add_model("en-fr", "v1", "fp32", "cpu", 16)
    metrics.observe_finished("en-de", REQUEST, 4, finished())
    metrics.observe_failure("en-de", "INTERNAL")
    metrics.set_engine("en-de", True, os.getpid())
    metrics.add_engines("en-de", range(1, 2))
    metrics.remove_engines("en-de", range(1, 2))
    observe(metrics, Statistics(num_running=4, steps=[Step(3, 0.1)]), 1)
    shown.has(num_requests_running=0, step_batch_size_sum=0)
    for _ in range(2):
        metrics.remove_model("en-de")
    before = shown.text
    observe(metrics, Statistics(num_running=4, steps=[Step(3, 0.1)]))
    metrics.observe_restart("en-de")
    metrics.set_engine("en-de", False, None)
    metrics.remove_engines("en-de", range(1))
    assert shown.text == before and "en-de" not in before and "en-fr" in before
    # A model that was never served leaves none either.
    metrics.add_engines("new", range(1))
    metrics.observe_load("new", 1.0)
    metrics.versions.swapped("new", "refused")
    metrics.versions.woken("new", "refused")
    metrics.remove_model("new")
    metrics.versions.remove_model("new")
    assert "new" not in shown.text


def test_versions_have_states_and_outcomes_of_their_requests(shown: Shown, metrics: Metrics) -> None:
    metrics.versions.add_model("en-de")
    metrics.versions.swapped("en-de", "refused")
    readings = [
        VersionReading("en-de", "1", "serving", "", 10, 1),
        VersionReading("en-de", "2", "refused", "proof"),
        VersionReading("en-de", "1", "retiring", "", 5, 0),
        VersionReading("en-de", "1", "retiring", "", 1, 0),
    ]
    metrics.versions.watch(lambda: readings)
    assert [shown.value("version_swaps_total", outcome=outcome) for outcome in OUTCOMES] == [0, 1, 0]
    for version, state, cause in (("2", "refused", "proof"), ("1", "serving", ""), ("1", "retiring", "")):
        assert shown.value("version_state", version=version, state=state, cause=cause) == 1
    outcomes = [shown.value("version_requests_total", version="1", outcome=outcome) for outcome in ("answered", "failed")]
    assert outcomes == [16, 1] and shown.text.count('state="retiring"') == 1


def test_histograms_are_exposed_as_prometheus_own_are() -> None:
    """Names, bounds and counts are those of the library's histogram, for values on bounds, between and beyond them."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ours, theirs, bounds = CollectorRegistry(), CollectorRegistry(), (0.005, 0.25, 1, 2.5, 10)
    own = Histogram("x_seconds", "Help.", bounds, ours)
    other = prometheus_client.Histogram("x_seconds", "Help.", ["model"], buckets=bounds, registry=theirs)
    for model in ("a", 'with "quotes"'):
        own.labels(model), other.labels(model)
        for value in (0.0, 0.005, 0.0051, 0.25, 0.9, 1, 3, 10, 10.5, 1e6, -1.0):
            own.labels(model).observe(value)
            other.labels(model).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
    own.remove("a")
    own.remove("never there")
    assert ours.get_sample_value("x_seconds_count", {"model": "a"}) is None
    own.labels("a")
    assert ours.get_sample_value("x_seconds_count", {"model": "a"}) == 0
