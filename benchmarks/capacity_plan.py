"""How many engines and front ends fill a number of cores: arithmetic on measured costs, without a measurement of its own."""

import math
from dataclasses import dataclass

MAX_LOAD = 0.8
"""Part of its time that a process of one thread may be at work; beyond that, requests wait longer than it takes."""

SHARED_CORES = 4
"""Up to so many, engines may have all cores, and the front end takes its time from them: a core of its own would be idle mostly."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one request costs each kind of process, in processor time.

    Attributes:
        engine_us: In an engine of one thread with a core to itself, full batches, the other cores idle.
        front_us: In a front end.
        desk_us: In the desk, where there is one: in the front end if it is alone, in a process of its own if not.
        sharing: What two such engines do at once, by twice what one does: at most about 1.
        stream_gbs: Gigabytes a second that an engine reads from memory, if no cache keeps any of its weights.
        first_mib: Memory of one engine, weights included.
        further_mib: Memory of each further one.
        front_mib: Memory of a front end.
    """

    engine_us: float
    front_us: float
    desk_us: float
    sharing: float = 1.0
    stream_gbs: float = 0.0
    first_mib: float = 0.0
    further_mib: float = 0.0
    front_mib: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to set for a number of cores, and what comes of it.

    Attributes:
        cores: There are.
        engines: `replicas`, of one thread each.
        front_ends: `front_ends`.
        rate: Requests a second.
        limit: What allows no more.
        desk_load: Part of a core that the desk takes.
        memory_gbs: Gigabytes a second that engines read, if no cache keeps any weights.
        mib: Memory of all processes.
    """

    cores: int
    engines: int
    front_ends: int
    rate: float
    limit: str
    desk_load: float
    memory_gbs: float
    mib: float


def plan(cores: int, costs: Costs) -> Plan:
    """Return the number of engines and front ends that answers the most requests.

    With fewer engines cores are idle, with more the front ends that feed them have none; few cores all of them share.
    """
    if cores < 1:
        raise ValueError(f"{cores} cores")
    plans = [_with(cores, engines, costs) for engines in range(1, cores + (cores <= SHARED_CORES))]
    best = max(found.rate for found in plans)
    return next(found for found in plans if found.rate >= best * 0.999)  # the fewest engines that reach it


def _with(cores: int, engines: int, costs: Costs) -> Plan:
    """Return what so many engines do."""
    sharing = costs.sharing if engines > 1 else 1.0
    engine_rate = engines * sharing * 1e6 / costs.engine_us
    has_desk = engines > 1
    left = max(cores - engines, 0)
    alone_us = costs.front_us + (costs.desk_us if has_desk else 0.0)
    alone_rate = MAX_LOAD * 1e6 / alone_us
    if not left:  # what a request costs anybody, it costs these cores
        together = cores * 1e6 / (costs.engine_us / sharing + alone_us)
        return _plan(cores, engines, 1, min(together, alone_rate), "engines" if together <= alone_rate else "front end", costs)
    if engine_rate <= alone_rate or left < 3:
        return _plan(
            cores, engines, 1, min(engine_rate, alone_rate), "engines" if engine_rate <= alone_rate else "front end", costs
        )
    # Several front ends: the desk has a process of its own, and at most a core.
    desk_rate = MAX_LOAD * 1e6 / costs.desk_us if costs.desk_us else math.inf
    wanted = min(engine_rate, desk_rate)
    fronts = min(math.ceil(wanted * costs.front_us / 1e6 / MAX_LOAD), left - 1)
    front_rate = fronts * MAX_LOAD * 1e6 / costs.front_us
    rates = {"engines": engine_rate, "front ends": front_rate, "desk": desk_rate}
    limit = min(rates, key=lambda name: rates[name])
    return _plan(cores, engines, fronts, rates[limit], limit, costs)


def _plan(cores: int, engines: int, fronts: int, rate: float, limit: str, costs: Costs) -> Plan:
    has_desk = engines > 1
    return Plan(
        cores,
        engines,
        fronts,
        rate,
        limit,
        rate * costs.desk_us / 1e6 if has_desk else 0.0,
        engines * costs.stream_gbs,
        costs.first_mib + (engines - 1) * costs.further_mib + fronts * costs.front_mib,
    )
