"""Every Prometheus metric of the server, declared in one place.

Names follow vLLM's with the prefix `dragoman_`, so that its dashboards and alerts carry over. The label `model` holds names of
loaded models only; a failure that belongs to none of them is counted under the empty name, so callers cannot add series.

Nothing here costs time by the token. Per engine step there are a few histogram observations; gauges that describe the engine are
read from its last `Statistics` when Prometheus asks; `inter_token_latency_seconds` gets one observation a request, the mean time
between the tokens of its longest answer (vLLM observes every token). Series of a model are in `model_metrics.py`.

docs/metrics.md repeats what is declared here; `make chart` brings it up to date.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from dragoman.server.engine import messages
from dragoman.server.telemetry.gpu import open_gpu_source
from dragoman.server.telemetry.model_metrics import ModelMetrics
from dragoman.server.telemetry.processes import read_process

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
LOAD_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server process, in the registry it is given.

    Attributes:
        labels: Names of each metric's labels, by its full name.
    """

    def __init__(self, registry: CollectorRegistry, latency_buckets: Sequence[float], version: str = "unknown") -> None:
        """Declare them.

        Args:
            registry: Where they are collected.
            latency_buckets: Upper bounds of the latency histograms, seconds.
            version: Version of the server, for `dragoman_build_info`.
        """
        self._registry = registry
        self._models: dict[str, ModelMetrics] = {}
        self.labels: dict[str, tuple[str, ...]] = {}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(self._declare(name), text, ["model"], registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(self._declare(name, *labels), text, ["model", *labels], registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float] = latency_buckets) -> Histogram:
            return Histogram(self._declare(name), text, ["model"], registry=registry, buckets=tuple(buckets))

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
        self.engine_silence = gauge("engine_silence_seconds", "Time since the engine was last heard; it speaks once a second.")
        self.model_ready = gauge("model_ready", "1 while the model takes requests, else 0.")

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
        self.engine_restarts = counter("engine_restarts_total", "Times the engine was started again after it died or hung.")
        self.encoder_tokens = counter("encoder_tokens_total", "Source tokens the encoder read.")
        self.encoder_padded_tokens = counter("encoder_padded_tokens_total", "Positions the encoder computed, padding included.")

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Mean time between the tokens of a request's longest answer."
        )
        self.e2e_request_latency = histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self.request_queue_time = histogram("request_queue_time_seconds", "Arrival to admission to a slot.")
        self.request_prefill_time = histogram("request_prefill_time_seconds", "Encoder pass of the request's batch.")
        self.request_decode_time = histogram("request_decode_time_seconds", "First token to last.")
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Source tokens a request.", TOKEN_BUCKETS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Generated tokens a request.", TOKEN_BUCKETS)
        self.score_latency = histogram("score_latency_seconds", "Arrival of a pair to its scores.")
        self.step_duration = histogram("step_duration_seconds", "Decode step, search included.")
        self.step_batch_size = histogram("step_batch_size", "Rows decoded in a step.", BATCH_BUCKETS)
        self.prefill_duration = histogram("prefill_duration_seconds", "Encoding the sources of a step.")
        self.prefill_batch_size = histogram("prefill_batch_size", "Sources encoded in a step.", BATCH_BUCKETS)
        self.model_load = histogram("model_load_seconds", "Loading a bundle and warming it up.", LOAD_BUCKETS)

        self.model_info = Info("dragoman_model", "What is loaded.", ["model"], registry=registry)
        self.labels["dragoman_model_info"] = ("model", "version", "precision", "device")
        Info("dragoman_build", "What runs.", registry=registry).info({"version": version})
        self.labels["dragoman_build_info"] = ("version",)
        self._processes = _ProcessMetrics(registry)
        self._gpus = _GpuMetrics(registry)
        self.labels |= dict.fromkeys(self._processes.names, ("model",)) | dict.fromkeys(self._gpus.names, ("device",))

    def add_model(self, name: str, version: str, precision: str, device: str, num_slots: int) -> None:
        """Start a model's series at zero, not ready; for a model already there, say what it is now.

        Call it before anything else is said of the model.
        """
        self.model_info.labels(name).info({"version": version, "precision": precision, "device": device})
        self.slots.labels(name).set(num_slots)
        self._gpus.add(device)
        if name in self._models:
            self._models[name].num_slots = num_slots
        else:
            self._models[name] = ModelMetrics(self, name, num_slots)

    def remove_model(self, name: str) -> None:
        """End the series of a model that is no longer loaded; counts of its failures end too."""
        if self._models.pop(name, None) is None:
            return
        self._processes.ids.pop(name, None)
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                metric.remove_by_labels({"model": name})

    def set_ready(self, model: str, is_ready: bool) -> None:
        """Say whether a model takes requests; one that does not has nothing waiting or running."""
        self._models[model].set_ready(is_ready)

    def set_process(self, model: str, process_id: int | None) -> None:
        """Say which process a model's engine has; None for none of its own."""
        if process_id is None:
            self._processes.ids.pop(model, None)
        else:
            self._processes.ids[model] = process_id

    def observe_load(self, model: str, seconds: float) -> None:
        """Record how long a model took to load and warm up."""
        self.model_load.labels(model).observe(seconds)

    def observe_restart(self, model: str) -> None:
        """Count an engine that is started again."""
        self._models[model].restarts.inc()

    def observe_statistics(self, model: str, statistics: messages.Statistics) -> None:
        """Record what the engine said after a step."""
        self._models[model].observe_statistics(statistics)

    def observe_finished(self, model: str, request: messages.Request, finished: messages.Finished) -> None:
        """Record how a request ended in the engine: its tokens and, for an answer, its success and where its time went."""
        if model in self._models:
            self._models[model].observe_finished(request, finished)

    def observe_scored(self, model: str, pair: messages.ScoreRequest, scored: messages.Scored) -> None:
        """Record a pair that was scored."""
        if model in self._models:
            self._models[model].observe_scored(pair, scored)

    def observe_failure(self, model: str, code: str, refusal: str = "") -> None:
        """Count a request that ended with an error.

        Args:
            model: Its model; a name that is not loaded is counted under the empty name.
            code: Name of the gRPC status.
            refusal: Why it was turned away before any work; empty if it was not.
        """
        name = model if model in self._models else ""
        self.requests_failed.labels(name, code).inc()
        if refusal:
            self.requests_rejected.labels(name, refusal).inc()

    def wsgi_app(self) -> "WSGIApplication":
        """Return the application that answers a scrape."""
        app: WSGIApplication = make_wsgi_app(self._registry)
        return app

    def _declare(self, name: str, *labels: str) -> str:
        """Note a metric of models; return its full name."""
        full = f"dragoman_{name}"
        self.labels[full] = ("model", *labels)
        return full


