"""Thousands of pairs whose deadline passes: what the server counts beside what their callers saw."""

import random
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS
from benchmarks.attacks.scoring import PAIR
from dragoman.v1 import generation_pb2_grpc

NUM_CALLS, NUM_AT_ONCE = 3000, 48
SHORTEST_SECONDS, LONGEST_SECONDS = 0.001, 0.1
METRIC = "dragoman_requests_failed_total{"


def run(scene: Scene) -> Iterator[Figure]:
    """Score with deadlines that are too short."""
    with scene.serve() as server, grpc.insecure_channel(server.address, OPTIONS) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        chance = random.Random(12)

        def score(seconds: float) -> str:
            try:
                stub.Score(PAIR, timeout=seconds)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            saw = Counter(pool.map(score, [chance.uniform(SHORTEST_SECONDS, LONGEST_SECONDS) for _ in range(NUM_CALLS)]))
        text = urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10).read().decode()
    yield Figure("callers saw", listed(saw))
    yield Figure("the server counted", listed(counted(text)))


def counted(text: str) -> Counter[str]:
    """Return the failures by code, all models together, as /metrics tells them."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(METRIC):
            found[line.partition('code="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return found


def listed(codes: Counter[str]) -> str:
    """Return numbers by code, for the table."""
    return ", ".join(f"{code} {number}" for code, number in sorted(codes.items()) if number) or "none"


ATTACK = Attack("counting", "3,000 pairs with deadlines of 1 to 100 ms", run)
