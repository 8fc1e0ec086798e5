"""End to end: `dragoman serve` on the GPU, and one client process that sends as fast as it can."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import SHIPPED

TEXTS = (
    "Two children are building a sandcastle on the beach.",
    "The train to the coast leaves at 7:45 from platform 3.",
    "A man in a red jacket is repairing the roof of a small wooden house while his neighbour holds the ladder.",
    "Why does the kettle whistle?",
    "A dog runs through the snow.",
)
CONCURRENCY = 256


def tokens_per_second(device: str, num_requests: int, folder: Path) -> dict[str, Any]:
    """Serve the trained model in fp16 and translate; return tokens a second and who was busy.

    Raises:
        ImportError: If a library of the server or of the client is not installed.
    """
    from benchmarks.harness.served import ServedModel, cpu_seconds
    from dragoman.client.sync import Client
    from dragoman.export.bundle import Bundle, BundleError
    from dragoman.export.exporter import export_checkpoint
    from dragoman.server.config import ServerConfig  # so that a missing library is said before a server is started

    assert ServerConfig.model_fields, "the server has settings"
    bundle = folder / "served-en-de-fp16"
    try:
        Bundle.open(bundle)
    except BundleError:  # it is not there, or was made for what is served no more
        export_checkpoint(SHIPPED, bundle, "fp16", is_forced=True)
    texts = list(itertools.islice(itertools.cycle(TEXTS), num_requests))
    with ServedModel(bundle, "--device", device, "--max-slots", str(CONCURRENCY)) as server, Client(server.address) as client:
        list(client.generate_many(texts[: 2 * CONCURRENCY], concurrency=CONCURRENCY))
        before = {pid: cpu_seconds(pid) for pid in (server.front_pid, server.engine_pid, os.getpid())}
        started = time.perf_counter()
        results = list(client.generate_many(texts, concurrency=CONCURRENCY))
        seconds = time.perf_counter() - started
        shares = {pid: (cpu_seconds(pid) - was) / seconds for pid, was in before.items()}
        front, engine, own = shares[server.front_pid], shares[server.engine_pid], shares[os.getpid()]
    named = {"front end": front, "engine": engine, "this client": own}
    return {
        "requests": num_requests,
        "concurrency": CONCURRENCY,
        "requests_per_second": round(num_requests / seconds, 1),
        "tokens_per_second": round(sum(result.usage.generated_tokens for result in results) / seconds),
        "cores used": {name: round(share, 2) for name, share in named.items()},
        "limit": f"{max(named, key=lambda name: named[name])}, the busiest process",
    }
