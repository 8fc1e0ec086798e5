"""An engine under observation: what every step took, and how large the process had become."""

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

from dragoman.server.engine.messages import Request
from dragoman.server.offline import OfflineTranslator

SEED = 0
FIRST_ID = 3
"""Ids below are special tokens."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of some requests, from submission to the end of their answers.

    Attributes:
        step_seconds: Of every step, by the target token that the first request decoded in it; of steps in which the encoder ran,
            or not every request had a row yet, as of the first step after them.
        first_token_seconds: From submission until the last request had its first token.
        resident_bytes: By how much the process had grown since the model was loaded, after each of those steps.
    """

    step_seconds: list[float]
    first_token_seconds: float
    resident_bytes: list[int]


class Probe:
    """A bundle of a model that never ends a sequence, in an engine of its own."""

    def __init__(self, bundle: Path, max_rows: int, num_threads: int) -> None:
        self._translator = OfflineTranslator(bundle, max_rows, num_threads)
        self._resident_before = _resident_bytes()

    def trace(self, num_rows: int, source_tokens: int, target_tokens: int) -> Trace:
        """Decode random sources of one length, all of them submitted at once, to answers of one length.

        Raises:
            RuntimeError: If an answer ended before that, or was done before the last source was encoded.
        """
        engine, manifest = self._translator.engine, self._translator.bundle.manifest
        generator = random.Random(SEED)
        started = time.monotonic()
        for i in range(num_rows):
            ids = generator.choices(range(FIRST_ID, manifest.source_vocab_size), k=source_tokens - 1)
            engine.submit(b"bench", Request(i, [*ids, manifest.eos_id], target_tokens, started))
        steps: list[float] = []
        resident: list[int] = []
        first_token = 0.0
        while engine.has_work:
            before = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - before
            statistics = engine.statistics()
            for end in (end for report in engine.take_reports().values() for end in report.finished):
                if end.first_token is None or end.num_generated != target_tokens:
                    raise RuntimeError(f"an answer ended as {end.reason} after {end.num_generated} of {target_tokens} tokens")
                first_token = max(first_token, end.first_token)
            if [step.num_rows for step in statistics.steps] == [num_rows] and not statistics.prefills:
                steps.append(seconds)
                resident.append(_resident_bytes() - self._resident_before)
        if not steps:
            raise RuntimeError(f"{num_rows} requests with {source_tokens} source tokens were never decoded all together")
        missing = target_tokens - len(steps)
        return Trace(steps[:1] * missing + steps, first_token - started, resident[:1] * missing + resident)


def _resident_bytes() -> int:
    """Return how much memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