class _ProcessMetrics(Collector):
    """The series of each engine that has a process of its own, read when Prometheus asks.

    Attributes:
        names: Of the metrics.
        ids: Of the processes, by model.
    """

    names = ("dragoman_engine_resident_memory_bytes", "dragoman_engine_cpu_seconds_total", "dragoman_engine_open_fds")

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ids: dict[str, int] = {}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield what the kernel says; a process that is gone has no series."""
        memory = GaugeMetricFamily(self.names[0], "Memory that the engine's process has.", labels=["model"])
        cpu = CounterMetricFamily(self.names[1], "Processor time that the engine's process has used.", labels=["model"])
        files = GaugeMetricFamily(self.names[2], "Files and sockets that the engine's process has open.", labels=["model"])
        for model, process_id in list(self.ids.items()):
            if (reading := read_process(process_id)) is not None:
                memory.add_metric([model], reading.resident_memory_bytes)
                cpu.add_metric([model], reading.cpu_seconds)
                files.add_metric([model], reading.num_open_fds)
        yield from (memory, cpu, files)


class _GpuMetrics:
    """The series of each GPU that a model runs on, whichever and however many.

    Attributes:
        names: Of the metrics.
    """

    names = ("dragoman_gpu_memory_used_bytes", "dragoman_gpu_memory_total_bytes", "dragoman_gpu_utilization_ratio")

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["device"], registry=registry)

        self._memory_used = gauge(self.names[0], "GPU memory in use, by all processes.")
        self._memory_total = gauge(self.names[1], "GPU memory there is.")
        self._utilization = gauge(self.names[2], "Share of the last second or less in which the GPU computed.")
        self._devices: set[str] = set()

    def add(self, device: str) -> None:
        """Start a device's series, unless they are there, or it is no GPU, or NVML does not know it."""
        if device in self._devices or (source := open_gpu_source(device, os.environ.get("CUDA_VISIBLE_DEVICES", ""))) is None:
            return
        self._devices.add(device)
        self._memory_used.labels(device).set_function(lambda: source.read().memory_used_bytes)
        self._memory_total.labels(device).set_function(lambda: source.read().memory_total_bytes)
        self._utilization.labels(device).set_function(lambda: source.read().utilization_ratio)
