"""The server process before it serves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys, server.main

def check_for_long(folder):
    os.kill(os.getpid(), signal.SIGTERM)
    return []

server.main.find_bundles = check_for_long
sys.exit(server.main.serve({"models": "."}, None))
"""

WITHOUT_OPENTELEMETRY = """
import sys
sys.modules["opentelemetry"] = None
import dragoman.server.main
from dragoman.model.errors import InputError

server.main.find_bundles = lambda folder: []
server.main.Repository = lambda bundles, make_engine: sys.exit("it would start")
server.main.available_cores = lambda: 0
try:
    server.main.serve({"models": ".", "num_threads": 1, "tracing_endpoint": sys.argv[1]}, None)
except InputError as error:
    sys.exit(f"refused: {error}")
"""


def test_without_opentelemetry_the_server_starts_unless_tracing_is_asked_for() -> None:
    def start(endpoint: str) -> str:
        command = [sys.executable, "-c", WITHOUT_OPENTELEMETRY, endpoint]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stderr.strip()

    assert start("") == "it would start"
    refusal = start("http://localhost:4317")
    assert refusal.startswith("refused: tracing_endpoint: OpenTelemetry is not installed; ")
    assert refusal.endswith("pip install --editable '.[tracing]'")


def test_a_variable_of_opentelemetry_that_cannot_be_used_stops_the_start() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")
    program = WITHOUT_OPENTELEMETRY.replace('sys.modules["opentelemetry"] = None', "")
    command = [sys.executable, "-c", program, "http://localhost:4317"]
    environment = os.environ | {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == (
        "refused: tracing_endpoint: a variable OTEL_* cannot be used: could not convert string to float: 'soon'"
    )


def test_sigterm_while_bundles_are_checked_ends_the_process_in_order() -> None:
    """The first process of a container gets no signal that it has no handler for: it would serve, and then be killed."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=dict(os.environ), capture_output=True, timeout=60)
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr
