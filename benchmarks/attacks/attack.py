"""What every attack is: a name, a question, and a function that serves a checkout, does its worst and tells figures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.replica import Replica


class Failure(Exception):
    """An attack could not be carried out, which says nothing about the server."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        name: What was measured, with its unit.
        value: What it came to.
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Scene:
    """What an attack works with.

    Attributes:
        source: The checkout whose server, and in one attack whose client, is put to the test.
        bundle: A small model that never ends a sequence.
    """

    source: Path
    bundle: Path

    @contextmanager
    def serve(self, *flags: str, bundle: Path | None = None) -> Iterator[Replica]:
        """Serve the model, or another one, from the checkout; flags are `dragoman serve`'s."""
        with Replica(bundle or self.bundle, *flags, source=self.source) as replica:
            replica.start()
            yield replica


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: As the command line has it.
        title: What is done, for the table.
        run: Does it, gives figures as they are known, and leaves nothing behind.
    """

    name: str
    title: str
    run: Callable[[Scene], Iterator[Figure]]


def seconds(value: float | None, limit: float) -> str:
    """Return a time for the table; None is what did not happen within the limit."""
    return f"more than {limit:g}" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value that so many percent do not exceed; NaN of none."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, -(-int(len(values) * percent) // 100) - 1)]
