"""A bundle that is away when the first pair is scored, and back for the second."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS
from dragoman.v1 import generation_pb2, generation_pb2_grpc

LIMIT_SECONDS = 20.0


def run(scene: Scene) -> Iterator[Figure]:
    """Take the bundle away once it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "here" / scene.bundle.name
        shutil.copytree(scene.bundle, bundle)
        with scene.serve(bundle=bundle) as server, grpc.insecure_channel(server.address, OPTIONS) as channel:
            away = bundle.with_name("away")
            bundle.rename(away)
            yield Figure("Score without the bundle", _score(channel))
            away.rename(bundle)
            yield Figure("Score with the bundle again", _until_scored(channel))


def _until_scored(channel: grpc.Channel) -> str:
    """Return how long it took until a pair was scored, or what the last one ended with."""
    began = time.monotonic()
    while (code := _score(channel)) != "OK" and time.monotonic() < began + LIMIT_SECONDS:
        time.sleep(0.1)
    return f"{code} after {time.monotonic() - began:.1f} s"


def _score(channel: grpc.Channel) -> str:
    stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    try:
        stub.Score(generation_pb2.ScoreRequest(text="A dog.", target="Ein Hund."), timeout=60)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


ATTACK = Attack("bundle", "the bundle away at the first Score", run)
