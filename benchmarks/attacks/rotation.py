"""Certificates and tokens replaced under load: who notices, and from when on the new ones hold."""

import os
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from benchmarks.attacks.attack import Attack, Figure, Scene, seconds
from benchmarks.attacks.others import OPTIONS
from dragoman.v1 import generation_pb2, generation_pb2_grpc

NUM_CALLERS = 4
CALLS_PER_CONNECTION = 10
NUM_ROTATIONS = 5
LIMIT_SECONDS = 15.0


def run(scene: Scene) -> Iterator[Figure]:
    """Replace both, again and again, while callers that open new connections call."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_certificate(folder)
        authority = (folder / "server.pem").read_bytes()
        tokens = folder / "tokens"
        tokens.write_text("constant:token-0\n")
        flags = (f"--tls-certificate={folder}/server.pem", f"--tls-key={folder}/server.key", f"--auth-tokens-file={tokens}")
        with scene.serve(*flags) as server, ThreadPoolExecutor(NUM_CALLERS) as pool:
            is_over = threading.Event()
            trusted = [authority]
            callers = [pool.submit(_call, server.address, trusted, is_over) for _ in range(NUM_CALLERS)]
            try:
                certificates = [_rotate_certificate(server.address, folder, trusted) for _ in range(NUM_ROTATIONS)]
                took = [_rotate_token(server.address, tokens, number, trusted) for number in range(1, NUM_ROTATIONS + 1)]
            finally:
                is_over.set()
            yield from _figures(callers, certificates, took)


def _figures(
    callers: list[Future[tuple[int, int]]], certificates: list[float | None], tokens: list[float | None]
) -> Iterator[Figure]:
    done = [caller.result() for caller in callers]
    yield Figure("calls meanwhile, of which failed", f"{sum(num for num, _ in done)}, {sum(failed for _, failed in done)}")
    for name, took in (("certificate on new connections", certificates), ("token", tokens)):
        worst = None if None in took else max(each for each in took if each is not None)
        yield Figure(f"until a new {name} holds, slowest of {NUM_ROTATIONS}, s", seconds(worst, LIMIT_SECONDS))


def _make_certificate(folder: Path) -> None:
    """Make a certificate that signs itself, and put it and its key in the place of the old ones."""
    for_whom = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    new = ("-keyout", "new.key", "-out", "new.pem")
    subprocess.run(["openssl", "req", "-x509", *key, *new, *for_whom], cwd=folder, check=True, capture_output=True)
    os.replace(folder / "new.key", folder / "server.key")
    os.replace(folder / "new.pem", folder / "server.pem")


def _call(address: str, trusted: list[bytes], is_over: threading.Event) -> tuple[int, int]:
    """Call with a token that stays; a few calls on each connection. Return calls and failures."""
    num_calls = num_failed = 0
    while not is_over.is_set():
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(b"".join(trusted)), OPTIONS) as channel:
            for _ in range(CALLS_PER_CONNECTION):
                num_calls += 1
                num_failed += not _is_answered(channel, "token-0")
    return num_calls, num_failed


def _is_answered(channel: grpc.Channel, token: str) -> bool:
    stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    request = generation_pb2.GenerateRequest(text="A dog runs.", max_new_tokens=2)
    try:
        stub.Generate(request, timeout=20, metadata=(("authorization", f"Bearer {token}"),))
    except grpc.RpcError:
        return False
    return True


def _rotate_certificate(address: str, folder: Path, trusted: list[bytes]) -> float | None:
    """Replace the certificate, which callers trust already; return how long it took until a new connection showed it."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        _make_certificate(Path(name))
        new = (Path(name) / "server.pem").read_bytes()
        trusted.append(new)
        time.sleep(1.0)  # connections that are being made have the trust of before
        for kind in ("key", "pem"):
            os.replace(Path(name) / f"server.{kind}", folder / f"server.{kind}")
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    while time.monotonic() < began + LIMIT_SECONDS:
        if ssl.get_server_certificate((host, int(port)), timeout=10).strip() == new.decode().strip():
            return time.monotonic() - began
        time.sleep(0.05)
    return None


def _rotate_token(address: str, path: Path, number: int, trusted: list[bytes]) -> float | None:
    """Replace the file by one with another token besides the one that stays; return how long it took until that was accepted."""
    new = path.with_name("new")
    new.write_text(f"constant:token-0\nchanging:token-{number}\n")
    os.replace(new, path)
    began = time.monotonic()
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(b"".join(trusted)), OPTIONS) as channel:
        while time.monotonic() < began + LIMIT_SECONDS:
            if _is_answered(channel, f"token-{number}"):
                return time.monotonic() - began
            time.sleep(0.05)
    return None


ATTACK = Attack("rotation", "certificates and tokens replaced under load", run)
