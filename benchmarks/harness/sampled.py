"""A real `dragoman serve` that says where its front end's processor time goes.

`python -m benchmarks.harness.sampled FILE serve …` runs the command line with a timer of processor time, which looks at the stack
every millisecond. On SIGUSR1 the counts since the last time are written to FILE, as JSON.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

SAMPLE_SECONDS = 0.001
# Parts by the file that the innermost of our frames is in, the first that fits; a function's name may follow.
RULES = (
    ("/selectors.py", "waiting"),
    ("/structlog/", "log"),
    ("/telemetry/logs.py", "log"),
    ("/telemetry/access_log.py", "log"),
    ("/prometheus_client/", "metrics"),
    ("metrics.py", "metrics"),
    ("/model/text/", "tokeniser"),
    ("/engine/client.py", "engine's messages"),
    ("/msgspec/", "engine's messages"),
    ("/server/supervisor.py", "engine's messages"),
    ("/core/validation.py", "validation"),
    ("/core/search_options.py", "validation"),
    ("/core/frames.py", "validation"),
    ("/core/defaults.py", "validation"),
    ("/grpc/reading.py:read", "protobuf"),
    ("/grpc/conversion.py", "protobuf"),
    ("/grpc/packing.py", "protobuf"),
    ("/grpc/interceptors.py:<lambda>", "protobuf"),
    ("/core/answers.py", "answers"),
    ("/core/generation.py", "answers"),
    ("/server/faces/grpc/", "calls"),
    ("/server/core/", "calls"),
)
OTHERS = "gRPC and asyncio"


class Sampler:
    """Counts what the main thread is at, by part and by function."""

    def __init__(self, path: Path) -> None:
        """Start with nothing counted; `write` writes to this path."""
        self._path = path
        self._parts: Counter[str] = Counter()
        self._places: Counter[str] = Counter()

    def sample(self, _: int, frame: FrameType | None) -> None:
        """Count the part that a stack is in."""
        innermost = frame
        while frame is not None:
            code = frame.f_code
            place = f"{code.co_filename}:{code.co_name}"
            for name, part in RULES:
                if name in place:
                    self._parts[part] += 1
                    self._places[f"{part} {place.rpartition('/')[2]}"] += 1
                    return
            frame = frame.f_back
        self._parts[OTHERS] += 1
        if innermost is not None:
            self._places[f"{OTHERS} {innermost.f_code.co_filename.rpartition('/')[2]}:{innermost.f_code.co_name}"] += 1

    def write(self, _: int, frame: FrameType | None) -> None:
        """Write what was counted, and count anew."""
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps({"parts": self._parts, "places": self._places.most_common()}), encoding="utf-8")
        draft.rename(self._path)
        self._parts.clear()
        self._places.clear()


def main() -> None:
    """Run the command line that follows the file's name."""
    sampler = Sampler(Path(sys.argv[1]))
    signal.signal(signal.SIGPROF, sampler.sample)
    signal.signal(signal.SIGUSR1, sampler.write)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    sys.argv = ["dragoman", *sys.argv[2:]]
    sys.path.insert(0, os.getcwd())
    from dragoman.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
