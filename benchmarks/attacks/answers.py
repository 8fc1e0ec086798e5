"""The largest answer that the limits of each field allow, one that fits a message, and who waits while they are made."""

import time
from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS, Look, Prober
from benchmarks.harness.apart import Apart
from benchmarks.harness.replica import Replica
from dragoman.v1 import generation_pb2, generation_pb2_grpc

LIMIT_SECONDS = 500.0
# The first is within the limits of every field and more than a message may be; the second fits one by any estimate.
SAMPLES = (60, 12)


def run(scene: Scene) -> Iterator[Figure]:
    """Ask for each while health is asked."""
    with scene.serve() as server:
        for number in SAMPLES:
            yield from _ask(server, number)


def _ask(server: Replica, number: int) -> Iterator[Figure]:
    request = generation_pb2.GenerateRequest(
        text="A dog runs.", do_sample=True, seed=1, num_return_sequences=number, max_new_tokens=512, top_log_probs=20
    )
    with grpc.insecure_channel(server.address, OPTIONS) as channel, Apart(Prober, server.address, 0.01) as honest:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        began = time.monotonic()
        try:
            became = f"OK, {stub.Generate(request, timeout=LIMIT_SECONDS).ByteSize()} bytes"
        except grpc.RpcError as error:
            became = f"{error.code().name}: {(error.details() or '')[:90]}"
        took = time.monotonic() - began
        time.sleep(1.0)
        yield Figure(f"became of {number} samples", became)
        yield Figure(f"seconds that {number} samples took", f"{took:.2f}")
        yield Figure(f"longest silence of health beside {number} samples, ms", silence(honest.call("stop")))


def silence(looks: list[Look]) -> str:
    """Return the longest time that a call took, in milliseconds."""
    return f"{max(look.took for look in looks) * 1000:.0f}"


ATTACK = Attack("answers", "samples × 512 tokens × 20 top log-probabilities", run)
