"""Every Prometheus metric of the server, declared in one place.

Names follow vLLM's with the prefix `dragoman_`, so that its dashboards and alerts carry over. The label `model` holds names of
loaded models only; a failure that belongs to none of them is counted under the empty name, so callers cannot add series.

Nothing here costs time by the token. Per engine step there are a few histogram observations; gauges that describe the engine are
read from its last `Statistics` when Prometheus asks; `inter_token_latency_seconds` gets one observation a request, the mean time
between the tokens of its longest answer (vLLM observes every token).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, make_wsgi_app
from prometheus_client.metrics import MetricWrapperBase

from server.engine import messages

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

ANSWERS = ("eos", "length")
# What stands for a finish reason where a pair was scored.
SCORED = "scored"
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
LOAD_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server process, in the registry it is given."""

    def __init__(self, registry: CollectorRegistry, latency_buckets: Sequence[float], version: str = "unknown") -> None:
        """Declare them.

        Args:
            registry: Where they are collected.
            latency_buckets: Upper bounds of the latency histograms, seconds.
            version: Version of the server, for `dragoman_build_info`.
        """
        self._registry = registry
        self._models: dict[str, _ModelMetrics] = {}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"dragoman_{name}", text, ["model"], registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dragoman_{name}", text, ["model", *labels], registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float] = latency_buckets) -> Histogram:
            return Histogram(f"dragoman_{name}", text, ["model"], registry=registry, buckets=tuple(buckets))

        self.num_requests_running = gauge("num_requests_running", "Requests in slots.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Requests not yet admitted to a slot, pairs not yet scored.")
        self.num_tokens_waiting = gauge("num_tokens_waiting", "Source tokens of the waiting requests, all of the waiting pairs.")
        self.slots_in_use = gauge("slots_in_use", "Rows of the decode batch that hold a sequence.")
        self.slots = gauge("slots", "Rows of the decode batch.")
        self.model_ready = gauge("model_ready", "1 while the model takes requests, else 0.")

        self.request_success = counter("request_success_total", "Requests answered.", "finish_reason")
        self.requests_failed = counter("requests_failed_total", "Requests that ended with an error, by gRPC status.", "code")
        self.prompt_tokens = counter("prompt_tokens_total", "Source tokens of the requests that got a slot and ended.")
        self.generation_tokens = counter(
            "generation_tokens_total", "Tokens generated for requests that ended, failed ones included."
        )
        self.score_tokens = counter("score_tokens_total", "Source and target tokens of the pairs that were scored.")
        self.engine_restarts = counter("engine_restarts_total", "Times the engine was started again after it died or hung.")
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
        self.prefill_batch_size = histogram("prefill_batch_size", "Sources encoded in a step.", BATCH_BUCKETS)
        self.model_load = histogram("model_load_seconds", "Loading a bundle and warming it up.", LOAD_BUCKETS)

        self.model_info = Info("dragoman_model", "What is loaded.", ["model"], registry=registry)
        Info("dragoman_build", "What runs.", registry=registry).info({"version": version})

    def add_model(self, name: str, version: str, precision: str, device: str, num_slots: int) -> None:
        """Start a model's series at zero, not ready; for a model already there, say what it is now.

        Call it before anything else is said of the model.
        """
        self.model_info.labels(name).info({"version": version, "precision": precision, "device": device})
        self.slots.labels(name).set(num_slots)
        if name not in self._models:
            self._models[name] = _ModelMetrics(self, name)

    def remove_model(self, name: str) -> None:
        """End the series of a model that is no longer loaded; counts of its failures end too."""
        if self._models.pop(name, None) is None:
            return
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                metric.remove_by_labels({"model": name})

    def set_ready(self, model: str, is_ready: bool) -> None:
        """Say whether a model takes requests; one that does not has nothing waiting or running."""
        series = self._models[model]
        series.ready.set(is_ready)
        if not is_ready:
            series.statistics = messages.Statistics()

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

    def observe_failure(self, model: str, code: str) -> None:
        """Count a request that ended with an error.

        Args:
            model: Its model; a name that is not loaded is counted under the empty name.
            code: Name of the gRPC status.
        """
        self.requests_failed.labels(model if model in self._models else "", code).inc()

    def wsgi_app(self) -> "WSGIApplication":
        """Return the application that answers a scrape."""
        app: WSGIApplication = make_wsgi_app(self._registry)
        return app


