"""The server process before it serves."""

import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.model.generation import Defaults
from dragoman.server.config import ConfigError
from dragoman.server.models.loader import check_slots

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys
from dragoman.server import main

def check_for_long(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
    return []

main.find_models = check_for_long
main.Server = lambda *_: sys.exit("it would go on")
sys.exit(main.serve({"models": "."}, None))
"""

WITHOUT_OPENTELEMETRY = """
import sys
sys.modules["opentelemetry"] = None
from dragoman.model.errors import InputError
from dragoman.server import main

main.find_models = lambda *_: []
main.ModelRegistry = lambda: sys.exit("it would start")
main.available_cores = lambda: 0
try:
    main.serve({"models": ".", "num_threads": 1, "tracing_endpoint": sys.argv[1]}, None)
except InputError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize(
    ("is_installed", "endpoint", "expected"),
    [
        (False, "", "it would start"),
        (False, "http://localhost:4317", r"OpenTelemetry is not installed; .*pip install --editable '\.\[tracing\]'"),
        (True, "http://localhost:4317", r"a variable OTEL_\* cannot be used: could not convert string to float: 'soon'"),
    ],
)
def test_opentelemetry_is_needed_only_for_tracing(is_installed: bool, endpoint: str, expected: str) -> None:
    if is_installed:
        pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")
    program = WITHOUT_OPENTELEMETRY.replace('sys.modules["opentelemetry"] = None', "") if is_installed else WITHOUT_OPENTELEMETRY
    command, environment = [sys.executable, "-c", program, endpoint], os.environ | {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert re.fullmatch("refused: tracing_endpoint: " * bool(endpoint) + expected, result.stderr.strip())


@pytest.mark.parametrize(("number", "code", "told"), [(signal.SIGTERM, 0, "SIGTERM"), (signal.SIGHUP, 1, "nothing is in use yet")])
def test_signal_while_bundles_are_checked(number: signal.Signals, code: int, told: str) -> None:
    """The first process of a container gets no signal that it has no handler for; a hangup without a terminal changes nothing."""
    command = [sys.executable, "-c", PROGRAM, str(int(number))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert "Traceback" not in result.stderr and result.returncode == code and told in result.stderr
    assert result.stderr.splitlines()[-1].startswith("it would go on") is (code == 1)


BEAMS, DRAWS = Defaults(num_beams=5), Defaults(do_sample=True, num_return_sequences=3)


@pytest.mark.parametrize(
    ("defaults", "max_slots", "per_request", "reason"),
    [
        (BEAMS, 4, 0, "max_slots: requests may take 4 slots, but num_beams of model tiny is 5 by default"),
        (DRAWS, 64, 2, "max_slots_per_request: requests may take 2 slots, but num_return_sequences of model tiny is 3 by default"),
        (BEAMS, 5, 5, ""),
        (DRAWS, 64, 3, ""),
    ],
)
def test_defaults_of_a_model_need_no_more_slots_than_a_request_may_take(
    defaults: Defaults, max_slots: int, per_request: int, reason: str
) -> None:
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(name="tiny", defaults=defaults))
    with pytest.raises(ConfigError, match=f"^{reason}$") if reason else nullcontext():
        check_slots(bundle, max_slots, per_request)
