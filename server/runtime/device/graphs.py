"""Which steps are captured as graphs, which are still to be, and what follows when a capture fails.

A shape is captured before the model is ready or while nothing runs, never in the middle of traffic: until then its steps are plain,
each kernel begun by the host. One capture that fails ends all of it, for what made it fail is the same for all shapes. One that
only lacks memory leaves its shape plain, and ends all of it only if there was too little for all before the model was ready.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from dragoman.server.runtime.device.buckets import Buckets

When = Literal["idle", "start", "never"]
"""When the graphs of larger layouts are captured: while nothing runs, or before the model is ready; or no graph at all."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step is bound for: rows and K as they are computed, and the capacities of the caches."""

    num_rows: int
    num_candidates: int
    targets: int
    sources: int


class StepGraphs:
    """The graphs of one model's steps.

    Attributes:
        is_on: Whether steps are captured and replayed.
        is_disabled: Whether they would be, but a capture has failed.
        reason: What it failed for.
    """

    def __init__(self, buckets: Buckets, when: When, capture: Callable[[Shape], None], warn: Callable[[str], None]) -> None:
        """Begin with nothing captured.

        Args:
            buckets: The shapes there are.
            when: See `When`.
            capture: Runs a step of a shape, which captures it.
            warn: Told why, when graphs are given up.
        """
        self.is_on, self.is_disabled, self.reason = when != "never", False, ""
        self._buckets, self._when, self._capture, self._warn = buckets, when, capture, warn
        self._captured: set[Shape] = set()
        self._shortage: Exception | None = None
        self._pending = list(self.shapes())[::-1] if self.is_on else []

    def __contains__(self, shape: Shape) -> bool:
        """Tell whether a shape can be replayed."""
        return shape in self._captured

    def shapes(self) -> Iterator[Shape]:
        """Yield every shape: the smallest layouts first, and of a layout the largest batches, whose memory does for the others.

        The other way round ONNX Runtime's arena would keep pieces of every size: they are not joined to make larger ones.
        """
        buckets = self._buckets
        layouts = sorted(itertools.product(buckets.targets, buckets.sources), key=lambda layout: layout[0] + layout[1])
        for (targets, sources), rows, candidates in itertools.product(layouts, buckets.rows[::-1], buckets.candidates[::-1]):
            yield Shape(rows, candidates, targets, sources)

    def at_start(self) -> list[Shape]:
        """Return the shapes to run before the model is ready: those of the smallest layouts, or all."""
        smallest = self._buckets.targets[0], self._buckets.sources[0]
        return [shape for shape in self.shapes() if self._when == "start" or (shape.targets, shape.sources) == smallest]

    @property
    def has_pending(self) -> bool:
        """Whether there is a shape that has been neither captured nor tried."""
        while self._pending and self._pending[-1] in self._captured:
            self._pending.pop()
        return bool(self._pending)

    def capture_next(self) -> None:
        """Try to capture the next shape, if there is one; call it while no row holds anything."""
        if self.has_pending:
            self._capture(self._pending.pop())

    @property
    def num_captured(self) -> int:
        """Shapes that can be replayed."""
        return len(self._captured)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Replay nothing meanwhile."""
        captured, self._captured = self._captured, set()
        try:
            yield
        finally:
            self._captured = captured

    def note_captured(self, shape: Shape) -> None:
        """Note that a shape can be replayed from now on."""
        self._captured.add(shape)

    def note_shortage(self, error: Exception) -> None:
        """Note that there was no memory to capture a shape, whose steps stay plain."""
        self._shortage = error

    def end_start(self) -> None:
        """Give up if none of the shapes that were to be ready at the start could be captured."""
        if self.is_on and self._shortage is not None and not self._captured:
            self.give_up(self._shortage)

    def give_up(self, error: Exception) -> None:
        """Replay and capture nothing any more, and say so once."""
        if self.is_on:
            self._warn(str(error))
        self.is_on, self.is_disabled, self.reason = False, True, str(error)
        self._captured.clear()
        self._pending.clear()
