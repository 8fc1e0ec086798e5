"""Progress of an export: a line for each finished step, with its seconds and an estimate of the rest."""

import time
from collections.abc import Callable, Mapping

Say = Callable[[str], None]

# Steps, and which share of the whole they take: Transformer-base on two cores of a server.
_PROOF = {"compare log-probabilities": 22, "compare greedy answers": 30, "compare scores": 24}
STEPS: dict[str, dict[str, float]] = {
    "fp32": {
        "read the checkpoint": 5,
        "choose heads that align": 4,
        "write the graphs": 10,
        **_PROOF,
        "answer samples": 2,
        "describe": 4,
    },
    "int8": {
        "read the checkpoint": 3,
        "choose heads that align": 4,
        "write the graphs": 6,
        **_PROOF,
        "calibrate": 30,
        "quantise": 12,
        "compare batches in 8 bits": 25,
        "compare answers in 8 bits": 40,
        "answer samples": 2,
        "describe": 2,
    },
    "fp16": {"read the checkpoint": 5, "write the graphs": 12, **_PROOF, "answer samples": 2, "describe": 4},
    "bf16": {"read the checkpoint": 5, "write the graphs": 12, **_PROOF, "compare answers": 60, "answer samples": 2, "describe": 4},
}


def steps_of(precision: str, has_shortlist: bool) -> dict[str, float]:
    """Return the steps of an export, in order, each with its usual share of the whole."""
    *steps, samples, last = STEPS[precision].items()
    return {**dict(steps), **({"compare the shortlist": 8} if has_shortlist else {}), **dict([samples, last])}


class Progress:
    """Tells each step's end. Lines are plain text, the same with a terminal and without."""

    def __init__(self, steps: Mapping[str, float], say: Say | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first step.

        Args:
            steps: In order, each with its usual share of the whole.
            say: Takes a line; without it nothing is told.
            clock: Seconds.
        """
        self._steps = dict(steps)
        self._say = say
        self._clock = clock
        self._num_done = 0
        self._start = self._last = clock()

    def done(self, step: str) -> None:
        """Tell that a step is done; steps that were left out count as done, too."""
        names = list(self._steps)
        self._num_done = names.index(step) + 1
        now = self._clock()
        left = sum(self._steps[name] for name in names[self._num_done :])
        past = sum(self._steps[name] for name in names[: self._num_done])
        line = f"[{self._num_done}/{len(names)}] {step}: {now - self._last:.1f} s"
        if left:
            line += f"; about {(now - self._start) * left / past:.0f} s to go"
        self._last = now
        if self._say is not None:
            self._say(line)
