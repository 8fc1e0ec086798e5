"""Ctrl-C in a caller's own program, in the middle of each kind of call."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_SECONDS = 60

PROGRAM = """
import asyncio, sys
from dragoman import AsyncClient, Client, Request

target, method = sys.argv[1:]

def blocking() -> None:
    with Client(target) as client:
        match method:
            case "generate": client.generate("stuck")
            case "score": client.score("stuck", "x")
            case "stream": list(client.stream("stuck"))
            case "generate_many": list(client.generate_many(["a", "stuck", "b"]))
            case "generate_batch": list(client.generate_batch([Request("a"), Request("stuck")]))

async def asynchronous() -> None:
    async with AsyncClient(target) as client:
        match method:
            case "async generate": await client.generate("stuck")
            case "async stream": [piece async for piece in client.stream("stuck")]
            case "async generate_many": [result async for result in client.generate_many(["a", "stuck", "b"])]
            case "async generate_batch": [outcome async for outcome in client.generate_batch([Request("a"), Request("stuck")])]

try:
    asyncio.run(asynchronous()) if method.startswith("async") else blocking()
except KeyboardInterrupt:
    sys.exit(130)
"""
BLOCKING = ("generate", "score", "stream", "generate_many", "generate_batch")
ASYNCHRONOUS = ("async generate", "async stream", "async generate_many", "async generate_batch")


@pytest.mark.parametrize("method", [*BLOCKING, *ASYNCHRONOUS])
def test_interrupt_ends_the_program_and_frees_the_server(server, service, held, method: str) -> None:
    behaviour = held("middle" if method.endswith("stream") else "start")
    service.behaviours["stuck"] = behaviour
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.target, method],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        behaviour.wait_until_began()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
        assert process.returncode == 130
        behaviour.assert_cancelled()
    finally:
        process.kill()
        process.communicate()
