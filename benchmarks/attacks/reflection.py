"""A stream of reflection that is left open when the server is told to end."""

import threading
from collections.abc import Iterator

import grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from benchmarks.attacks.attack import Attack, Figure, Scene, seconds
from benchmarks.attacks.others import OPTIONS
from benchmarks.attacks.watch import DRAIN_SECONDS, END_LIMIT_SECONDS, end


def run(scene: Scene) -> Iterator[Figure]:
    """Ask once and stay."""
    is_over = threading.Event()

    def questions() -> Iterator[ServerReflectionRequest]:
        yield ServerReflectionRequest(list_services="")
        is_over.wait()

    with scene.serve(f"--drain-seconds={DRAIN_SECONDS}") as server, grpc.insecure_channel(server.address, OPTIONS) as channel:
        stream = ServerReflectionStub(channel).ServerReflectionInfo(questions())
        next(stream)
        took = end(server)
        is_over.set()
        stream.cancel()
    yield Figure(f"SIGTERM (drain of {DRAIN_SECONDS} s) until the end, s", seconds(took, END_LIMIT_SECONDS))


ATTACK = Attack("reflection", "a reflection stream left open", run)
