"""The server process before it serves."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dragoman.export.bundle import MANIFEST_FILE, Bundle, content_version
from dragoman.model.generation import Defaults
from dragoman.server.main import Service
from dragoman.server.repository.models import Repository

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys
from dragoman.server import main

def check_for_long(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
    return []

main.find_models = check_for_long
main.Service = lambda *_: sys.exit("it would go on")
sys.exit(main.serve({"models": "."}, None))
"""

WITHOUT_OPENTELEMETRY = """
import sys
sys.modules["opentelemetry"] = None
from dragoman.model.errors import InputError
from dragoman.server import main

main.find_models = lambda *_: []
main.Repository = lambda: sys.exit("it would start")
main.available_cores = lambda: 0
try:
    main.serve({"models": ".", "num_threads": 1, "tracing_endpoint": sys.argv[1]}, None)
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


def signalled_while_bundles_are_checked(number: signal.Signals) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(int(number))]
    result = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, timeout=60, start_new_session=True)
    assert b"Traceback" not in result.stderr
    return result


def test_a_signal_while_bundles_are_checked_ends_the_process_in_order() -> None:
    """The first process of a container gets no signal that it has no handler for: it would serve, and then be killed."""
    result = signalled_while_bundles_are_checked(signal.SIGTERM)
    assert result.returncode == 0
    assert b"SIGTERM" in result.stderr


def test_a_hangup_without_a_terminal_while_bundles_are_checked_changes_nothing() -> None:
    result = signalled_while_bundles_are_checked(signal.SIGHUP)
    assert b"nothing is in use yet" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(b"it would go on")


def test_without_onnx_runtime_one_line_says_what_to_install(tiny_bundle: Path, tmp_path: Path) -> None:
    """The engine, which finds out, used to write a traceback before it."""
    missing = "raise ModuleNotFoundError(\"No module named 'onnxruntime'\", name='onnxruntime')\n"
    (tmp_path / "onnxruntime.py").write_text(missing)
    command = [sys.executable, "-m", "dragoman", "serve", "--models", str(tiny_bundle), "--host", "127.0.0.1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    ports = ["--port", "0", "--metrics-port", "0"]
    result = subprocess.run([*command, *ports], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    events = [json.loads(line) for line in result.stderr.splitlines()]
    [line] = [event for event in events if event["level"] != "info"]
    assert line["event"] == "cannot serve"
    assert re.search(r"onnxruntime is not installed: .*pip install .*\[cpu\]", line["reason"])


BEAMS, DRAWS = {"num_beams": 5}, {"do_sample": True, "num_return_sequences": 3}


def test_an_engine_that_changes_before_its_model_is_published_is_told_to_nobody() -> None:
    """It raised in the task that keeps the engine attached, which ended."""
    num_told: list[bool] = []
    service: Any = SimpleNamespace(
        keeper=SimpleNamespace(models={"m": SimpleNamespace(route=SimpleNamespace(), wake=lambda: None)}),
        repository=Repository(),
        front=SimpleNamespace(update_health=lambda: num_told.append(True)),
    )
    service._publish = partial(Service._publish, service)
    service._describe = partial(Service._describe, service)
    Service._on_change(service, "m")
    assert num_told == [True]


@pytest.mark.parametrize(
    ("defaults", "flags", "setting", "limit", "needed"),
    [
        (BEAMS, "--max-slots 4", "max_slots", 4, "num_beams of model tiny is 5"),
        (BEAMS, "--max-slots-per-request 4", "max_slots_per_request", 4, "num_beams of model tiny is 5"),
        ({"num_beams": 17}, "", "max_slots_per_request", 16, "num_beams of model tiny is 17"),
        (DRAWS, "--max-slots-per-request 2", "max_slots_per_request", 2, "num_return_sequences of model tiny is 3"),
    ],
)
def test_a_model_whose_defaults_need_more_slots_than_a_request_may_take_stops_the_start(
    bundle_copy: Path, defaults: dict[str, Any], flags: str, setting: str, limit: int, needed: str
) -> None:
    say_defaults(bundle_copy, Defaults(**defaults))
    command = [sys.executable, "-m", "dragoman", "serve", "--models", str(bundle_copy), *flags.split()]
    result = subprocess.run([*command, "--port", "0", "--metrics-port", "0"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    reason = f"{setting}: requests may take {limit} slots, but {needed} by default"
    assert (result.returncode, result.stderr) == (2, f"dragoman: {reason}\n")


def say_defaults(bundle: Path, defaults: Defaults) -> None:
    """Have a bundle say defaults that its checkpoint did not have."""
    manifest = replace(Bundle.open(bundle).manifest, defaults=defaults)
    manifest = replace(manifest, version=content_version(manifest))
    (bundle / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
