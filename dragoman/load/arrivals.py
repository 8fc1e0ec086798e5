"""When calls are due: seconds since the start, rising. Nothing here knows a clock or a server."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from dragoman.model.errors import InputError

Shape = Literal["poisson", "constant", "gamma"]


class Arrivals(msgspec.Struct, frozen=True):
    """An open loop: calls that come whatever has been answered."""

    rate: float  # calls a second; with `ramp_to`, at the start
    # `poisson`: independent arrivals; `constant`: one every 1/rate seconds; `gamma`: gaps drawn from a gamma distribution.
    shape: Shape = "poisson"
    burstiness: float = 1.0  # shape of that distribution: 1 is Poisson, below 1 arrivals come in bursts, far above 1 they are even
    ramp_to: float | None = None  # rate at the end, in between it changes linearly; None for a rate that stays

    def check(self) -> None:
        """Raise `InputError` for values that mean nothing."""
        for flag, value in (("--rate", self.rate), ("--burstiness", self.burstiness)):
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{flag}: {value:g} is not a number over 0")
        if self.ramp_to is not None and not (math.isfinite(self.ramp_to) and self.ramp_to > 0):
            raise InputError(f"--ramp-to: {self.ramp_to:g} is not a number over 0")
        if self.burstiness != 1 and self.shape != "gamma":
            raise InputError("--burstiness goes with --arrivals gamma")


def due_times(arrivals: Arrivals, seconds: float, seed: int) -> Iterator[float]:
    """Yield when calls are due, before `seconds` have passed.

    A ramp is the same process on a clock that runs faster as the rate grows: of unit arrivals at u, one is due when the rate's
    integral is u.
    """
    for units in _unit_arrivals(arrivals, random.Random(f"arrivals {seed}")):
        due = _when(arrivals, seconds, units)
        if due is None or due >= seconds:
            return
        yield due


def _unit_arrivals(arrivals: Arrivals, draws: random.Random) -> Iterator[float]:
    """Yield arrivals of rate 1; those of `constant` start at once, the others with a gap."""
    if arrivals.shape == "constant":
        yield from map(float, itertools.count())
    shape = arrivals.burstiness if arrivals.shape == "gamma" else 1.0
    units = 0.0
    while True:
        units += draws.gammavariate(shape, 1 / shape)
        yield units


def _when(arrivals: Arrivals, seconds: float, units: float) -> float | None:
    """Return when so many arrivals are expected; None for never, where a falling ramp has too few."""
    if arrivals.ramp_to is None or arrivals.ramp_to == arrivals.rate:
        return units / arrivals.rate
    slope = (arrivals.ramp_to - arrivals.rate) / seconds
    under_root = arrivals.rate**2 + 2 * slope * units
    if under_root < 0:
        return None
    return 2 * units / (arrivals.rate + math.sqrt(under_root))  # not (root - rate) / slope: that cancels where slope is small
