"""One model's series: what its engines and the API say of it, counted.

What the metrics are called and mean is in `declarations.py`.
"""

from collections.abc import Callable, Sequence

from prometheus_client import Gauge

from dragoman.server.engine import messages
from dragoman.server.telemetry.declarations import Declarations

ANSWERS = ("eos", "length")
# What stands for a finish reason where a pair was scored.
SCORED = "scored"
# What failures to expect of a loaded model; the few others are counted from their first on.
CODES = ("CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
REFUSALS = ("deadline_unmet", "invalid", "not_ready", "queue_full")


class ModelMetrics:
    """One model's series, looked up once: finding a labelled child costs more than counting."""

    def __init__(self, metrics: Declarations, name: str, num_slots: int) -> None:
        self.num_slots = num_slots
        self._statistics: dict[int, messages.Statistics] = {}
        self._ready = metrics.model_ready.labels(name)
        self._graphs_disabled = metrics.graphs_disabled.labels(name)
        self._success = {reason: metrics.request_success.labels(name, reason) for reason in (*ANSWERS, SCORED)}
        self._admitted = metrics.requests_admitted.labels(name)
        self._score_tokens = metrics.score_tokens.labels(name)
        self._score_latency = metrics.score_latency.labels(name)
        self._prompt_tokens = metrics.prompt_tokens.labels(name)
        self._generation_tokens = metrics.generation_tokens.labels(name)
        self._encoder_tokens = metrics.encoder_tokens.labels(name)
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
        self._prefill_duration = metrics.prefill_duration.labels(name)
        self._prefill_batch_size = metrics.prefill_batch_size.labels(name)
        self._start_failures(metrics, name)
        self._show_statistics(metrics, name)

    @property
    def statistics(self) -> messages.Statistics:
        """The last word on the model, all versions that are there together; what engines have done is not part of it."""
        return add_up(list(self._statistics.values()))

    def observe_queue(self, version: int, statistics: messages.Statistics) -> None:
        """Keep what was said last of a version, which some number tells from the others."""
        self._statistics[version] = statistics

    def forget(self, version: int) -> None:
        """Keep nothing of a version that is gone."""
        self._statistics.pop(version, None)

    def set_ready(self, is_ready: bool) -> None:
        """Say whether the model takes requests; one that does not has nothing waiting or running."""
        self._ready.set(is_ready)
        if not is_ready:
            self._statistics.clear()
            self._graphs_disabled.set(0)

    def observe_work(self, statistics: messages.Statistics) -> None:
        """Observe the steps and prefills that one of the model's engines has done since its last statistics."""
        self._graphs_disabled.set(statistics.are_graphs_disabled)
        for step in statistics.steps:
            self._step_duration.observe(step.seconds)
            self._step_batch_size.observe(step.num_rows)
        for prefill in statistics.prefills:
            self._admitted.inc(prefill.num_admitted)
            if prefill.num_rows:
                self._prefill_duration.observe(prefill.seconds)
                self._prefill_batch_size.observe(prefill.num_rows)
            self._encoder_tokens.inc(prefill.num_tokens)
            self._padded_tokens.inc(prefill.num_padded_tokens)

    def observe_finished(self, request: messages.Request, num_source_tokens: int, finished: messages.Finished) -> None:
        """Count tokens whatever the end; times and success of answers only, so that errors do not look like speed."""
        if finished.admitted is not None:
            self._prompt_tokens.inc(num_source_tokens)
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
        self._request_prompt_tokens.observe(num_source_tokens)
        self._request_generation_tokens.observe(finished.num_generated)
        longest = max(len(answer.log_probs) for answer in finished.answers)
        if longest > 1:
            self._inter_token_latency.observe(decode_seconds / (longest - 1))

    def observe_scored(self, pair: messages.ScoreRequest, num_source_tokens: int, scored: messages.Scored) -> None:
        """Count the pair, its tokens and its time."""
        self._success[SCORED].inc()
        self._score_tokens.inc(num_source_tokens + len(pair.target_ids))
        self._score_latency.observe(scored.ended - pair.arrival)

    def _start_failures(self, metrics: Declarations, name: str) -> None:
        """Start counting at zero: a series that begins with its first failure hides that one from Prometheus."""
        for code in CODES:
            metrics.requests_failed.labels(name, code)
        for reason in REFUSALS:
            metrics.requests_rejected.labels(name, reason)

    def _show_statistics(self, metrics: Declarations, name: str) -> None:
        """Have the gauges read `statistics`, the last word on the model."""

        def show(gauge: Gauge, value: Callable[[messages.Statistics], float]) -> None:
            gauge.labels(name).set_function(lambda: value(self.statistics))

        show(metrics.num_requests_running, lambda statistics: statistics.num_running)
        show(metrics.num_requests_waiting, lambda statistics: statistics.num_waiting)
        show(metrics.num_tokens_waiting, lambda statistics: statistics.num_waiting_tokens)
        show(metrics.estimated_queue, lambda statistics: statistics.queue_seconds)
        show(metrics.slots_in_use, lambda statistics: statistics.num_slots)
        show(metrics.cache_reserved, lambda statistics: statistics.cache_bytes_reserved)
        show(metrics.cache_used, lambda statistics: statistics.cache_bytes_used)
        show(metrics.num_ahead, lambda statistics: statistics.num_ahead)
        show(metrics.ahead_bytes, lambda statistics: statistics.ahead_bytes)
        metrics.kv_cache_usage.labels(name).set_function(lambda: self.statistics.num_slots / self.num_slots)


def add_up(several: Sequence[messages.Statistics]) -> messages.Statistics:
    """Return the statistics of engines that stand beside each other as if they were one."""
    if len(several) == 1:
        return several[0]
    return messages.Statistics(
        num_waiting=sum(one.num_waiting for one in several),
        num_waiting_tokens=sum(one.num_waiting_tokens for one in several),
        num_running=sum(one.num_running for one in several),
        num_slots=sum(one.num_slots for one in several),
        queue_seconds=max((one.queue_seconds for one in several), default=0.0),
        cache_bytes_reserved=sum(one.cache_bytes_reserved for one in several),
        cache_bytes_used=sum(one.cache_bytes_used for one in several),
        num_ahead=sum(one.num_ahead for one in several),
        ahead_bytes=sum(one.ahead_bytes for one in several),
    )
