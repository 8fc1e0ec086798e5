"""Every metric of models and of the server, declared in one place; what engines' processes and GPUs say is in `metrics.py`.

Names follow vLLM's with the prefix `dragoman_`, so that its dashboards and alerts carry over. What is called `dragoman_engine_…` is
of one engine and has its number in the label `replica`, `0` where a model has one; all else is the model's, over all its replicas.
The label `model` holds names of loaded models only; a failure that belongs to none of them is counted under the empty name, so
callers cannot add series.

Nothing here costs time by the token. Per engine step there are a few histogram observations; gauges that describe the engine are
read from its last `Statistics` when Prometheus asks; `inter_token_latency_seconds` gets one observation a request, the mean time
between the tokens of its longest answer (vLLM observes every token).

docs/metrics.md repeats what is declared here; `make chart` brings it up to date.
"""

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.metrics import MetricWrapperBase

from dragoman.server.telemetry.histogram import Histogram

# Objectives are edges of buckets, so the edges are those that objectives are usually set at.
# fmt: off
LATENCY_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
)
# fmt: on
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
LOAD_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)

M = TypeVar("M", Gauge, Counter)


class Declarations:
    """The metrics, in the registry they are given.

    Attributes:
        labels: Names of each metric's labels, by its full name.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Declare them in a registry."""
        self.labels: dict[str, tuple[str, ...]] = {}

        self._of_engines: list[Gauge | Counter] = []

        def keep(metric: M, labels: tuple[str, ...]) -> M:
            if labels == ("replica",):
                self._of_engines.append(metric)
            return metric

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return keep(Gauge(self._declare(name, *labels), text, ["model", *labels], registry=registry), labels)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return keep(Counter(self._declare(name, *labels), text, ["model", *labels], registry=registry), labels)

        def histogram(name: str, text: str, buckets: Iterable[float] = LATENCY_BUCKETS) -> Histogram:
            return Histogram(self._declare(name), text, tuple(buckets), registry)

        self.num_requests_running = gauge("num_requests_running", "Requests in slots.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Requests not yet admitted to a slot, pairs not yet scored.")
        self.num_tokens_waiting = gauge("num_tokens_waiting", "Source tokens of the waiting requests, all of the waiting pairs.")
        self.estimated_queue = gauge("estimated_queue_seconds", "How long a request that comes now is likely to wait for a slot.")
        self.slots_in_use = gauge("slots_in_use", "Rows of the decode batch that hold a sequence.")
        self.slots = gauge("slots", "Rows of the decode batch.")
        self.kv_cache_usage = gauge(
            "kv_cache_usage_ratio", "Share of the slots that hold a sequence, each with room for the longest."
        )
        self.cache_reserved = gauge("cache_reserved_bytes", "Memory that the caches of keys and values have.")
        self.cache_used = gauge("cache_used_bytes", "What the sequences in slots take of it.")
        self.num_ahead = gauge("requests_encoded_ahead", "Waiting requests whose sources have been encoded beside others'.")
        self.ahead_bytes = gauge("encoded_ahead_bytes", "What is kept of them takes.")
        self.graphs_disabled = gauge(
            "cuda_graphs_disabled", "1 while steps on CUDA are not replayed because a capture has failed, else 0."
        )
        self.gpu_plan = gauge("gpu_plan_bytes", "How the GPU memory that was free at the start is divided.", "part")
        self.model_ready = gauge("model_ready", "1 while the model takes requests, else 0.")

        self.engine_up = gauge("engine_up", "1 while the engine takes requests, else 0.", "replica")
        self.engine_silence = gauge(
            "engine_silence_seconds", "Time since the engine was last heard; it speaks once a second.", "replica"
        )
        self.engine_slots_in_use = gauge("engine_slots_in_use", "Rows of its decode batch that hold a sequence.", "replica")
        self.engine_cache_reserved = gauge("engine_cache_reserved_bytes", "Memory that the engine's caches have.", "replica")
        self.engine_cache_used = gauge("engine_cache_used_bytes", "What the sequences in its slots take of it.", "replica")
        self.engine_steps = counter("engine_steps_total", "Decode steps the engine has done.", "replica")
        self.engine_rows = counter("engine_rows_total", "Rows decoded in them.", "replica")

        self.request_success = counter("request_success_total", "Requests answered.", "finish_reason")
        self.requests_failed = counter("requests_failed_total", "Requests that ended with an error, by gRPC status.", "code")
        self.requests_rejected = counter(
            "requests_rejected_total", "Those of them that were turned away before any work, by the cause.", "reason"
        )
        self.requests_admitted = counter("requests_admitted_total", "Requests that got their slots.")
        self.prompt_tokens = counter("prompt_tokens_total", "Source tokens of the requests that got a slot and ended.")
        self.generation_tokens = counter(
            "generation_tokens_total", "Tokens generated for requests that ended, failed ones included."
        )
        self.score_tokens = counter("score_tokens_total", "Source and target tokens of the pairs that were scored.")
        self.engine_restarts = counter(
            "engine_restarts_total", "Times the engine was started again after it died or hung.", "replica"
        )
        self.encoder_tokens = counter("encoder_tokens_total", "Source tokens the encoder read.")
        self.encoder_padded_tokens = counter("encoder_padded_tokens_total", "Positions the encoder computed, padding included.")

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Mean time between the tokens of a request's longest answer."
        )
        self.e2e_request_latency = histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self.request_queue_time = histogram("request_queue_time_seconds", "Arrival to admission to a slot.")
        self.request_prefill_time = histogram(
            "request_prefill_time_seconds", "Encoder pass of the request's batch; of a prompt, its own pieces."
        )
        self.request_decode_time = histogram("request_decode_time_seconds", "First token to last.")
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Source tokens a request.", TOKEN_BUCKETS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Generated tokens a request.", TOKEN_BUCKETS)
        self.score_latency = histogram("score_latency_seconds", "Arrival of a pair to its scores.")
        self.step_duration = histogram("step_duration_seconds", "Decode step, search included.")
        self.step_batch_size = histogram("step_batch_size", "Rows decoded in a step.", BATCH_BUCKETS)
        self.prefill_duration = histogram(
            "prefill_duration_seconds", "Encoding the sources of a step, or reading pieces of prompts."
        )
        self.prefill_batch_size = histogram("prefill_batch_size", "Sources encoded in a step.", BATCH_BUCKETS)
        self.model_load = histogram("model_load_seconds", "Loading a bundle and warming it up.", LOAD_BUCKETS)

        self.model_info = Info("dragoman_model", "What is loaded.", ["model"], registry=registry)
        self.labels["dragoman_model_info"] = ("model", "version", "precision", "device")

    def remove_model(self, name: str) -> None:
        """End the series of a model."""
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                metric.remove_by_labels({"model": name})
            elif isinstance(metric, Histogram):
                metric.remove(name)

    def remove_engine(self, model: str, replica: int) -> None:
        """End the series of one of a model's engines."""
        for metric in self._of_engines:
            metric.remove_by_labels({"model": model, "replica": str(replica)})

    def _declare(self, name: str, *labels: str) -> str:
        """Note a metric of models; return its full name."""
        full = f"dragoman_{name}"
        self.labels[full] = ("model", *labels)
        return full
