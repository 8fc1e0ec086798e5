"""Every graph of a bundle, through the runner that serves it: run by `main` in the bed, and by tests.

What fails is noted with its text, and the rest goes on, so that one run shows all there is.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_stub.inside import described
from benchmarks.gpu_stub.sessions import Sessions
from benchmarks.gpu_stub.watch import Watch
from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_runner, load_scorer
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.settings import DeviceSettings

MAX_SLOTS, PREFILL_TOKENS = 12, 256
WIDE = 100
"""More candidates than a graph is captured for."""


class Exercise:
    """A bundle on the stub device.

    Attributes:
        found: What was seen, by part: `error`, a text or nothing, and the parts of `watch.Seen`.
    """

    def __init__(self, directory: Path, settings: DeviceSettings | None = None) -> None:
        """Open a bundle; nothing runs yet."""
        self.bundle = Bundle.open(directory)
        self.found: dict[str, Any] = {}
        self._settings = settings or DeviceSettings(name="cuda")
        self._watch, self._sessions = Watch(), Sessions()
        self._runner: Any = None

    def all(self) -> dict[str, Any]:
        """Do every part."""
        self.part("load", self._load)
        if self._runner is not None:
            for name in ("warm_up", "prefill", "steps", "replay", "wide_steps", "looks", "copies"):
                self.part(name, getattr(self, f"_{name}"))
            self.part("score", self._score)
        return self.found | {"sessions": [described(opened) for opened in self._sessions.finish()]}

    def part(self, name: str, do: Callable[[], object]) -> None:
        """Do one part and note what was seen."""
        self._watch.reset()
        error = ""
        try:
            do()
        except Exception as raised:  # the other parts go on
            error = f"{type(raised).__name__}: {raised}"
        self.found[name] = {"error": error, **self._watch.read().as_dict()}

    def _load(self) -> None:
        limits = Limits(MAX_SLOTS, 100, 10_000, PREFILL_TOKENS)
        self._runner = load_runner(self.bundle, limits, 1, self._settings, is_warmed_up=False)

    def _warm_up(self) -> None:
        self._runner.warm_up()

    def _prefill(self) -> None:
        """One source, many of different lengths in rows that are apart, and the longest there can be."""
        longest = self.bundle.manifest.max_source_tokens
        self._runner.prefill([_source(3)], [0])
        self._runner.prefill([_source(1 + 3 * i % longest) for i in range(5)], [9, 1, 7, 2, 4])
        self._runner.prefill([_source(longest)], [11])

    def _steps(self) -> None:
        """Each number of rows once, at growing positions."""
        for num_rows in range(1, MAX_SLOTS + 1):
            self._step(num_rows, num_rows % self._num_positions, 1)

    def _replay(self) -> None:
        """Steps of sizes that were warmed up: nothing but replays."""
        for position in range(4):
            for num_rows in (MAX_SLOTS, 1):
                for num_candidates in (1, 5):
                    self._step(num_rows, position, num_candidates)

    def _wide_steps(self) -> None:
        self._step(3, 2, min(WIDE, self.bundle.manifest.num_choices))

    def _looks(self) -> None:
        self._step(4, 1, 4)
        tokens, positions = _rows(3, 1)
        self._runner.look(tokens, positions, min(WIDE, self.bundle.manifest.num_choices), 1)

    def _copies(self) -> None:
        self._runner.copy_row(3, 0, 2)
        self._runner.copy_positions(0, 1, 0, 2)

    def _score(self) -> None:
        scorer = load_scorer(self.bundle, 1, self._runner)
        if not scorer.is_loaded:
            scorer.open()
        for layer in (None, 0):
            scorer.score(_source(6), _source(4), layer)

    def _step(self, num_rows: int, position: int, num_candidates: int) -> None:
        candidates = self._runner.step(*_rows(num_rows, position), num_candidates)
        assert candidates.ids.shape == candidates.log_probs.shape == (num_rows, num_candidates)

    @property
    def _num_positions(self) -> int:
        return self.bundle.manifest.max_target_tokens


def _rows(num_rows: int, position: int) -> tuple[Any, Any]:
    return np.full(num_rows, 3, np.int64), np.full(num_rows, position, np.int64)


def _source(length: int) -> list[int]:
    return [5] * (length - 1) + [1]


def main() -> int:
    """Exercise the bundles of the command line; return 1 if anything failed."""
    found = {directory: Exercise(Path(directory)).all() for directory in sys.argv[1:]}
    print(json.dumps(found, indent=2))
    return int(any(part["error"] for parts in found.values() for name, part in parts.items() if name != "sessions"))


if __name__ == "__main__":
    sys.exit(main())
