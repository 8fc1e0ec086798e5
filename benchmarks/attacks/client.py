"""The client's own: text that no server takes, alone and among others."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.attacks.attack import Attack, Failure, Figure, Scene

LIMIT_SECONDS = 60.0
# Run by the checkout's own client.
SCRIPT = """
import json, sys, time
from dragoman import Client
from dragoman.client.request import Request
large = "dog " * 1_125_000
told = {}
with Client(sys.argv[1]) as client:
    client.models()
    began = time.monotonic()
    try:
        client.generate(large)
        told["alone"] = "answered"
    except Exception as error:
        told["alone"] = type(error).__name__
    told["alone_seconds"] = time.monotonic() - began
    began = time.monotonic()
    answered = 0
    try:
        for outcome in client.generate_batch([Request(text, max_new_tokens=200) for text in ("a dog", large, "a cat", "a cow")]):
            answered += outcome.error is None
    except Exception as error:
        told["batch"] = type(error).__name__
    told["answered"], told["batch_seconds"] = answered, time.monotonic() - began
print(json.dumps(told))
"""


def run(scene: Scene) -> Iterator[Figure]:
    """Have the client send 4.5 MB."""
    with scene.serve() as server:
        environment = os.environ | {"PYTHONPATH": str(scene.source)}
        command = [sys.executable, "-c", SCRIPT, server.address]
        ran = subprocess.run(
            command, cwd=scene.source, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    if ran.returncode:
        raise Failure(ran.stderr[-500:])
    told = json.loads(ran.stdout)
    yield Figure("4.5 MB of text alone", f"{told['alone']} after {told['alone_seconds']:.2f} s")
    became = f"{told['answered']}, in {told['batch_seconds']:.2f} s" + (f", the batch {told['batch']}" if "batch" in told else "")
    yield Figure("others of its batch that were answered, of 3", became)


ATTACK = Attack("client", "a client's text of 4.5 MB", run)
