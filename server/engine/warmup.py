"""Making a freshly loaded model do its work once, so that the first request does not pay for it."""

import numpy as np

from dragoman.export.bundle import Manifest
from dragoman.server.engine.costs import PACKED, PADDED, Costs, measured
from dragoman.server.runtime.runner import Runner


def warm_up(runner: Runner, manifest: Manifest) -> Costs:
    """Run the encoder, or what reads prompts, on a short and a long source, and the decoder on 1, 2, 4 … `max_rows` rows.

    What it leaves in the caches is never read: a row's length starts at 0 with each request.

    Returns:
        What the encoder takes.
    """
    longest = min(64, manifest.max_source_tokens)
    if manifest.has_prompts:  # which share their room with what follows
        longest = min(longest, manifest.max_target_tokens - 1)
    for length in (1, longest):
        runner.prefill([[manifest.eos_id] * length], [0])
    num_rows = 1
    while True:
        zeros = np.zeros(num_rows, np.int64)
        runner.step(zeros + manifest.decoder_start_id, zeros, 1)
        if num_rows == runner.max_rows:
            break
        num_rows = min(2 * num_rows, runner.max_rows)
    if runner.holder is None:
        return usual_costs(manifest)

    def encode(lengths: list[int]) -> None:
        runner.prefill([[manifest.eos_id] * length for length in lengths], list(range(len(lengths))))

    return measured(encode, runner.max_rows, manifest.max_source_tokens)


def usual_costs(manifest: Manifest) -> Costs:
    """Return what to take the encoder to cost where it is not measured."""
    return PACKED if manifest.is_packed else PADDED
