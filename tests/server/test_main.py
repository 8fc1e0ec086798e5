"""The server process before it serves."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys, server.main

def check_for_long(folder):
    os.kill(os.getpid(), signal.SIGTERM)
    return []

server.main.find_bundles = check_for_long
sys.exit(server.main.serve({"models": "."}, None))
"""


def test_sigterm_while_bundles_are_checked_ends_the_process_in_order() -> None:
    """The first process of a container gets no signal that it has no handler for: it would serve, and then be killed."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=dict(os.environ), capture_output=True, timeout=60)
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr
