"""Bearer tokens with every printable character in the middle: the whole token must be accepted, a part of it never."""

import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import OPTIONS
from dragoman.v1 import generation_pb2, generation_pb2_grpc

CHARACTERS = string.digits + string.ascii_letters + string.punctuation


def run(scene: Scene) -> Iterator[Figure]:
    """Show whole tokens, and what follows the character in each."""
    tokens = {f"caller{ord(each)}": f"first{ord(each)}{each}last{ord(each)}" for each in CHARACTERS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"
        path.write_text("".join(f"{name}:{token}\n" for name, token in tokens.items()))
        with scene.serve(f"--auth-tokens-file={path}") as server, grpc.insecure_channel(server.address, OPTIONS) as channel:
            whole = sum(_is_accepted(channel, token) for token in tokens.values())
            part = sum(_is_accepted(channel, f"last{ord(each)}") for each in CHARACTERS)
            num_logged = sum(f"first{ord(each)}" in server.log() for each in CHARACTERS)
    yield Figure(f"whole tokens accepted, of {len(CHARACTERS)}", str(whole))
    yield Figure("parts of tokens accepted, of as many", str(part))
    yield Figure("tokens of which a part is in the log", str(num_logged))


def _is_accepted(channel: grpc.Channel, token: str) -> bool:
    stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    try:
        stub.ListModels(generation_pb2.ListModelsRequest(), timeout=10, metadata=(("authorization", f"Bearer {token}"),))
    except grpc.RpcError:
        return False
    return True


ATTACK = Attack("tokens", "bearer tokens with every printable character", run)
