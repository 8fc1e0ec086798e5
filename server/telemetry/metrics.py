"""Prometheus metrics of models, engines and requests.

Names follow vLLM's with the prefix `dragoman_`, so that dashboards and alerts carry over. Metrics `engine_…` belong to one engine
and have the label `replica`; all others are sums over a model's replicas. The label `model` holds names of loaded models only;
other failures are counted under the empty name, so clients cannot add series.

Nothing is done per token: an engine step costs a few histogram observations, gauges are read at each scrape, and
`inter_token_latency_seconds` gets one observation per request (vLLM observes every token). `make chart` generates the table of
docs/metrics.md from these declarations.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Info, disable_created_metrics

from dragoman.server.engine import messages
from dragoman.server.system import ProcessReading, read_process
from dragoman.server.telemetry.families import Families
from dragoman.server.telemetry.series import Series, SummedRegistry
from dragoman.server.telemetry.server_metrics import CallerMetrics, ReloadMetrics, VersionMetrics

# Common latency objectives in seconds, which must be bucket bounds.
# fmt: off
LATENCY_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
)
# fmt: on
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
LOAD_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)

ANSWERS = ("eos", "length")
# Finish reason of a score request.
SCORED = "scored"
# Expected failures, initialised to zero for a loaded model; others begin with their first.
CODES = ("CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
REFUSALS = ("deadline_unmet", "invalid", "not_ready", "queue_full")

# Per model, from its last statistics.
STATISTICS: dict[str, tuple[str, Callable[[messages.Statistics], float]]] = {
    "num_requests_running": ("Requests that hold slots.", lambda of: of.num_running),
    "num_requests_waiting": ("Requests waiting for a slot, and score requests not computed yet.", lambda of: of.num_waiting),
    "num_tokens_waiting": (
        "Source tokens of waiting requests, and all tokens of waiting score requests.",
        lambda of: of.num_waiting_tokens,
    ),
    "estimated_queue_seconds": ("Expected wait for a slot of a request that arrives now.", lambda of: of.queue_seconds),
    "slots_in_use": ("Rows of the decode batch that hold a sequence.", lambda of: of.num_slots),
    "cache_reserved_bytes": ("Memory allocated for key and value caches.", lambda of: of.cache_bytes_reserved),
}
COUNTERS = {
    "requests_admitted_total": "Requests admitted to slots.",
    "prompt_tokens_total": "Source tokens of admitted requests that have ended.",
    "generation_tokens_total": "Tokens generated for requests that have ended, failed ones included.",
    "score_tokens_total": "Source and target tokens of score requests.",
    "result_cache_hits_total": "Requests answered from the result cache: answered, but without tokens read or generated.",
    "result_cache_saved_seconds_total": "Prefill and decode time of the answers from the result cache when they were computed.",
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", LATENCY_BUCKETS),
    "inter_token_latency_seconds": ("Mean time between the tokens of a request's longest answer.", LATENCY_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to last token.", LATENCY_BUCKETS),
    "request_queue_time_seconds": ("Arrival to admission to a slot.", LATENCY_BUCKETS),
    "request_prefill_time_seconds": ("Encoder pass of the request's batch; for a prompt, its own chunks.", LATENCY_BUCKETS),
    "request_decode_time_seconds": ("First token to last token.", LATENCY_BUCKETS),
    "request_prompt_tokens": ("Source tokens of a request.", TOKEN_BUCKETS),
    "request_generation_tokens": ("Generated tokens of a request.", TOKEN_BUCKETS),
    "score_latency_seconds": ("Arrival of a score request to its scores.", LATENCY_BUCKETS),
    "step_duration_seconds": ("Decode step, search included.", LATENCY_BUCKETS),
    "step_batch_size": ("Rows decoded in a step.", BATCH_BUCKETS),
    "prefill_duration_seconds": ("Prefill of a step: encoding sources, or reading chunks of prompts.", LATENCY_BUCKETS),
    "model_load_seconds": ("Loading a bundle and warming up.", LOAD_BUCKETS),
}


class ModelSeries:
    """One model's series, looked up once: looking up a labelled child costs more than counting."""

    def __init__(self, metrics: "Metrics", name: str, num_slots: int) -> None:
        self.num_slots = num_slots
        self.is_ready = False
        self.count = {counter: metric.labels(name) for counter, metric in metrics.counters.items()}
        self.observe = {histogram: metric.labels(name).observe for histogram, metric in metrics.histograms.items()}
        self._success = {reason: metrics.success.labels(name, reason) for reason in (*ANSWERS, SCORED)}
        self._statistics: dict[int, messages.Statistics] = {}
        # PromQL's `increase` misses the first count of a series that begins with it.
        for code in CODES:
            metrics.failed.labels(name, code)
        for reason in REFUSALS:
            metrics.rejected.labels(name, reason)

    @property
    def statistics(self) -> messages.Statistics:
        """The last statistics, summed over versions."""
        return add_up(list(self._statistics.values()))

    def observe_queue(self, version: int, statistics: messages.Statistics) -> None:
        """Store the last statistics of a version, identified by any number."""
        self._statistics[version] = statistics

    def forget(self, version: int) -> None:
        """Drop the statistics of a removed version."""
        self._statistics.pop(version, None)

    def set_ready(self, is_ready: bool) -> None:
        """Set whether the model accepts requests; if not, queue statistics are cleared."""
        self.is_ready = is_ready
        if not is_ready:
            self._statistics.clear()

    def observe_work(self, statistics: messages.Statistics) -> None:
        """Observe an engine's steps and prefills since its last statistics."""
        for step in statistics.steps:
            self.observe["step_duration_seconds"](step.seconds)
            self.observe["step_batch_size"](step.num_rows)
        for prefill in statistics.prefills:
            self.count["requests_admitted_total"].inc(prefill.num_admitted)
            if prefill.num_rows:
                self.observe["prefill_duration_seconds"](prefill.seconds)

    def observe_finished(self, request: messages.Request, num_source_tokens: int, finished: messages.Finished) -> None:
        """Count tokens of every request, but times and success of answers only, so that errors do not improve latency."""
        if finished.admitted is not None:
            self.count["prompt_tokens_total"].inc(num_source_tokens)
            self.count["generation_tokens_total"].inc(finished.num_generated)
        if finished.reason not in ANSWERS or finished.admitted is None or finished.first_token is None:
            return
        observe, decode_seconds = self.observe, finished.ended - finished.first_token
        self._success[finished.reason].inc()
        observe["request_queue_time_seconds"](finished.admitted - request.arrival)
        observe["request_prefill_time_seconds"](finished.prefill_seconds)
        observe["time_to_first_token_seconds"](finished.first_token - request.arrival)
        observe["request_decode_time_seconds"](decode_seconds)
        observe["e2e_request_latency_seconds"](finished.ended - request.arrival)
        observe["request_prompt_tokens"](num_source_tokens)
        observe["request_generation_tokens"](finished.num_generated)
        longest = max(len(answer.log_probs) for answer in finished.answers)
        if longest > 1:
            observe["inter_token_latency_seconds"](decode_seconds / (longest - 1))

    def observe_hit(self, request: messages.Request, finished: messages.Finished, saved_seconds: float) -> None:
        """Count a request that was answered from the result cache."""
        self._success[finished.reason].inc()
        self.observe["e2e_request_latency_seconds"](finished.ended - request.arrival)
        self.count["result_cache_hits_total"].inc()
        self.count["result_cache_saved_seconds_total"].inc(saved_seconds)

    def observe_scored(self, request: messages.ScoreRequest, num_source_tokens: int, scored: messages.Scored) -> None:
        """Count a score request with its tokens and time."""
        self._success[SCORED].inc()
        self.count["score_tokens_total"].inc(num_source_tokens + len(request.target_ids))
        self.observe["score_latency_seconds"](scored.ended - request.arrival)


