"""Searches that cost more than others, from ever more callers, beside one who reads a stream."""

import re
from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS, Crowd, Pace, Reader
from benchmarks.harness.apart import Apart
from dragoman.v1 import generation_pb2

CALLERS = (1, 4, 16)
SECONDS = 6.0
WISHED_BEAMS = 60
METHOD = "/dragoman.v1.Generation/Generate"


def run(scene: Scene) -> Iterator[Figure]:
    """Offend in three ways."""
    with scene.serve() as server, Apart(Reader, server.address) as neighbour:
        neighbour.call("read", 2.0)
        yield _figure("alone", neighbour.call("read", SECONDS))
        for name, request in _offences(server.address):
            for num_callers in CALLERS:
                with Apart(Crowd, server.address, num_callers, "Generate", request.SerializeToString()) as crowd:
                    neighbour.call("read", 0.5)
                    pace: Pace = neighbour.call("read", SECONDS)
                    crowd.call("stop")
                yield _figure(f"beside {num_callers} with {name}", pace)


def _figure(name: str, pace: Pace) -> Figure:
    return Figure(f"{name}: median, p99 gap ms", f"{pace.median_ms:.1f}, {pace.p99_ms:.1f}")


def _offences(address: str) -> Iterator[tuple[str, generation_pb2.GenerateRequest]]:
    plain = generation_pb2.GenerateRequest(text="A dog runs.", max_new_tokens=512)
    yield "temperature 100", _with(plain, do_sample=True, temperature=100.0)
    yield "repetition penalty 0.9", _with(plain, repetition_penalty=0.9)
    num_beams = largest_allowed(address, plain)
    # The row is the same one whatever is allowed, so that before and after stand beside each other.
    yield f"{WISHED_BEAMS} beams, or as many as are allowed", _with(plain, num_beams=num_beams)


def _with(plain: generation_pb2.GenerateRequest, **fields: float) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest()
    request.CopyFrom(plain)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def largest_allowed(address: str, plain: generation_pb2.GenerateRequest) -> int:
    """Return as many beams as are wished for, or the limit that the refusal names."""
    request = _with(plain, num_beams=WISHED_BEAMS)
    request.max_new_tokens = 1
    with grpc.insecure_channel(address, OPTIONS) as channel:
        try:
            call: Any = channel.unary_unary(METHOD)
            call(request.SerializeToString(), timeout=60)
        except grpc.RpcError as error:
            if (limit := re.search(r"1 to (\d+)", error.details() or "")) is None:
                raise
            return int(limit[1])
    return WISHED_BEAMS


ATTACK = Attack("neighbours", "searches that are dear, beside a stream", run)
