"""Durations of prefills, steps and requests as they were lately, and estimates for new requests."""

from dragoman.server.engine.messages import Request

NUM_AVERAGED = 32
MIN_STEPS = 16


class Average:
    """An exponential average over about `NUM_AVERAGED` values; 0 before the first."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        """Add the mean of some values; the first few count as much as each other."""
        self.count += count
        self.value += (value - self.value) * min(count / min(self.count, NUM_AVERAGED), 1.0)


class Forecast:
    """Averages of what was measured, and the estimates that follow from them."""

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
        """Begin to measure after idleness, during which nothing completes."""
        self._last_completion = now

    def observe_steps(self, seconds: float, num_steps: int = 1) -> None:
        """Note decode steps, which took so long together."""
        self._step_seconds.add(seconds / num_steps, num_steps)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note an encoder pass."""
        self._prefill_seconds.add(seconds)
        self._prefill_tokens.add(num_tokens)

    def observe_completion(self, now: float, admitted: float | None = None) -> None:
        """Note an answer, to a request that got its slots at a time."""
        self._completion_seconds.add(max(now - self._last_completion, 1e-6))
        self._last_completion = now
        if admitted is not None:
            self._running_seconds.add(now - admitted)

    def seconds_of(self, request: Request) -> float:
        """Return how long a request takes at the least once it has its slots."""
        prefill_seconds = len(request.source_ids) * self._prefill_seconds.value / max(self._prefill_tokens.value, 1.0)
        min_steps = len(request.search.forced_prefix) + request.search.min_new_tokens + 1
        return prefill_seconds + min_steps * self._step_seconds.value

    def seconds_until_free(self, num_needed: int, max_slots: int) -> float:
        """Return when so many slots will have been free, of so many that there are; the next one is half way there."""
        num_missing = num_needed - max_slots
        return max(num_missing - 0.5, 0.0) * self._running_seconds.value / max(max_slots, 1)

    def seconds_until_place(self, num_waiting: int, part: float = 1.0) -> float:
        """Guess when the queue has a place again for a caller: the time in which a tenth of its requests, at least one, completes.

        Args:
            num_waiting: The caller's waiting requests.
            part: The caller's part of the completions.
        """
        if not self._completion_seconds.count:
            return 1.0
        return min(max(max(1.0, num_waiting / 10) * self._completion_seconds.value / part, 0.01), 30.0)
