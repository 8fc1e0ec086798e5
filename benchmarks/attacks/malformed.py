"""Bytes that are no message, to the health service, its stream and reflection."""

from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS

NOISE = b"\x0a\x7f\xff\xfe"
PATHS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


def run(scene: Scene) -> Iterator[Figure]:
    """Send noise to each."""
    with scene.serve() as server, grpc.insecure_channel(server.address, OPTIONS) as channel:
        for path in PATHS:
            try:
                call: Any = channel.stream_stream(path)
                answers = [*call(iter([NOISE]), timeout=10)]
                became = f"OK with {len(answers)} answers"
            except grpc.RpcError as error:
                became = f"{error.code().name}: {(error.details() or '')[:100]}"
            yield Figure(path.rpartition("/")[2], became.replace("|", "/"))


ATTACK = Attack("malformed", "noise to health and reflection", run)
