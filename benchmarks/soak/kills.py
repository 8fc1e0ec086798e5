"""Processes that are killed in the middle of the soak: one of several engines, and one of several front ends."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.replica import Replica

RETRIES = 5
"""Further attempts of the load's calls where processes are killed, as the client makes them."""
EXCUSED = "UNAVAILABLE"
"""How a call may end that was under way in a process that is killed."""
BACK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that is to be killed.

    Attributes:
        role: `engine` or `front end`.
        pid: Of it.
    """

    role: str
    pid: int


def victims(processes: Mapping[str, Sequence[int]], root: int) -> list[Victim]:
    """Return the last of each role of which there are several, never the process that was started.

    Args:
        processes: Ids by role.
        root: The process that was started; beside several front ends it is none of them.
    """
    fronts = [pid for pid in processes["front end"] if pid != root]
    engines = list(processes["engine"])
    several = {"engine": engines, "front end": fronts}
    return [Victim(role, pids[-1]) for role, pids in several.items() if len(pids) > 1]


def watched(processes: Mapping[str, Sequence[int]], doomed: Sequence[Victim]) -> dict[str, int]:
    """Return the processes that live through the soak, by names: a number behind the role where there are several."""
    without = {victim.pid for victim in doomed}
    named = {}
    for role, pids in processes.items():
        for number, pid in enumerate(pids, 1):
            if pid not in without:
                named[role if len(pids) == 1 else f"{role} {number}"] = pid
    return named


async def kill(these: Sequence[Victim], seconds: float) -> None:
    """Kill them one after the other, evenly over that time."""
    for victim in these:
        await asyncio.sleep(seconds / (len(these) + 1))
        os.kill(victim.pid, signal.SIGKILL)


def wait_until_back(replica: Replica, numbers: Mapping[str, int]) -> bool:
    """Wait until there are as many processes of each role as there were; return whether that came to pass."""
    until = time.monotonic() + BACK_SECONDS
    while (found := {role: len(pids) for role, pids in replica.processes().items()}) != numbers and time.monotonic() < until:
        time.sleep(0.2)
    return found == numbers
