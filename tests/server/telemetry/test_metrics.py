import os
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dragoman.server.config import LATENCY_BUCKETS
from dragoman.server.engine.messages import Answer, Finished, Prefill, Request, Scored, ScoreRequest, Statistics, Step
from dragoman.server.telemetry.declarations import Declarations
from dragoman.server.telemetry.engine_metrics import EngineMetrics
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.model_metrics import CODES, REFUSALS
from dragoman.server.telemetry.version_metrics import OUTCOMES, VersionReading

REQUEST = Request(id=1, source_ids=[5, 6, 7, 2], max_new_tokens=10, arrival=100.0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    metrics = Metrics(registry, LATENCY_BUCKETS, "1.2.3")
    metrics.add_model("en-de", "v1", "fp32", "cpu", 16)
    return metrics


def value(registry: CollectorRegistry, name: str, model: str = "en-de", **labels: str) -> float | None:
    return registry.get_sample_value(f"dragoman_{name}", {"model": model, **labels})


def finished(reason: Any = "eos", **changes: Any) -> Finished:
    fields = {
        "answers": [Answer([8, 9], [-0.5, -0.5, -0.5], -0.5, "eos")],
        "num_generated": 3,
        "admitted": 100.5,
        "prefill_seconds": 0.25,
        "first_token": 101.0,
        "ended": 102.0,
    }
    return Finished(id=1, reason=reason, **fields | changes)


def test_names_are_the_ones_that_dashboards_query(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_failure("en-de", "INTERNAL")
    names = {family.name for family in registry.collect()}
    gauges = {"num_requests_running", "num_requests_waiting", "num_tokens_waiting", "slots_in_use", "slots", "model_ready"}
    gauges |= {"estimated_queue_seconds", "kv_cache_usage_ratio", "cache_reserved_bytes", "cache_used_bytes"}
    gauges |= {"engine_silence_seconds", "engine_resident_memory_bytes", "engine_open_fds", "engine_up", "engine_slots_in_use"}
    gauges |= {"engine_cache_reserved_bytes", "engine_cache_used_bytes", "requests_encoded_ahead", "encoded_ahead_bytes"}
    gauges |= {"cuda_graphs_disabled", "gpu_plan_bytes", "version_state"}
    gauges |= {"caller_requests_running", "reload_stale", "tls_certificate_days_left"}
    gauges |= {"front_end_up", "front_end_resident_memory_bytes", "front_end_open_fds"}
    counters = {
        "request_success",
        "requests_failed",
        "requests_rejected",
        "requests_admitted",
        "encoder_tokens",
        "engine_cpu_seconds",
        "front_end_cpu_seconds",
        "front_end_requests",
        "front_end_restarts",
        "engine_steps",
        "engine_rows",
        "prompt_tokens",
        "generation_tokens",
        "engine_restarts",
        "encoder_padded_tokens",
        "score_tokens",
        "caller_requests",
        "caller_refusals",
        "caller_tokens",
        "reloads",
        "version_requests",
        "version_swaps",
        "model_sleeps",
        "model_wakes",
    }
    histograms = {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "step_duration_seconds",
        "step_batch_size",
        "prefill_batch_size",
        "prefill_duration_seconds",
        "model_load_seconds",
        "score_latency_seconds",
    }
    gpu = {"gpu_memory_used_bytes", "gpu_memory_total_bytes", "gpu_utilization_ratio"}
    assert names == {f"dragoman_{name}" for name in gauges | gpu | counters | histograms | {"model", "build"}}


def test_answer_is_recorded_with_where_its_time_went(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_finished("en-de", REQUEST, 4, finished())
    assert value(registry, "request_success_total", finish_reason="eos") == 1
    assert value(registry, "request_success_total", finish_reason="length") == 0
    assert value(registry, "prompt_tokens_total") == 4
    assert value(registry, "generation_tokens_total") == 3
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
    assert {name: value(registry, f"{name}_sum") for name in sums} == sums
    assert {value(registry, f"{name}_count") for name in sums} == {1}


def test_single_token_has_no_time_between_tokens(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_finished("en-de", REQUEST, 4, finished(num_generated=1, answers=[Answer([], [-0.5], -0.5, "eos")]))
    assert value(registry, "inter_token_latency_seconds_count") == 0
    assert value(registry, "request_success_total", finish_reason="eos") == 1


def test_time_between_tokens_is_that_of_the_longest_answer(registry: CollectorRegistry, metrics: Metrics) -> None:
    answers = [Answer([8], [-0.5] * 2, -0.5, "eos"), Answer([8] * 4, [-0.5] * 5, -0.5, "eos")]
    metrics.observe_finished("en-de", REQUEST, 4, finished(answers=answers, num_generated=7))
    assert value(registry, "inter_token_latency_seconds_sum") == 0.25
    assert value(registry, "request_generation_tokens_sum") == 7


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "step_failed", "draining"])
def test_failed_request_counts_its_tokens_but_no_latency(registry: CollectorRegistry, metrics: Metrics, reason: str) -> None:
    metrics.observe_finished("en-de", REQUEST, 4, finished(reason))
    assert value(registry, "prompt_tokens_total") == 4
    assert value(registry, "generation_tokens_total") == 3
    assert value(registry, "e2e_request_latency_seconds_count") == 0
    assert value(registry, "request_success_total", finish_reason="eos") == 0


def test_request_that_was_never_admitted_has_no_tokens(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_finished("en-de", REQUEST, 4, finished("queue_full", admitted=None, first_token=None, num_generated=0))
    assert value(registry, "prompt_tokens_total") == 0


def test_scored_pair_counts_its_tokens_and_time_apart_from_answers(registry: CollectorRegistry, metrics: Metrics) -> None:
    pair = ScoreRequest(1, [5, 6, 1], [7, 1], 10.0)
    metrics.observe_scored("en-de", pair, 3, Scored(1, "eos", [-1.0, -1.0], b"", 10.5))
    metrics.observe_scored("never heard of", pair, 3, Scored(1, "eos", [-1.0, -1.0], b"", 10.5))
    assert value(registry, "request_success_total", finish_reason="scored") == 1
    assert value(registry, "score_tokens_total") == 5
    assert value(registry, "score_latency_seconds_sum") == 0.5
    assert value(registry, "e2e_request_latency_seconds_count") == value(registry, "prompt_tokens_total") == 0


def test_failures_are_counted_by_status(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_failure("en-de", "INTERNAL")
    metrics.observe_failure("en-de", "INTERNAL")
    metrics.observe_failure("en-de", "CANCELLED")
    assert value(registry, "requests_failed_total", code="INTERNAL") == 2
    assert value(registry, "requests_failed_total", code="CANCELLED") == 1


def test_callers_cannot_make_series_by_inventing_models(registry: CollectorRegistry, metrics: Metrics) -> None:
    for i in range(50):
        metrics.observe_failure(f"invented-{i}", "NOT_FOUND")
        metrics.observe_finished(f"invented-{i}", REQUEST, 4, finished())
    assert value(registry, "requests_failed_total", model="", code="NOT_FOUND") == 50
    assert b"invented" not in generate_latest(registry)


def test_refusals_are_counted_by_cause_beside_their_status(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_failure("en-de", "RESOURCE_EXHAUSTED", "queue_full")
    metrics.observe_failure("en-de", "DEADLINE_EXCEEDED", "deadline_unmet")
    metrics.observe_failure("en-de", "DEADLINE_EXCEEDED")
    assert value(registry, "requests_failed_total", code="DEADLINE_EXCEEDED") == 2
    assert value(registry, "requests_rejected_total", reason="deadline_unmet") == 1
    assert value(registry, "requests_rejected_total", reason="queue_full") == 1


def test_failures_of_a_model_are_there_before_the_first(registry: CollectorRegistry, metrics: Metrics) -> None:
    assert {value(registry, "requests_failed_total", code=code) for code in CODES} == {0}
    assert {value(registry, "requests_rejected_total", reason=reason) for reason in REFUSALS} == {0}


def test_an_engines_process_is_read_when_somebody_asks_and_only_while_there_is_one(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    names = ("engine_resident_memory_bytes", "engine_cpu_seconds_total", "engine_open_fds")
    assert {value(registry, name, replica="0") for name in names} == {None}
    metrics.set_engine("en-de", True, os.getpid())
    assert all((value(registry, name, replica="0") or 0) > 0 for name in names)
    metrics.set_engine("en-de", False, None)
    assert {value(registry, name, replica="0") for name in names} == {None}


def test_silence_is_counted_from_the_last_report_of_a_ready_engine(registry: CollectorRegistry) -> None:
    now = [50.0]
    series = EngineMetrics(Declarations(registry, LATENCY_BUCKETS), "en-fr", 1, clock=lambda: now[0])

    def silence() -> float | None:
        return value(registry, "engine_silence_seconds", model="en-fr", replica="1")

    now[0] = 60.0
    assert silence() == 0, "it has not been ready"
    series.set_up(True)
    now[0] = 62.0
    assert silence() == 2
    series.observe(Statistics())
    now[0] = 62.5
    assert silence() == 0.5
    series.set_up(False)
    series.observe(Statistics())
    now[0] = 99.0
    assert silence() == 0


def test_labels_are_what_is_told_of_each_metric(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.set_engine("en-de", True, os.getpid())
    for family in registry.collect():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metrics.labels[name]), name
        assert name in metrics.labels


def test_gauges_show_the_engines_last_word(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_statistics("en-de", Statistics(num_waiting=1, num_waiting_tokens=2, num_running=3, num_slots=4))
    last = Statistics(
        num_waiting=5,
        num_waiting_tokens=6,
        num_running=7,
        num_slots=8,
        queue_seconds=0.25,
        cache_bytes_reserved=4096,
        cache_bytes_used=1024,
        num_ahead=3,
        ahead_bytes=512,
    )
    metrics.observe_statistics("en-de", last)
    assert value(registry, "num_requests_waiting") == 5
    assert value(registry, "num_tokens_waiting") == 6
    assert value(registry, "num_requests_running") == 7
    assert value(registry, "slots_in_use") == 8
    assert value(registry, "slots") == 16
    assert value(registry, "kv_cache_usage_ratio") == 0.5
    assert value(registry, "estimated_queue_seconds") == 0.25
    assert value(registry, "cache_reserved_bytes") == 4096
    assert value(registry, "cache_used_bytes") == 1024
    assert value(registry, "requests_encoded_ahead") == 3
    assert value(registry, "encoded_ahead_bytes") == 512


def test_steps_and_prefills_are_observed_only_when_there_was_one(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_statistics("en-de", Statistics())
    metrics.observe_statistics("en-de", Statistics(steps=[Step(4, 0.002), Step(3, 0.001)]))
    metrics.observe_statistics("en-de", Statistics(prefills=[Prefill(2, 9, 12, 0.03, 1), Prefill(0, 0, 0, 0.0, 4)]))
    assert value(registry, "step_duration_seconds_count") == 2
    assert value(registry, "step_duration_seconds_sum") == pytest.approx(0.003)
    assert value(registry, "step_batch_size_sum") == 7
    assert value(registry, "prefill_batch_size_count") == 1
    assert value(registry, "prefill_batch_size_sum") == 2
    assert value(registry, "encoder_padded_tokens_total") == 12
    assert value(registry, "encoder_tokens_total") == 9
    assert value(registry, "prefill_duration_seconds_count") == 1
    assert value(registry, "requests_admitted_total") == 5, "with those that were encoded before"
    assert value(registry, "prefill_duration_seconds_count") == 1
    assert value(registry, "prefill_duration_seconds_sum") == 0.03


def test_each_engine_of_a_model_has_its_own_series_and_the_model_the_sums(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.add_model("en-fr", "v1", "int8", "cpu", 32, num_replicas=2)
    for replica in (0, 1):
        metrics.set_engine("en-fr", True, None, replica)
    metrics.observe_engine("en-fr", Statistics(num_slots=3, cache_bytes_reserved=50, steps=[Step(3, 0.1)] * 2), 0)
    metrics.observe_engine("en-fr", Statistics(num_slots=5, cache_bytes_used=7, steps=[Step(5, 0.1)]), 1)
    metrics.observe_queue("en-fr", Statistics(num_waiting=4, num_running=6, num_slots=8))
    metrics.observe_restart("en-fr", 1)
    metrics.set_engine("en-fr", False, None, 0)

    def engine(name: str) -> list[float | None]:
        return [value(registry, f"engine_{name}", model="en-fr", replica=replica) for replica in ("0", "1", "2")]

    assert engine("up") == [0, 1, None]
    assert engine("slots_in_use") == [0, 5, None], "one that is down has nothing"
    assert engine("cache_reserved_bytes") == [0, 0, None] and engine("cache_used_bytes") == [0, 7, None]
    assert engine("steps_total") == [2, 1, None]
    assert engine("rows_total") == [6, 5, None]
    assert engine("restarts_total") == [0, 1, None]
    assert value(registry, "step_batch_size_sum", model="en-fr") == 11
    assert value(registry, "slots_in_use", model="en-fr") == 8
    assert value(registry, "kv_cache_usage_ratio", model="en-fr") == 0.25
    assert value(registry, "num_requests_waiting", model="en-fr") == 4
    metrics.remove_model("en-fr")
    assert b"en-fr" not in generate_latest(registry)


def test_model_that_is_not_ready_has_nothing_running(registry: CollectorRegistry, metrics: Metrics) -> None:
    assert value(registry, "model_ready") == 0
    metrics.set_ready("en-de", True)
    metrics.observe_statistics("en-de", Statistics(num_running=3))
    assert (value(registry, "model_ready"), value(registry, "num_requests_running")) == (1, 3)
    metrics.set_ready("en-de", False)
    metrics.observe_restart("en-de")
    assert (value(registry, "model_ready"), value(registry, "num_requests_running")) == (0, 0)
    assert value(registry, "engine_restarts_total", replica="0") == 1


def test_what_runs_and_what_is_loaded_can_be_read(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_load("en-de", 1.5)
    assert registry.get_sample_value("dragoman_build_info", {"version": "1.2.3"}) == 1
    assert value(registry, "model_info", version="v1", precision="fp32", device="cpu") == 1
    assert value(registry, "model_load_seconds_sum") == 1.5
    metrics.observe_statistics("en-de", Statistics(num_slots=16))
    metrics.add_model("en-de", "v2", "fp16", "cuda", 32)
    assert value(registry, "model_info", version="v1", precision="fp32", device="cpu") is None
    assert value(registry, "model_info", version="v2", precision="fp16", device="cuda") == 1
    assert value(registry, "slots") == 32
    assert value(registry, "kv_cache_usage_ratio") == 0.5


def test_what_is_taken_of_a_device_and_lost_graphs_can_be_read(registry: CollectorRegistry, metrics: Metrics) -> None:
    assert value(registry, "cuda_graphs_disabled") == 0
    metrics.set_device_memory("en-de", {"caches": 5, "left_free": 7})
    assert [value(registry, "gpu_plan_bytes", part=part) for part in ("caches", "left_free")] == [5, 7]
    metrics.observe_engine("en-de", Statistics(are_graphs_disabled=True))
    metrics.observe_queue("en-de", Statistics())
    assert value(registry, "cuda_graphs_disabled") == 1, "a desk's word of its queue does not change what an engine has said"
    metrics.set_ready("en-de", False)
    assert value(registry, "cuda_graphs_disabled") == 0


def test_removed_model_leaves_no_series(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.add_model("en-fr", "v1", "fp32", "cpu", 16)
    metrics.observe_finished("en-de", REQUEST, 4, finished())
    metrics.observe_failure("en-de", "INTERNAL")
    metrics.set_engine("en-de", True, os.getpid())
    metrics.set_device_memory("en-de", {"caches": 5})
    metrics.remove_model("en-de")
    metrics.remove_model("en-de")
    text = generate_latest(registry)
    assert b"en-de" not in text
    assert b"en-fr" in text


def test_first_bucket_tells_sub_millisecond_from_millisecond(registry: CollectorRegistry, metrics: Metrics) -> None:
    for seconds in (0.0004, 0.0009, 0.0019):
        metrics.observe_statistics("en-de", Statistics(steps=[Step(1, seconds)]))
    counts = [value(registry, "step_duration_seconds_bucket", le=le) for le in ("0.0005", "0.001", "0.002")]
    assert counts == [1, 2, 3]


def test_no_series_tell_when_others_were_created(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe_failure("en-de", "INTERNAL")
    metrics.observe_finished("en-de", REQUEST, 4, finished())
    scraped = generate_latest(registry).decode()
    assert "dragoman_requests_failed_total" in scraped and "dragoman_time_to_first_token_seconds_count" in scraped
    assert "_created" not in scraped


def test_versions_that_stand_beside_each_other_add_up_to_the_model(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.add_engines("en-de", range(1, 3))
    metrics.set_ready("en-de", True)
    metrics.observe_queue("en-de", Statistics(num_waiting=1, num_running=2, num_slots=3, queue_seconds=0.5), 0)
    metrics.observe_queue("en-de", Statistics(num_waiting=10, num_running=20, num_slots=5, queue_seconds=0.25), 1)

    def shown(*names: str) -> list[float | None]:
        return [value(registry, name) for name in names]

    names = ("num_requests_waiting", "num_requests_running", "slots_in_use", "kv_cache_usage_ratio", "estimated_queue_seconds")
    assert shown(*names) == [11, 22, 8, 0.5, 0.5]
    metrics.remove_engines("en-de", range(1, 3))
    assert shown(*names) == [1, 2, 3, 3 / 16, 0.5]
    assert value(registry, "engine_up", replica="1") is None and value(registry, "engine_up", replica="0") == 0
    metrics.set_ready("en-de", False)
    assert shown(*names) == [0, 0, 0, 0, 0]


def test_engines_that_are_gone_or_of_a_model_that_is_say_nothing_any_more(registry: CollectorRegistry, metrics: Metrics) -> None:
    """They may still finish what they have: an error here would end their attachment, and with it all that runs there."""
    metrics.add_engines("en-de", range(1, 2))
    metrics.remove_engines("en-de", range(1, 2))
    metrics.observe_statistics("en-de", Statistics(num_running=4, steps=[Step(3, 0.1)]), 1)
    assert value(registry, "num_requests_running") == 0 and value(registry, "step_batch_size_sum") == 0
    metrics.remove_model("en-de")
    before = generate_latest(registry)
    metrics.observe_statistics("en-de", Statistics(num_running=4, steps=[Step(3, 0.1)]))
    metrics.observe_restart("en-de")
    metrics.set_engine("en-de", False, None)
    metrics.remove_engines("en-de", range(1))
    assert generate_latest(registry) == before and b"en-de" not in before


def test_versions_are_shown_with_their_states_and_what_became_of_their_requests(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.versions.add_model("en-de")
    metrics.versions.swapped("en-de", "refused")
    readings = [
        VersionReading("en-de", "1", "serving", "", 10, 1),
        VersionReading("en-de", "2", "refused", "proof"),
        VersionReading("en-de", "1", "retiring", "", 5, 0),
        VersionReading("en-de", "1", "retiring", "", 1, 0),
    ]
    metrics.versions.watch(lambda: readings)
    assert [value(registry, "version_swaps_total", outcome=outcome) for outcome in OUTCOMES] == [0, 1, 0]
    assert value(registry, "version_state", version="2", state="refused", cause="proof") == 1
    assert value(registry, "version_state", version="1", state="serving", cause="") == 1
    assert value(registry, "version_state", version="1", state="retiring", cause="") == 1
    assert value(registry, "version_requests_total", version="1", outcome="answered") == 16
    assert value(registry, "version_requests_total", version="1", outcome="failed") == 1
    assert generate_latest(registry).count(b'state="retiring"') == 1, "no series is there twice"


def test_a_model_that_was_never_served_leaves_no_series_either(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.add_engines("new", range(1))
    metrics.observe_load("new", 1.0)
    metrics.set_device_memory("new", {"caches": 5})
    metrics.versions.swapped("new", "refused")
    metrics.versions.woken("new", "refused")
    metrics.remove_model("new")
    metrics.versions.remove_model("new")
    assert b"new" not in generate_latest(registry)
