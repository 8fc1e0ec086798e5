"""What the border between front end and engine process costs: latency added to one request, and messages a step.

    python -m benchmarks.border BUNDLE

The same request is decoded by an engine driven directly in this thread and by one in its own process, in turns; the difference of
the medians is the border. Then 64 requests run at once, and the engine's messages are counted against its steps.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from benchmarks.harness.report import environment, write
from dragoman.export.bundle import Bundle
from dragoman.server.engine.messages import Finished, Request, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.offline import OfflineTranslator
from dragoman.server.supervisor import RestartPolicy, SupervisedEngine

NUM_ROUNDS, REQUESTS_A_ROUND, NUM_TOGETHER, NUM_STREAMED = 20, 10, 64, 16
TEXT = "A man in a blue shirt is standing on a ladder cleaning a window."


class Counter:
    """Counts an engine's messages and steps."""

    def __init__(self) -> None:
        self.num_messages = self.num_steps = 0

    def observe(self, statistics: Statistics) -> None:
        """Take one report's statistics."""
        self.num_messages += 1
        self.num_steps += len(statistics.steps)


def remote_engine(bundle: Bundle, num_threads: int, counter: Counter) -> SupervisedEngine:
    """Describe an engine process like the one `dragoman serve` starts."""
    settings = EngineSettings(
        endpoint="",
        bundle=str(bundle.directory),
        num_threads=num_threads,
        max_slots=NUM_TOGETHER,
        max_waiting_requests=1024,
        max_waiting_tokens=65536,
        prefill_tokens_per_step=2048,
        is_warmed_up=True,
        log_level="warning",
        log_format="console",
    )
    return SupervisedEngine(
        bundle.manifest.name,
        settings,
        RestartPolicy(),
        is_inline=False,
        on_statistics=counter.observe,
        on_change=lambda: None,
        on_restart=lambda: None,
    )


async def measure(directory: Path, num_threads: int) -> dict[str, float]:
    """Return latencies in milliseconds and messages a step."""
    local = OfflineTranslator(directory, NUM_TOGETHER, num_threads)
    counter = Counter()
    remote = remote_engine(local.bundle, num_threads, counter)
    source = [*local.tokenizers.source.encode(TEXT), local.bundle.manifest.eos_id]

    def request(is_streamed: bool = False) -> Request:
        return Request(remote.next_id(), source, 64, time.monotonic(), is_streamed=is_streamed)

    async def stream() -> None:
        async for _ in remote.stream(request(is_streamed=True)):
            pass

    await remote.start()
    try:
        direct, across = [], []
        for _ in range(NUM_ROUNDS):
            for _ in range(REQUESTS_A_ROUND):
                started = time.perf_counter()
                local.run([source], 64)
                direct.append(time.perf_counter() - started)
            for _ in range(REQUESTS_A_ROUND):
                started = time.perf_counter()
                finished = await remote.generate(request())
                across.append(time.perf_counter() - started)
                assert isinstance(finished, Finished)
        counter.num_messages = counter.num_steps = 0
        unary = (remote.generate(request()) for _ in range(NUM_TOGETHER - NUM_STREAMED))
        await asyncio.gather(*unary, *(stream() for _ in range(NUM_STREAMED)))
        return {
            "direct p50 ms": round(statistics.median(direct) * 1000, 3),
            "across p50 ms": round(statistics.median(across) * 1000, 3),
            "added p50 ms": round((statistics.median(across) - statistics.median(direct)) * 1000, 3),
            "tokens of the answer": finished.num_generated,
            "messages a step": round(counter.num_messages / counter.num_steps, 3),
        }
    finally:
        await remote.stop()


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    about = environment("onnxruntime", "pyzmq", "msgspec")
    row = asyncio.run(measure(arguments.bundle, arguments.threads))
    latency = f"Latency: one request at a time, {NUM_ROUNDS * REQUESTS_A_ROUND} on each side, in turns."
    notes = [f"{latency} Messages: {NUM_TOGETHER} requests at once, {NUM_STREAMED} of them streamed."]
    write("border", "Cost of the border between front end and engine", about, [row], notes)


if __name__ == "__main__":
    main()
