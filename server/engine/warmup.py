"""Making a freshly loaded model do its work once, so that the first request does not pay for it."""

import numpy as np

from dragoman.export.bundle import Manifest
from dragoman.server.runtime.runner import Runner


def warm_up(runner: Runner, manifest: Manifest) -> None:
    """Run the encoder on a short and a long source and the decoder on 1, 2, 4 … `max_rows` rows.

    What it leaves in the caches is never read: a row's length starts at 0 with each request.
    """
    longest = min(64, manifest.max_source_tokens)
    for length in (1, longest):
        runner.prefill([[manifest.eos_id] * length], [0])
    num_rows = 1
    while True:
        zeros = np.zeros(num_rows, np.int64)
        runner.step(zeros + manifest.decoder_start_id, zeros, 1)
        if num_rows == runner.max_rows:
            return
        num_rows = min(2 * num_rows, runner.max_rows)
