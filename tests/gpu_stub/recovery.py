"""A bundle on the stub device, where captures fail: run in the bed by `test_recovery.py`, to which it writes JSON.

recovery.py BUNDLE FUNCTION STATUS AFTER
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_stub.watch import Watch
from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_runner, load_scorer
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.settings import DeviceSettings


def main() -> None:
    """Warm up with a function that fails; then serve."""
    bundle, function, status, after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    watch = Watch()
    limits = Limits(4, 100, 10_000, 128)
    opened = Bundle.open(bundle)
    runner: Any = load_runner(opened, limits, 1, DeviceSettings(name="cuda"), is_warmed_up=False)
    watch.fail(function, status, after=after, times=1)
    runner.warm_up()
    watch.reset()
    runner.prefill([[5, 6, 1], [5, 1]], [0, 1])
    for position in range(3):
        runner.step(np.full(2, 3, np.int64), np.full(2, position, np.int64), 1)
    scorer = load_scorer(opened, 1, runner)
    scorer.score([5, 6, 1], [5, 1])
    seen = watch.read()
    print(
        json.dumps(
            {
                "is_disabled": runner.graphs.is_disabled,
                "reason": runner.graphs.reason,
                "rows_at_once": runner._rows_at_once[False],
                "num_launches": seen.graphs["num_launches"],
                "num_captures": seen.graphs["num_captures"],
                "num_kernels": sum(kernel.run for kernel in seen.kernels.values()),
                "faults": seen.faults,
            }
        )
    )


if __name__ == "__main__":
    main()
