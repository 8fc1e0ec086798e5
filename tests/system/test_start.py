"""The start of a server: everything that it refuses, in a line that names it; and what it loads, maps and writes."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.client.sync import Client
from tests.system.conftest import ONLY_LINUX
from tests.system.harness.server import ROOT, Event, processes, serving, start_in_vain

pytestmark = pytest.mark.e2e


def refusal(models: Path, *flags: str, **environment: str) -> str:
    """Return what a server says whose settings or bundles it refuses."""
    result = start_in_vain(models, *flags, **environment)
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr, result.stderr
    return result.stderr


def flip_byte(bundle: Path) -> None:
    path = bundle / "decoder.weights"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove_file(bundle: Path) -> None:
    (bundle / "encoder.onnx").unlink()


def change_tensors(bundle: Path) -> None:
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["tensors"]["decoder_inputs"][0] = "other"
    (bundle / "bundle.json").write_text(json.dumps(manifest))


def say(**fields: Any) -> Callable[[Path], None]:
    """Have a manifest say something else."""

    def change(bundle: Path) -> None:
        path = bundle / "bundle.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def nest(depth: int, field: str = "") -> Callable[[Path], None]:
    """Have a manifest, or a field of it, be that many brackets."""

    def change(bundle: Path) -> None:
        path, brackets = bundle / "bundle.json", "[" * depth + "]" * depth
        manifest = json.dumps(json.loads(path.read_text()) | {field: "here"}).replace('"here"', brackets) if field else brackets
        path.write_text(manifest)

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        pytest.param(flip_byte, "decoder.weights", id="a flipped byte"),
        pytest.param(remove_file, "encoder.onnx", id="a missing file"),
        pytest.param(say(format_version=99), "99", id="another format"),
        pytest.param(change_tensors, "bundle.json", id="another tensor"),
        pytest.param(say(num_decoder_layers=3_000_000), "num_decoder_layers", id="3 million layers"),
        pytest.param(say(name="liveness"), "name", id="a name of the health service"),
        pytest.param(say(name="n" * 100_000), "name", id="a long name"),
        pytest.param(say(name="a\x1b[2J\nb"), "name", id="control characters"),
        pytest.param(say(max_source_tokens=10**30), "bundle.json", id="a huge number"),
        pytest.param(say(max_source_tokens=1e30), "max_source_tokens", id="a huge float"),
        pytest.param(nest(100_000), "bundle.json", id="nothing but brackets"),
        pytest.param(nest(900, "tensors"), "tensors", id="nested tensors"),
        pytest.param(nest(100_000, "tensors"), "bundle.json", id="deeply nested tensors"),
    ],
)
def test_a_bad_bundle_stops_the_start_in_a_line(endless: Path, tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    bundle = shutil.copytree(endless / "alpha", tmp_path / "models" / "one")
    damage(bundle)
    [line] = refusal(tmp_path / "models").splitlines()
    assert named in line and line.startswith("dragoman: ") and line.isprintable() and len(line) < 500


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        (["--max-slots", "0"], {}, "max_slots"),
        (["--max-slotz", "4"], {}, "max_slotz"),
        ([], {"DRAGOMAN_MAX_SLOTZ": "4"}, "DRAGOMAN_MAX_SLOTZ"),
        ([], {"DRAGOMAN_DRAIN_SECONDS": "soon"}, "DRAGOMAN_DRAIN_SECONDS"),
        (["--models", "nowhere"], {}, "nowhere"),
        (["--max-slots"], {}, "--max-slots"),
        (["--device", "tpu"], {}, "device: 'tpu' is not auto, cpu, cuda or cuda:N"),
        (["--ready-when", "alpha,gamma"], {}, "ready_when: there is no model gamma; there are alpha, beta"),
        (["--admin-port", "0", "--admin-host", "0.0.0.0"], {}, "admin_tokens_file is not set"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(
    endless: Path, flags: list[str], environment: Mapping[str, str], named: str
) -> None:
    assert named in refusal(endless, *flags, **environment)


def test_a_bad_line_in_the_settings_file_is_named(endless: Path, tmp_path: Path) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text("max_slots = 8\nmax_slot = 9\n")
    line = refusal(endless, "--config", str(file))
    assert "max_slot:" in line and str(file) in line


def test_two_bundles_of_one_name_are_refused(endless: Path, tmp_path: Path) -> None:
    for copy in ("a", "b"):
        shutil.copytree(endless / "alpha", tmp_path / copy)
    assert '"alpha"' in refusal(tmp_path)


@pytest.mark.parametrize("num_frontends", ["1", pytest.param("2", marks=ONLY_LINUX)])
@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)], ids=["alone", "shared"])
def test_a_port_that_is_taken_is_named(endless: Path, options: tuple[int, ...], num_frontends: str) -> None:
    """Also where another server's frontends share it among themselves."""
    with socket.socket() as taken:
        for option in options:
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refusal(endless / "alpha", "--port", port, "--front-ends", num_frontends)
    assert f"port: cannot listen on 127.0.0.1:{port}" in said


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("precision", "device", "reason"),
    [
        pytest.param("fp16", "cuda", "pip install --editable '.[gpu]'", marks=NO_CUDA),
        ("fp32", "cuda:0", "CUDA runs fp16 and bf16 bundles, and this one is fp32; export it anew"),
    ],
)
def test_a_device_that_cannot_serve_the_bundle_stops_the_start(
    shipped_bundle: Callable[..., Path], precision: str, device: str, reason: str
) -> None:
    """One line says so, however many models there are, and no other is a warning."""
    result = start_in_vain(shipped_bundle("en-de", precision).parent, "--device", device)
    assert result.returncode == 1
    [event] = [event for event in map(json.loads, result.stderr.splitlines()) if event["level"] != "info"]
    assert event["event"] == Event.CANNOT_SERVE and "exception" not in event and reason in event["reason"]


