"""`python -m benchmarks.large.steps KIND FOLDER THREADS`: load a model, time its decode steps; the last line is JSON.

KIND is `bundle` or `ctranslate2`. A step's time is that of 24 steps after 8 others, divided by 24, the least of some repetitions;
sources have 20 tokens. CTranslate2 has no steps of its own: two translations of 8 and 32 tokens are subtracted, which leaves out
the encoder, too.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.large.child import memory_mib

ROWS, SOURCE_TOKENS, WARM_STEPS, NUM_STEPS = (1, 8, 64), 20, 8, 24
SECONDS = 20.0
"""After which no further repetition begins."""
FIRST_ID = 10


def sources(num_rows: int) -> list[list[int]]:
    """Return sources without end-of-sequence; the same ones each time."""
    random = np.random.default_rng(0)
    drawn: list[list[int]] = random.integers(FIRST_ID, 200, (num_rows, SOURCE_TOKENS - 1)).tolist()
    return drawn


def least(run: Callable[[], float], most: int = 7) -> float:
    """Return the least of some measurements."""
    started, found = time.monotonic(), [run()]
    while len(found) < most and time.monotonic() - started < SECONDS:
        found.append(run())
    return min(found)


def bundle(folder: Path, num_threads: int) -> dict[str, Any]:
    """Measure an engine's runner and scorer."""
    from dragoman.export.bundle import Bundle
    from dragoman.server.runtime.onnx import OnnxRunner
    from dragoman.server.runtime.scorer import OnnxScorer

    before, started = memory_mib(), time.monotonic()
    opened = Bundle.open(folder, is_checked=False)
    runner = OnnxRunner(opened, max(ROWS), num_threads)
    scorer = OnnxScorer(opened, num_threads)
    scorer.open()
    loaded = time.monotonic() - started
    eos = opened.manifest.eos_id

    def steps(num_rows: int) -> float:
        runner.prefill([[*source, eos] for source in sources(num_rows)], list(range(num_rows)))
        tokens, began = np.full(num_rows, opened.manifest.decoder_start_id, np.int64), 0.0
        for position in range(WARM_STEPS + NUM_STEPS):
            began = time.perf_counter() if position == WARM_STEPS else began
            tokens = runner.step(tokens, np.full(num_rows, position, np.int64), 1).ids[:, 0].copy()
        return (time.perf_counter() - began) / NUM_STEPS

    found = {num_rows: 1000 * least(lambda num_rows=num_rows: steps(num_rows)) for num_rows in ROWS}  # type: ignore[misc]
    source = [*sources(1)[0], eos]
    began = time.perf_counter()
    scorer.score(source, source)
    score_ms = 1000 * (time.perf_counter() - began)
    after = memory_mib()
    return {
        "load_seconds": loaded,
        "step_ms": found,
        "score_ms": score_ms,
        "memory_mib": {name: after[name] - before[name] for name in after},
        "num_choices": opened.manifest.num_choices,
    }


def ctranslate2(folder: Path, num_threads: int) -> dict[str, Any]:
    """Measure CTranslate2's translator."""
    import ctranslate2 as library

    before, started = memory_mib(), time.monotonic()
    translator: Any = library.Translator(str(folder), compute_type="int8", inter_threads=1, intra_threads=num_threads)
    loaded = time.monotonic() - started

    def seconds(num_rows: int, num_tokens: int) -> float:
        texts = [[str(i) for i in source] for source in sources(num_rows)]
        lengths = {"max_decoding_length": num_tokens, "min_decoding_length": num_tokens, "max_input_length": 0}
        began = time.perf_counter()
        translator.translate_batch(texts, beam_size=1, max_batch_size=max(ROWS), **lengths)
        return time.perf_counter() - began

    found = {}
    for num_rows in ROWS:
        seconds(num_rows, WARM_STEPS)
        short = least(lambda num_rows=num_rows: seconds(num_rows, WARM_STEPS))  # type: ignore[misc]
        long = least(lambda num_rows=num_rows: seconds(num_rows, WARM_STEPS + NUM_STEPS))  # type: ignore[misc]
        found[num_rows] = 1000 * (long - short) / NUM_STEPS
    after = memory_mib()
    return {
        "load_seconds": loaded,
        "step_ms": found,
        "memory_mib": {name: after[name] - before[name] for name in after},
    }


if __name__ == "__main__":
    kinds = {"bundle": bundle, "ctranslate2": ctranslate2}
    print(json.dumps(kinds[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
