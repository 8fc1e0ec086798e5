"""What came of a soak, and which of its promises were kept."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.callers import Count
from benchmarks.soak.kills import EXCUSED, Victim
from benchmarks.soak.watch import Reading, Trend
from dragoman.load.result import Result

# The watched gauges that must be zero once nothing is asked any more, and the count that must never move.
IDLE = ("dragoman_num_requests_running", "dragoman_num_requests_waiting", "dragoman_slots_in_use")
MAX_EXCUSED_SHARE = 0.01
"""Of all requests, that may end as `EXCUSED` where processes are killed."""
RESTARTS, ANSWERED = "dragoman_engine_restarts_total", "dragoman_request_success_total"


@dataclass(slots=True)
class Soaked:
    """What came of it.

    Attributes:
        capacity: Requests a second of each load with callers that wait, everything else going on beside.
        loads: Reports of the load generator.
        counts: Of our own callers.
        num_different: Reference answers that were not the first one's bytes.
        num_compared: Reference answers.
        reference_failures: Reference sentences without an answer, by status.
        trends: By process and measure; empty where too little was read.
        readings: Of the server's processes, by name.
        watch_failures: Readings that failed.
        before: Metrics of the server before.
        after: The same, after everything had ended.
        killed: Processes that were killed.
        is_whole: Whether there were as many processes in the end as in the beginning.
    """

    capacity: dict[str, float]
    loads: dict[str, Result] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    num_different: int = 0
    num_compared: int = 0
    reference_failures: dict[str, int] = field(default_factory=dict)
    trends: dict[tuple[str, str], Trend] = field(default_factory=dict)
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    watch_failures: list[str] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    killed: list[Victim] = field(default_factory=list)
    is_whole: bool = True

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: how the requests of each kind ended."""
        rows = []
        for title, result in self.loads.items():
            for name, group in result.groups.items():
                counts = group.counts
                ended = {"OK": counts.num_ok, **counts.intended, **counts.failures}
                rows.append(_row(f"{name}, {title}", counts.num, ended, counts.failures))
        for name, count in self.counts.items():
            rows.append(_row(name, count.num_begun, count.ended, count.unexpected, count.num_lost))
        return rows

    def num_lost(self) -> int:
        """Return how many requests never ended, or did without a status."""
        of_loads = sum(
            group.counts.num - group.counts.num_ok - sum(group.counts.intended.values()) - sum(group.counts.failures.values())
            for result in self.loads.values()
            for group in result.groups.values()
        )
        return of_loads + sum(count.num_lost for count in self.counts.values())

    def unexpected(self) -> Counter[str]:
        """Return how many ended otherwise than they may, by status."""
        found = Counter(self.reference_failures)
        for result in self.loads.values():
            found.update(result.total.counts.failures)
        for count in self.counts.values():
            found.update(count.unexpected)
        return found

    def num_unexpected(self) -> int:
        """Return how many of those a process that was killed does not excuse."""
        excused = EXCUSED if self.killed else ""
        return sum(number for status, number in self.unexpected().items() if status != excused)

    def share_excused(self) -> float:
        """Return the share of all requests that ended as calls do which were under way in a process that is killed."""
        num_sent = sum(group.counts.num for result in self.loads.values() for group in result.groups.values())
        num_sent += sum(count.num_begun for count in self.counts.values()) + self.num_compared
        return self.unexpected()[EXCUSED] / num_sent if num_sent else 0.0

    def num_given_up(self) -> int:
        """Return how many unary calls failed although they were tried again."""
        groups = [group for result in self.loads.values() for name, group in result.groups.items() if name == "unary"]
        return sum(sum(group.counts.failures.values()) for group in groups)


def _row(kind: str, num: int, ended: dict[str, int] | Any, unexpected: dict[str, int], num_lost: int = 0) -> dict[str, Any]:
    listed = ", ".join(f"{count} {code}" for code, count in sorted(ended.items()) if count)
    wrong = ", ".join(f"{count} {code}" for code, count in sorted(unexpected.items()))
    return {"requests": kind, "sent": num, "ended": listed, "unexpected": wrong or "none", "lost": num_lost}


def verdicts(soaked: Soaked) -> list[tuple[bool, str]]:
    """Say of each promise whether it was kept."""
    left = {name: soaked.after.get(name) for name in IDLE}
    restarts = soaked.after.get(RESTARTS, -1.0)
    answered, least, most = answers(soaked)
    num_killed = sum(victim.role == "engine" for victim in soaked.killed)
    found = [
        (not soaked.num_lost(), f"requests that never ended: {soaked.num_lost()}"),
        (not soaked.num_unexpected(), f"requests that ended with an unexpected status: {soaked.num_unexpected()}"),
        (
            all(value == 0 for value in left.values()),
            "left over: " + ", ".join(f"{k.removeprefix('dragoman_')} {v}" for k, v in left.items()),
        ),
        (restarts == num_killed, f"engine restarts: {restarts:.0f}, engines killed: {num_killed}"),
        (
            not soaked.num_different and soaked.num_compared > 0,
            f"reference answers that differed: {soaked.num_different} of {soaked.num_compared}",
        ),
        (not soaked.watch_failures and bool(soaked.trends), f"failed readings of processes: {len(soaked.watch_failures)}"),
    ]
    if soaked.killed:  # the count of a process that was killed is lost with it
        found += verdicts_of_kills(soaked)
    else:
        found.append((least <= answered <= most, f"answers by the server's count: {answered}, by the callers' {least} to {most}"))
    for (process, measure), each in soaked.trends.items():
        text = f"{process}, {measure}: {each.before:.1f} to {each.after:.1f} (growth of at most {each.allowed:.1f})"
        found.append((each.is_flat, text))
    return found


def verdicts_of_kills(soaked: Soaked) -> list[tuple[bool, str]]:
    """Say whether only what was under way in a process that was killed ended with it, and the process came back."""
    roles = " and ".join(victim.role for victim in soaked.killed)
    told = f"{EXCUSED} where nobody tried again, or an answer had begun"
    return [
        (soaked.is_whole, f"killed: {roles}; as many processes in the end as in the beginning"),
        (not soaked.num_given_up(), f"calls that failed although they were tried again: {soaked.num_given_up()}"),
        (
            soaked.share_excused() <= MAX_EXCUSED_SHARE,
            f"{told}: {soaked.unexpected()[EXCUSED]}, {soaked.share_excused():.2%} of all (at most {MAX_EXCUSED_SHARE:.0%})",
        ),
    ]


def answers(soaked: Soaked) -> tuple[int, int, int]:
    """Return answers that the server counted, and the fewest and the most it may have, by the callers' counts.

    A call that was cancelled, late or cut off may have been answered all the same.
    """
    counted = round(soaked.after.get(ANSWERED, 0.0) - soaked.before.get(ANSWERED, 0.0))
    groups = [group.counts for result in soaked.loads.values() for group in result.groups.values()]
    least = sum(group.num_ok for group in groups) + sum(count.ended["OK"] for count in soaked.counts.values())
    least += soaked.num_compared
    open_ended = sum(sum(group.failures.values()) + sum(group.intended.values()) for group in groups)
    open_ended += sum(count.num_begun - count.ended["OK"] for count in soaked.counts.values())
    return counted, least, least + open_ended