class _ModelMetrics:
    """One model's series, looked up once: finding a labelled child costs more than counting."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.statistics = messages.Statistics()
        self.ready = metrics.model_ready.labels(name)
        self.restarts = metrics.engine_restarts.labels(name)
        self._success = {reason: metrics.request_success.labels(name, reason) for reason in (*ANSWERS, SCORED)}
        self._score_tokens = metrics.score_tokens.labels(name)
        self._score_latency = metrics.score_latency.labels(name)
        self._prompt_tokens = metrics.prompt_tokens.labels(name)
        self._generation_tokens = metrics.generation_tokens.labels(name)
        self._padded_tokens = metrics.encoder_padded_tokens.labels(name)
        self._time_to_first_token = metrics.time_to_first_token.labels(name)
        self._inter_token_latency = metrics.inter_token_latency.labels(name)
        self._e2e_latency = metrics.e2e_request_latency.labels(name)
        self._queue_time = metrics.request_queue_time.labels(name)
        self._prefill_time = metrics.request_prefill_time.labels(name)
        self._decode_time = metrics.request_decode_time.labels(name)
        self._request_prompt_tokens = metrics.request_prompt_tokens.labels(name)
        self._request_generation_tokens = metrics.request_generation_tokens.labels(name)
        self._step_duration = metrics.step_duration.labels(name)
        self._step_batch_size = metrics.step_batch_size.labels(name)
        self._prefill_batch_size = metrics.prefill_batch_size.labels(name)

        def show(gauge: Gauge, value: Callable[[messages.Statistics], int]) -> None:
            gauge.labels(name).set_function(lambda: value(self.statistics))

        show(metrics.num_requests_running, lambda statistics: statistics.num_running)
        show(metrics.num_requests_waiting, lambda statistics: statistics.num_waiting)
        show(metrics.num_tokens_waiting, lambda statistics: statistics.num_waiting_tokens)
        show(metrics.slots_in_use, lambda statistics: statistics.num_slots)

    def observe_statistics(self, statistics: messages.Statistics) -> None:
        """Keep them for the gauges; observe the step and the prefill if there was one."""
        self.statistics = statistics
        if statistics.step_rows:
            self._step_duration.observe(statistics.step_seconds)
            self._step_batch_size.observe(statistics.step_rows)
        if statistics.prefill_rows:
            self._prefill_batch_size.observe(statistics.prefill_rows)
            self._padded_tokens.inc(statistics.prefill_padded_tokens)

    def observe_finished(self, request: messages.Request, finished: messages.Finished) -> None:
        """Count tokens whatever the end; times and success of answers only, so that errors do not look like speed."""
        if finished.admitted is not None:
            self._prompt_tokens.inc(len(request.source_ids))
            self._generation_tokens.inc(finished.num_generated)
        if finished.reason not in ANSWERS or finished.admitted is None or finished.first_token is None:
            return
        decode_seconds = finished.ended - finished.first_token
        self._success[finished.reason].inc()
        self._queue_time.observe(finished.admitted - request.arrival)
        self._prefill_time.observe(finished.prefill_seconds)
        self._time_to_first_token.observe(finished.first_token - request.arrival)
        self._decode_time.observe(decode_seconds)
        self._e2e_latency.observe(finished.ended - request.arrival)
        self._request_prompt_tokens.observe(len(request.source_ids))
        self._request_generation_tokens.observe(finished.num_generated)
        longest = max(len(answer.log_probs) for answer in finished.answers)
        if longest > 1:
            self._inter_token_latency.observe(decode_seconds / (longest - 1))

    def observe_scored(self, pair: messages.ScoreRequest, scored: messages.Scored) -> None:
        """Count the pair, its tokens and its time."""
        self._success[SCORED].inc()
        self._score_tokens.inc(len(pair.source_ids) + len(pair.target_ids))
        self._score_latency.observe(scored.ended - pair.arrival)
