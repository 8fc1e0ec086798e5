"""Four million suppressed tokens in one message."""

from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.attacks.answers import silence
from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS, Prober
from benchmarks.harness.apart import Apart
from dragoman.v1 import generation_pb2

NUM_TOKENS = 4_100_000
NUM_CALLS = 5
SUPPRESSED_FIELD = generation_pb2.GenerateRequest.SUPPRESSED_TOKENS_FIELD_NUMBER


def run(scene: Scene) -> Iterator[Figure]:
    """Send them, a few times, while health is asked."""
    message = generation_pb2.GenerateRequest(text="A dog.", suppressed_tokens=bytes(i % 128 for i in range(NUM_TOKENS)))
    message.return_alternatives, message.num_return_sequences = True, 2
    data = message.SerializeToString()
    codes = []
    with (
        scene.serve() as server,
        grpc.insecure_channel(server.address, OPTIONS) as channel,
        Apart(Prober, server.address, 0.01) as honest,
    ):
        for _ in range(NUM_CALLS):
            try:
                call: Any = channel.unary_unary("/dragoman.v1.Generation/Generate")
                call(data, timeout=60)
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
        yield Figure("longest silence of health, ms", silence(honest.call("stop")))
    yield Figure("became of the calls", ", ".join(sorted(set(codes))))


ATTACK = Attack("suppressed", "4.1 million suppressed tokens", run)
