"""Due times of calls: arrivals of an open loop, or a trace file; seconds since the start, rising."""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dragoman.model.errors import InputError

Shape = Literal["poisson", "constant", "gamma"]


def check_positive(flag: str, value: float) -> None:
    """Raise `InputError` naming the flag if a value is not a finite number over 0."""
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{flag}: {value:g} is not a number over 0")


class Arrivals(msgspec.Struct, frozen=True):
    """An open loop: calls that come whatever has been answered."""

    rate: float  # calls a second; with `ramp_to`, at the start
    # `poisson`: independent arrivals; `constant`: one every 1/rate seconds; `gamma`: gaps drawn from a gamma distribution.
    shape: Shape = "poisson"
    burstiness: float = 1.0  # shape of that distribution: 1 is Poisson, below 1 arrivals come in bursts, far above 1 they are even
    ramp_to: float | None = None  # rate at the end, in between it changes linearly; None for a rate that stays

    def check(self) -> None:
        """Raise `InputError` for values that mean nothing."""
        check_positive("--rate", self.rate)
        check_positive("--burstiness", self.burstiness)
        if self.ramp_to is not None:
            check_positive("--ramp-to", self.ramp_to)
        if self.burstiness != 1 and self.shape != "gamma":
            raise InputError("--burstiness goes with --arrivals gamma")


def due_times(arrivals: Arrivals, seconds: float, seed: int) -> Iterator[float]:
    """Yield when calls are due, before `seconds` have passed.

    A ramp is the same process on a clock that runs faster as the rate grows: of unit arrivals at u, one is due when the rate's
    integral is u.
    """
    slope = 0.0 if arrivals.ramp_to is None else (arrivals.ramp_to - arrivals.rate) / seconds
    for units in _unit_arrivals(arrivals, random.Random(f"arrivals {seed}")):
        under_root = arrivals.rate**2 + 2 * slope * units
        if under_root < 0:  # a falling ramp has no more
            return
        # Not (root - rate) / slope: that cancels where slope is small.
        due = 2 * units / (arrivals.rate + math.sqrt(under_root)) if slope else units / arrivals.rate
        if due >= seconds:
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


Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call."""

    at: Seconds  # when it is due, seconds since the start
    text: str | None = None  # its source; None draws one as for every other call
    words: Count | None = None  # words of a generated source
    num_beams: Count | None = None  # width of its beam search; None draws as for every other call
    max_new_tokens: Count | None = None  # tokens of its answer at the most; None for the run's

    def __post_init__(self) -> None:
        if self.text is not None and self.words is not None:
            raise ValueError("text and words exclude each other")


_LINE: msgspec.json.Decoder[Seconds | Entry] = msgspec.json.Decoder(Seconds | Entry)


def read_trace(path: Path) -> Iterator[Entry]:
    """Yield the calls of a file: a number or a JSON object in each line.

    Raises:
        InputError: If it cannot be read, or a line is not a call or is due before the one above it.
    """
    number, last = 0, 0.0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if not line.strip():
                    continue
                value = _LINE.decode(line)
                entry = value if isinstance(value, Entry) else Entry(value)
                if entry.at < last:
                    raise ValueError("is due before the one above it")
                last = entry.at
                yield entry
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 after line {number}") from error
    except ValueError as error:
        raise InputError(f"{path}, line {number}: {error}") from error


def measure_trace(path: Path) -> tuple[int, float]:
    """Return the number of calls of a trace and when the last is due; raises `InputError` as `read_trace`, or if it is empty."""
    num_calls, seconds = 0, 0.0
    for entry in read_trace(path):
        num_calls, seconds = num_calls + 1, entry.at
    if not num_calls:
        raise InputError(f"{path}: has no calls")
    return num_calls, seconds
