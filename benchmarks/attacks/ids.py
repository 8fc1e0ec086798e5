"""Ids of megabytes on streams of requests: what comes back when nobody reads it, and what becomes of the other requests."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS
from benchmarks.harness.processes import memory_mib
from dragoman.v1 import generation_pb2, generation_pb2_grpc

ID_CHARACTERS = 4_000_000
# With it a request fits a message of 4 MiB, and an answer that repeats it does not.
LARGEST_ID = 4_194_244
SECONDS = 8.0
LIMIT_MIB = 4096.0
STREAMS = (2, 50)


def run(scene: Scene) -> Iterator[Figure]:
    """Send ids and read nothing; then one such id among three good requests."""
    for num_streams in STREAMS:
        with scene.serve() as server, ExitStack() as stack:
            before = memory_mib(server.front_pid)["rss"]
            is_over = threading.Event()
            stack.callback(is_over.set)
            channels = [
                grpc.insecure_channel(server.address, [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]) for _ in range(num_streams)
            ]
            for channel in channels:
                stack.enter_context(channel)
                threading.Thread(target=_send, args=(channel, is_over), daemon=True).start()
            began, peak = time.monotonic(), before
            while time.monotonic() < began + SECONDS and peak < LIMIT_MIB:
                peak = max(peak, memory_mib(server.front_pid)["rss"])
                time.sleep(0.02)
            took = time.monotonic() - began
            grew = f"{peak - before:.0f} in {took:.0f} s"
            yield Figure(f"growth of the front end, {num_streams} streams of ids of 4 MB, MiB", grew)
    with scene.serve() as server, grpc.insecure_channel(server.address, OPTIONS) as channel:
        yield Figure("good requests answered beside an id of 4,194,244 bytes, of 3", str(_among_good_ones(channel)))


def _send(channel: grpc.Channel, is_over: threading.Event) -> None:
    """Send the same id again and again; the answers are left where they are."""
    message = generation_pb2.GenerateRequest(text="A dog.", request_id="a" * ID_CHARACTERS).SerializeToString()

    def messages() -> Iterator[bytes]:
        while not is_over.is_set():
            yield message

    method: Any = channel.stream_stream("/dragoman.v1.Generation/GenerateBatch")
    call = method(messages())
    is_over.wait()
    call.cancel()


def _among_good_ones(channel: grpc.Channel) -> int:
    stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    ids = ("first", "a" * LARGEST_ID, "second", "third")
    requests = [generation_pb2.GenerateRequest(text="A dog.", request_id=each, max_new_tokens=20) for each in ids]
    num_answered = 0
    try:
        for answer in stub.GenerateBatch(iter(requests), timeout=30):
            num_answered += answer.HasField("response")
    except grpc.RpcError:
        pass  # the stream ended; what came before counts
    return num_answered


ATTACK = Attack("ids", "GenerateBatch with ids of 4 MB", run)
