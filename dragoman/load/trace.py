"""A trace file: when each call is due, and optionally what it is; read line by line, since it may be of hours."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dragoman.model.errors import InputError


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call."""

    at: float  # when it is due, seconds since the start
    text: str | None = None  # its source; None draws one as for every other call
    words: int | None = None  # words of a made-up source
    num_beams: int | None = None  # width of its beam search; None draws as for every other call
    max_new_tokens: int | None = None  # tokens of its answer at the most; None for the run's


class Extent(msgspec.Struct, frozen=True):
    """How much a trace holds."""

    num_calls: int  # calls
    seconds: float  # when the last is due


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
                entry = _parse(line)
                if entry.at < last:
                    raise ValueError("is due before the one above it")
                last = entry.at
                yield entry
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 after line {number}") from error
    except RecursionError as error:
        raise InputError(f"{path}, line {number}: brackets too deep") from error
    except ValueError as error:
        raise InputError(f"{path}, line {number}: {error}") from error


def measure_trace(path: Path) -> Extent:
    """Read a trace through, so that what is wrong with it is known before the first call.

    Raises:
        InputError: As `read_trace`; also if it has no calls.
    """
    num_calls, seconds = 0, 0.0
    for entry in read_trace(path):
        num_calls, seconds = num_calls + 1, entry.at
    if not num_calls:
        raise InputError(f"{path}: has no calls")
    return Extent(num_calls, seconds)


def _parse(line: str) -> Entry:
    entry = msgspec.convert(value, Entry) if isinstance(value := json.loads(line), dict) else Entry(msgspec.convert(value, float))
    if not (math.isfinite(entry.at) and entry.at >= 0):
        raise ValueError(f"at: {entry.at} is not a number of 0 or more")
    for name in ("words", "num_beams", "max_new_tokens"):
        count = getattr(entry, name)
        if count is not None and count < 1:
            raise ValueError(f"{name}: {count} is less than 1")
    if entry.text is not None and entry.words is not None:
        raise ValueError("text and words exclude each other")
    return entry
