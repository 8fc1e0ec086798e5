"""Moving averages of prefill, step and request durations, and estimates for new requests."""

from dragoman.server.engine.messages import Request

NUM_AVERAGED = 32
MIN_STEPS = 16


class Average:
    """Exponential moving average over about `NUM_AVERAGED` values; 0 before the first."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        """Add the mean of `count` values; the first `NUM_AVERAGED` have equal weight."""
        self.count += count
        self.value += (value - self.value) * min(count / min(self.count, NUM_AVERAGED), 1.0)


class Forecast:
    """Measured averages, and estimates from them."""

    def __init__(self) -> None:
        self._step_seconds = Average()
        self._prefill_seconds = Average()
        self._prefill_tokens = Average()
        self._running_seconds = Average()
        self._completion_seconds = Average()
        self._last_completion = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether enough steps have been measured to estimate a request."""
        return self._step_seconds.count >= MIN_STEPS

    def start(self, now: float) -> None:
        """Restart the interval between completions after an idle period."""
        self._last_completion = now

    def observe_steps(self, seconds: float, num_steps: int = 1) -> None:
        """Record decode steps and their total duration."""
        self._step_seconds.add(seconds / num_steps, num_steps)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record a prefill."""
        self._prefill_seconds.add(seconds)
        self._prefill_tokens.add(num_tokens)

    def observe_completion(self, now: float, admitted: float | None = None) -> None:
        """Record a completed request; `admitted` is the time at which it got its slots."""
        self._completion_seconds.add(max(now - self._last_completion, 1e-6))
        self._last_completion = now
        if admitted is not None:
            self._running_seconds.add(now - admitted)

    def seconds_of(self, request: Request) -> float:
        """Return the least time that a request takes once it has its slots."""
        prefill_seconds = len(request.source_ids) * self._prefill_seconds.value / max(self._prefill_tokens.value, 1.0)
        min_steps = len(request.search.forced_prefix) + request.search.min_new_tokens + 1
        return prefill_seconds + min_steps * self._step_seconds.value

    def seconds_until_free(self, num_needed: int, max_slots: int) -> float:
        """Return when `num_needed` of `max_slots` slots will have become free; the next one is half an interval away on average."""
        num_missing = num_needed - max_slots
        return max(num_missing - 0.5, 0.0) * self._running_seconds.value / max(max_slots, 1)

    def seconds_until_place(self, num_waiting: int, part: float = 1.0) -> float:
        """Estimate when a full queue accepts a caller's request again: when a tenth of its requests, at least one, has completed.

        `part` is the caller's part of the completions.
        """
        if not self._completion_seconds.count:
            return 1.0
        return min(max(max(1.0, num_waiting / 10) * self._completion_seconds.value / part, 0.01), 30.0)
