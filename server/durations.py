"""Times as people write them in a file: `90s`, `10m`, `1.5h`."""

import math
import re

ALWAYS = "always"

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION = re.compile(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)({'|'.join(_SECONDS)})")


def parse_duration(text: object) -> float:
    """Return a time in seconds.

    Raises:
        ValueError: If it is none, or has no unit.
    """
    if not isinstance(text, str) or (found := DURATION.fullmatch(text)) is None:
        raise ValueError(f"{text!r:.80} is not a time such as 90s, 10m or 1.5h, in quotes")
    return float(found[1]) * _SECONDS[found[2]]


def parse_keeping(text: object) -> float:
    """Return how long something is kept, in seconds: a time, or infinite for `always`.

    Raises:
        ValueError: If it is neither.
    """
    return math.inf if text == ALWAYS else parse_duration(text)