def test_models_that_are_always_loaded_and_do_not_fit_end_the_start(endless: Path) -> None:
    result = start_in_vain(endless, "--num-threads", "1", "--max-slots", "4", "--models-memory-gib", "0.2")
    assert result.returncode and "models_memory_gib" in result.stderr


def test_an_fp16_bundle_is_served_on_the_cpu(shipped_bundle: Callable[..., Path]) -> None:
    with serving(shipped_bundle("en-de", "fp16").parent, "--device", "cpu") as server, Client(server.address) as client:
        (model,) = client.models()
        assert (model.precision, model.device) == ("fp16", "cpu")
        assert client.generate("A dog runs through the snow.").text.startswith("Ein Hund")
        assert -20 < client.score("A dog.", "Ein Hund.").log_prob < 0


def test_two_servers_do_not_share_a_port_and_an_engine_may_run_in_the_servers_process(endless: Path) -> None:
    flags = ("--front-ends", "2") if sys.platform == "linux" else ()
    with serving(endless / "alpha", *flags) as server:
        port = server.address.rpartition(":")[2]
        for other in (flags, ()):
            assert port in refusal(endless / "alpha", *other, "--port", port)
    with serving(endless, "--engine", "inline") as server, Client(server.address) as client:
        assert processes(server) == {server.process.pid}
        assert [model.name for model in client.models()] == ["alpha", "beta"] and client.is_ready("beta")
        assert client.generate("a dog runs", model="beta", max_new_tokens=2).finish_reason == "length"


def mapped(pid: int) -> str:
    """Return the shared libraries of a process."""
    return Path(f"/proc/{pid}/maps").read_text()


@ONLY_LINUX
def test_a_server_writes_nothing_but_its_sockets_and_loads_no_more_than_it_needs(endless: Path, tmp_path: Path) -> None:
    """The file system may be read-only. No process loads PyTorch, only engines ONNX Runtime; they may keep to a core."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    # Variables that keep ONNX Runtime quiet under test must not keep it quiet here.
    environment = {"HOME": str(home), "XDG_CACHE_HOME": "", "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "CI": ""}
    flags = ("--num-threads", "1", "--pin-engines", "true")
    with serving(endless / "alpha", *flags, environment=environment) as server, Client(server.address) as client:
        assert client.is_ready() and client.is_ready("alpha") and client.is_ready("readiness") and client.is_ready("liveness")
        assert client.generate("a dog runs", max_new_tokens=5).finish_reason == "length"
        (folder,) = temporary.iterdir()
        assert [path.name for path in folder.iterdir()] == ["engine"] and (folder / "engine").is_socket()
        assert list(home.rglob("*")) == []
        (engine,) = server.engines()
        cores = os.sched_getaffinity(0)
        assert os.sched_getaffinity(server.process.pid) == cores
        assert os.sched_getaffinity(engine) == ({max(cores)} if len(cores) > 1 else cores)
        assert "libtorch" not in mapped(server.process.pid) + mapped(engine)
        assert "onnxruntime" in mapped(engine) and "onnxruntime" not in mapped(server.process.pid)
        assert "grpc" in mapped(server.process.pid) and "grpc" not in mapped(engine)
    assert list(temporary.iterdir()) == [] and list(home.rglob("*")) == []


@pytest.mark.parametrize(("program", "more"), [("import dragoman", ["grpc"]), ("from dragoman import AsyncClient, Client", [])])
def test_the_client_imports_nothing_heavy(program: str, more: list[str]) -> None:
    heavy = {"torch", "transformers", "onnx", "onnxscript", "onnxruntime", "sacrebleu", "matplotlib", "scipy", "pandas", "zmq"}
    code = f"import sys; {program}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert not {name.partition(".")[0] for name in loaded} & {*heavy, *more}
