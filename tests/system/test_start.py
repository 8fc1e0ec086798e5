"""What a server says before it serves: bad bundles, bad settings, and what it does not import."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.e2e


def serve(*flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dragoman", "serve", "--port", "0", "--metrics-port", "0", *flags]
    return subprocess.run(command, cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=120)


def flip_byte(bundle: Path) -> str:
    path = bundle / "decoder.weights"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "decoder.weights"


def remove_file(bundle: Path) -> str:
    (bundle / "encoder.onnx").unlink()
    return "encoder.onnx"


def change_format(bundle: Path) -> str:
    path = bundle / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    return "99"


def change_tensors(bundle: Path) -> str:
    path = bundle / "bundle.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["decoder_inputs"][0] = "other"
    path.write_text(json.dumps(manifest))
    return "bundle.json"


@pytest.mark.parametrize("damage", [flip_byte, remove_file, change_format, change_tensors])
def test_a_bad_bundle_stops_the_start_and_is_named(bundles: Path, tmp_path: Path, damage: Callable[[Path], str]) -> None:
    shutil.copytree(bundles / "en-de", tmp_path / "en-de")
    named = damage(tmp_path / "en-de")
    result = serve("--models", str(tmp_path))
    assert result.returncode == 2
    assert named in result.stderr and "Traceback" not in result.stderr


def test_two_bundles_of_one_name_are_refused(bundles: Path, tmp_path: Path) -> None:
    for copy in ("a", "b"):
        shutil.copytree(bundles / "en-de", tmp_path / copy)
    result = serve("--models", str(tmp_path))
    assert result.returncode == 2 and '"en-de"' in result.stderr


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        (["--max-slots", "0"], {}, "max_slots"),
        (["--max-slotz", "4"], {}, "max_slotz"),
        ([], {"DRAGOMAN_MAX_SLOTZ": "4"}, "DRAGOMAN_MAX_SLOTZ"),
        ([], {"DRAGOMAN_DRAIN_SECONDS": "soon"}, "DRAGOMAN_DRAIN_SECONDS"),
        (["--models", "nowhere"], {}, "nowhere"),
        (["--max-slots"], {}, "--max-slots"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(
    bundles: Path, flags: list[str], environment: dict[str, str], named: str
) -> None:
    result = serve("--models", str(bundles), *flags, environment=environment)
    assert result.returncode == 2
    assert named in result.stderr and "Traceback" not in result.stderr


def test_a_bad_line_in_the_settings_file_is_named(bundles: Path, tmp_path: Path) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text("max_slots = 8\nmax_slot = 9\n")
    result = serve("--models", str(bundles), "--config", str(file))
    assert result.returncode == 2 and "max_slot:" in result.stderr and str(file) in result.stderr


def test_a_taken_port_is_named(bundles: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "dragoman", "serve", "--models", str(bundles), "--host", "127.0.0.1", "--port", port]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and port in result.stderr


HEAVY = ("torch", "transformers", "onnx", "onnxscript", "sacrebleu", "matplotlib", "scipy", "pandas")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("dragoman.server.main", (*HEAVY, "onnxruntime")),
        ("dragoman.server.engine.process", (*HEAVY, "grpc", "prometheus_client", "pydantic")),
        ("dragoman.client.sync", (*HEAVY, "onnxruntime", "zmq", "prometheus_client")),
        ("dragoman.client.aio", (*HEAVY, "onnxruntime", "zmq", "prometheus_client")),
        ("dragoman", (*HEAVY, "onnxruntime", "grpc", "zmq")),
    ],
)
def test_nothing_heavy_is_imported(module: str, forbidden: tuple[str, ...]) -> None:
    """A serving process loads neither PyTorch nor Transformers, and only engines load ONNX Runtime."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert not {name.partition(".")[0] for name in loaded} & set(forbidden)
