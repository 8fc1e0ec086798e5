"""Whether the sender was slow: judged by how late its calls left, not by a hiccup of the machine."""

from dragoman.load.histogram import Histogram
from dragoman.load.show import duration, share

SLOW_SENDER = "the sender itself was slow"
# On a machine that also serves, one wake-up in a hundred comes several milliseconds late whatever the sender does.
LEAST_LATE_SECONDS = 0.01
# However seldom calls are, a delay of this much is seen in their latencies.
MOST_LATE_SECONDS = 0.1
# The part of the time between two calls that one may be late.
LATE_PART = 0.1
MOST_LATE_SHARE = 0.1
# Of fewer no share is worth a warning.
FEWEST_SAMPLES = 100
MOST_CPU_CORES = 0.9


def late_seconds(gap_seconds: float) -> float:
    """Return from when on a call is late, for calls of a process that are due so far apart on average."""
    return min(max(LEAST_LATE_SECONDS, LATE_PART * gap_seconds), MOST_LATE_SECONDS)


def slow_sender(lag: Histogram, loop_lag: Histogram, gap_seconds: float, cpu_cores: float) -> str | None:
    """Say why the figures are the sender's as much as the server's; None where they are not.

    Args:
        lag: How much later than due calls left; empty in a closed loop, where none is due.
        loop_lag: How late the event loop was, which is what counts there: it is that late to see answers, too.
        gap_seconds: Time between two calls of a process, on average.
        cpu_cores: Processor time over wall time of the busiest process.
    """
    limit = late_seconds(gap_seconds) if lag.num else LEAST_LATE_SECONDS
    samples = lag if lag.num else loop_lag
    within = samples.share_within(limit)
    late_share = 0.0 if within is None or samples.num < FEWEST_SAMPLES else 1.0 - within
    reasons = []
    if late_share > MOST_LATE_SHARE:
        who = "of its calls left" if lag.num else "of the time its event loop was"
        worst = duration(samples.percentile(99))
        reasons.append(f"{share(late_share)} {who} more than {duration(limit)} late (p99 {worst})")
    if cpu_cores > MOST_CPU_CORES and max(lag.num, loop_lag.num) >= FEWEST_SAMPLES:  # in less time starting is all it shows
        reasons.append(f"its busiest process used {cpu_cores:.2f} cores, of the one that it can use")
    if not reasons:
        return None
    return f"{SLOW_SENDER}: {' and '.join(reasons)}; latencies have that in them: use more --processes, or another machine"
