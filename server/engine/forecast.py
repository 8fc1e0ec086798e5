"""How long things take: averages of what was measured, and what they say of a request that has just come."""

from dragoman.server.engine.scheduler import Scheduler
from dragoman.server.engine.sequence import Sequence

NUM_AVERAGED = 32
MIN_STEPS = 16


class Average:
    """An exponential average over about `NUM_AVERAGED` values; 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Take one value in; the first few count as much as each other."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, NUM_AVERAGED)


class Forecast:
    """Durations of prefills, steps and requests, as they were lately."""

    def __init__(self) -> None:
        self._step_seconds = Average()
        self._prefill_seconds = Average()
        self._prefill_tokens = Average()
        self._running_seconds = Average()
        self._completion_seconds = Average()
        self._last_completion = 0.0

    def start(self, now: float) -> None:
        """Begin to measure after idleness, which says nothing about how fast requests complete."""
        self._last_completion = now

    def observe_step(self, seconds: float) -> None:
        """Note a decode step."""
        self._step_seconds.add(seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note an encoder pass."""
        self._prefill_seconds.add(seconds)
        self._prefill_tokens.add(num_tokens)

    def observe_completion(self, sequence: Sequence, now: float) -> None:
        """Note an answer."""
        self._completion_seconds.add(max(now - self._last_completion, 1e-6))
        self._last_completion = now
        if sequence.admitted is not None:
            self._running_seconds.add(now - sequence.admitted)

    def needed_seconds(self, sequence: Sequence, scheduler: Scheduler) -> float:
        """Return how long a new request will take at the least, if things go on as they have; 0 while too little is known.

        It has to wait until as many slots become free as it and those that are admitted before it need: what its caller waits for
        already, and the part of the others in the meantime. Of S slots one does every S-th part of the time for which requests hold
        theirs on average, and the next one is half way there. The same goes for the caller's own limit of slots, if it has one.
        Then it takes its own prefill and the fewest steps that it can.
        """
        if self._step_seconds.count < MIN_STEPS:
            return 0.0
        prefill_seconds = sequence.num_source_tokens * self._prefill_seconds.value / max(self._prefill_tokens.value, 1.0)
        own = prefill_seconds + sequence.min_steps * self._step_seconds.value
        num_needed = scheduler.num_used_slots + scheduler.num_slots_ahead(sequence.request) + sequence.num_slots
        seconds = self._seconds_until_free(num_needed, scheduler.limits.max_slots)
        if max_slots := sequence.request.share.max_slots:
            num_needed = scheduler.num_own_slots(sequence.request) + sequence.num_slots
            seconds = max(seconds, self._seconds_until_free(num_needed, max_slots))
        return own + seconds

    def queue_seconds(self, scheduler: Scheduler) -> float:
        """Return how long the queue is: when its last could go, had a request of one slot come last; 0 while nothing has completed.

        It says how much more the machine is asked for than it can do. A caller who has little in it waits for less, see
        `needed_seconds`; what waits for nothing but a slot that its caller's own limit does not let it have, is not in it.
        """
        num_needed = scheduler.num_used_slots + scheduler.num_waiting_slots - scheduler.num_held_back_slots + 1
        return self._seconds_until_free(num_needed, scheduler.limits.max_slots)

    def _seconds_until_free(self, num_needed: int, max_slots: int) -> float:
        """Return when there will have been so many slots; see `needed_seconds`."""
        num_missing = num_needed - max_slots
        return max(num_missing - 0.5, 0.0) * self._running_seconds.value / max_slots

    def seconds_until_a_place(self, num_waiting: int, part: float = 1.0) -> float:
        """Guess when the queue has a place again for a caller: the time in which a tenth of what it has there, at least one, ends.

        Args:
            num_waiting: The caller's requests in the queue.
            part: Of the completions, those that are the caller's.
        """
        if not self._completion_seconds.count:
            return 1.0
        return min(max(max(1.0, num_waiting / 10) * self._completion_seconds.value / part, 0.01), 30.0)