def add_up(several: Sequence[messages.Statistics]) -> messages.Statistics:
    """Return the sum of parallel engines' statistics."""
    if len(several) == 1:
        return several[0]
    return messages.Statistics(
        num_waiting=sum(each.num_waiting for each in several),
        num_waiting_tokens=sum(each.num_waiting_tokens for each in several),
        num_running=sum(each.num_running for each in several),
        num_slots=sum(each.num_slots for each in several),
        queue_seconds=max((each.queue_seconds for each in several), default=0.0),
        cache_bytes_reserved=sum(each.cache_bytes_reserved for each in several),
    )


class EngineSeries:
    """Values of one engine, read at each scrape; `last_message` is monotonic, None while the engine accepts no requests."""

    def __init__(self) -> None:
        self.last_message: float | None = None
        self.num_rows = self.num_restarts = 0
        self.process_id: int | None = None


class Metrics:
    """Metrics of one server process; `labels` are the label names by full metric name."""

    def __init__(
        self,
        registry: CollectorRegistry,
        version: str = "unknown",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Declare the metrics; `version` is the server's, `clock` monotonic."""
        # Process-wide: omits an additional `_created` series of each counter and histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry, self._clock = registry, clock
        self._models: dict[str, ModelSeries] = {}
        self._engines: dict[tuple[str, int], EngineSeries] = {}
        self._front_ends: Callable[[], Iterable[tuple[int, bool, int]]] = tuple
        self._num_cached_bytes: Callable[[], int] = int
        self._num_batch_lines: Callable[[], int] = int
        self._families = families = Families(registry)
        self.labels = families.labels
        for name, (text, of) in STATISTICS.items():
            self._read_statistics(name, text, of)
        self._read_models("slots", "Rows of the decode batch, of all replicas.", lambda model: model.num_slots)
        self._read_models(
            "kv_cache_usage_ratio",
            "Share of the slots that hold a sequence; each slot has room for the longest one.",
            lambda model: model.statistics.num_slots / model.num_slots,
        )
        self._read_models("model_ready", "1 while the model accepts requests, else 0.", lambda model: model.is_ready)
        self._read_engines(
            "engine_up", "1 while the engine accepts requests, else 0.", lambda engine: engine.last_message is not None
        )
        self._read_engines(
            "engine_silence_seconds", "Time since the engine's last message; one is sent every second.", self._silence_seconds
        )
        self._read_engines("engine_rows_total", "Rows decoded by the engine.", lambda engine: engine.num_rows)
        self._read_engines(
            "engine_restarts_total", "Restarts of the engine after a crash or a hang.", lambda engine: engine.num_restarts
        )
        self._read_processes(
            "engine_resident_memory_bytes", "Resident memory of the engine's process.", lambda of: of.resident_memory_bytes
        )
        self._read_processes("engine_cpu_seconds_total", "CPU time of the engine's process.", lambda of: of.cpu_seconds)
        families.read(
            "result_cache_bytes", "Memory of the result cache, of all frontends.", (), lambda: {(): self._num_cached_bytes()}
        )
        families.read("batch_lines_left", "Lines of batches that are not done.", (), lambda: {(): self._num_batch_lines()})
        self._read_front_ends("front_end_up", "1 while a frontend worker answers callers, else 0; where there are several.", 1)
        self._read_front_ends("front_end_restarts_total", "Restarts of a frontend worker.", 2)
        self.counters = {name: families.counter(name, text, "model") for name, text in COUNTERS.items()}
        self.success = families.counter("request_success_total", "Requests answered.", "model", "finish_reason")
        self.failed = families.counter(
            "requests_failed_total", "Requests that ended with an error, by gRPC status.", "model", "code"
        )
        self.rejected = families.counter(
            "requests_rejected_total", "Failed requests that were rejected before any work, by reason.", "model", "reason"
        )
        self.histograms = {name: families.histogram(name, text, bounds) for name, (text, bounds) in HISTOGRAMS.items()}
        families.declare("model_info", "model", "version", "precision", "device")
        self._info = Info("dragoman_model", "The loaded model.", ["model"], registry=registry)
        families.declare("build_info", "version")
        Info("dragoman_build", "The server.", registry=registry).info({"version": version})
        self.callers = CallerMetrics(families)
        self.reloads = ReloadMetrics(families)
        self.versions = VersionMetrics(families)

    def add_model(self, name: str, version: str, precision: str, device: str, num_slots: int, num_replicas: int = 1) -> None:
        """Start a model's series at zero, not ready; update the description of an existing model.

        `num_slots` is the total of all engines; `device` is empty if not known yet.
        """
        self._info.labels(name).info({"version": version, "precision": precision, "device": device})
        if name in self._models:
            self._models[name].num_slots = num_slots
        else:
            self._models[name] = ModelSeries(self, name, num_slots)
            self.add_engines(name, range(num_replicas))

    def add_engines(self, model: str, replicas: Iterable[int]) -> None:
        """Start the series of a model's engines; existing ones are unchanged."""
        for replica in replicas:
            self._engines.setdefault((model, replica), EngineSeries())

    def remove_engines(self, model: str, replicas: Iterable[int]) -> None:
        """Remove the series of engines."""
        for replica in replicas:
            if self._engines.pop((model, replica), None) is not None and model in self._models:
                self._models[model].forget(replica)

    def keep_models(self, names: Iterable[str]) -> None:
        """Remove the series of all models but these."""
        for name in self._models.keys() - set(names):
            self.remove_model(name)

    def remove_model(self, name: str) -> None:
        """Remove the series of a model; later reports of its engines are ignored."""
        self._models.pop(name, None)
        for key in [key for key in self._engines if key[0] == name]:
            del self._engines[key]
        for metric in (*self.counters.values(), self.success, self.failed, self.rejected, self._info):
            metric.remove_by_labels({"model": name})
        for histogram in self.histograms.values():
            histogram.remove(name)

    def set_ready(self, model: str, is_ready: bool) -> None:
        """Set whether a model accepts requests; if not, queue statistics are cleared."""
        self._models[model].set_ready(is_ready)

    def set_engine(self, model: str, is_up: bool, process_id: int | None, replica: int = 0) -> None:
        """Set whether an engine accepts requests, and its process; None without its own."""
        if (engine := self._engines.get((model, replica))) is not None:
            engine.last_message, engine.process_id = self._clock() if is_up else None, process_id

    def observe_load(self, model: str, seconds: float) -> None:
        """Observe the time for loading and warm-up."""
        self.histograms["model_load_seconds"].labels(model).observe(seconds)

    def observe_restart(self, model: str, replica: int = 0) -> None:
        """Count an engine restart."""
        if (engine := self._engines.get((model, replica))) is not None:
            engine.num_restarts += 1

    def observe_engine(self, model: str, statistics: messages.Statistics, replica: int = 0) -> None:
        """Observe the steps of one of a model's engines since its last statistics."""
        if model in self._models and (engine := self._engines.get((model, replica))) is not None:
            engine.num_rows += sum(step.num_rows for step in statistics.steps)
            if engine.last_message is not None:
                engine.last_message = self._clock()
            self._models[model].observe_work(statistics)

    def observe_queue(self, model: str, statistics: messages.Statistics, replica: int = 0) -> None:
        """Observe the waiting and running requests of a version's engines; `replica` is the first of them."""
        if model in self._models and (model, replica) in self._engines:
            self._models[model].observe_queue(replica, statistics)

    def observe_finished(self, model: str, request: messages.Request, num_source_tokens: int, finished: messages.Finished) -> None:
        """Observe the end of a request; `num_source_tokens` counts all tokens of a prompt."""
        if model in self._models:
            self._models[model].observe_finished(request, num_source_tokens, finished)

    def observe_hit(self, model: str, request: messages.Request, finished: messages.Finished, saved_seconds: float) -> None:
        """Observe a request that was answered from the result cache."""
        if model in self._models:
            self._models[model].observe_hit(request, finished, saved_seconds)

    def observe_scored(self, model: str, request: messages.ScoreRequest, num_source_tokens: int, scored: messages.Scored) -> None:
        """Observe the end of a score request; arguments as `observe_finished`."""
        if model in self._models:
            self._models[model].observe_scored(request, num_source_tokens, scored)

    def observe_failure(self, model: str, code: str, refusal: str = "") -> None:
        """Count a failed request by gRPC status; models not loaded count as empty, `refusal` is for rejections before work."""
        name = model if model in self._models else ""
        self.failed.labels(name, code).inc()
        if refusal:
            self.rejected.labels(name, refusal).inc()

    def watch_result_cache(self, num_bytes: Callable[[], int]) -> None:
        """Set the source of the result cache's size."""
        self._num_cached_bytes = num_bytes

    def watch_batches(self, num_lines_left: Callable[[], int]) -> None:
        """Set the source of the number of lines of batches."""
        self._num_batch_lines = num_lines_left

    def watch_front_ends(self, read: Callable[[], Iterable[tuple[int, bool, int]]]) -> None:
        """Set the source of frontend workers' metrics: number, liveness and restarts of each."""
        self._front_ends = read

    def summed(self, ask: Callable[[], Iterable[Series]] = tuple) -> SummedRegistry:
        """Return the metrics with those of other processes added, which `ask` returns at each scrape."""
        return SummedRegistry(self._registry, ask)

    def _silence_seconds(self, engine: EngineSeries) -> float:
        last = engine.last_message
        return 0.0 if last is None else max(0.0, self._clock() - last)

    def _read_models(self, name: str, text: str, value: Callable[[ModelSeries], float]) -> None:
        self._families.read(
            name, text, ("model",), lambda: {(model,): value(series) for model, series in list(self._models.items())}
        )

    def _read_statistics(self, name: str, text: str, value: Callable[[messages.Statistics], float]) -> None:
        self._read_models(name, text, lambda model: value(model.statistics))

    def _read_engines(self, name: str, text: str, value: Callable[[EngineSeries], float | None]) -> None:
        def read() -> dict[tuple[str, ...], float]:
            found = {(model, str(replica)): value(engine) for (model, replica), engine in list(self._engines.items())}
            return {labels: each for labels, each in found.items() if each is not None}

        self._families.read(name, text, ("model", "replica"), read)

    def _read_processes(self, name: str, text: str, value: Callable[[ProcessReading], float]) -> None:
        def of(engine: EngineSeries) -> float | None:
            reading = None if engine.process_id is None else read_process(engine.process_id)
            return None if reading is None else value(reading)

        self._read_engines(name, text, of)

    def _read_front_ends(self, name: str, text: str, index: int) -> None:
        self._families.read(name, text, ("front_end",), lambda: {(str(each[0]),): each[index] for each in self._front_ends()})
