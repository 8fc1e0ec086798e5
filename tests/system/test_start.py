"""The start of a server: everything that it refuses, in a line that names it; what it loads, maps and writes; its readiness."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from dragoman.client.errors import Unavailable
from dragoman.client.sync import Client
from tests.system.conftest import ONLY_LINUX
from tests.system.harness.callers import NO_RETRY
from tests.system.harness.models import seal
from tests.system.harness.server import Event, Server, kill, serving, start_in_vain, wait_until

pytestmark = pytest.mark.e2e


def refusal(models: Path, *flags: str, **environment: str) -> str:
    result = start_in_vain(models, *flags, **environment)
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr, result.stderr
    return result.stderr


def flip_byte(bundle: Path) -> None:
    content = bytearray((bundle / "decoder.weights").read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / "decoder.weights").write_bytes(content)


def say(**fields: Any) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        path = bundle / "bundle.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def nest(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        pytest.param(flip_byte, "decoder.weights", id="a flipped byte"),
        pytest.param(lambda bundle: (bundle / "encoder.onnx").unlink(), "encoder.onnx", id="a missing file"),
        pytest.param(say(format_version=99), "99", id="another format"),
        pytest.param(say(num_decoder_layers=3_000_000), "num_decoder_layers", id="3 million layers"),
        pytest.param(say(name="liveness"), "name", id="a name of the health service"),
        pytest.param(say(name="a\x1b[2J\nb"), "name", id="control characters"),
        pytest.param(say(max_source_tokens=10**30), "bundle.json", id="a huge number"),
        pytest.param(nest, "bundle.json", id="nothing but brackets"),
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
        (["--device", "tpu"], {}, "device: 'tpu' is not auto, cpu, cuda or cuda:N"),
        (["--ready-when", "alpha,gamma"], {}, "ready_when: there is no model gamma; there are alpha, beta"),
        (["--admin-port", "0", "--admin-host", "0.0.0.0"], {}, "admin_tokens_file is not set"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(
    endless: Path, flags: list[str], environment: Mapping[str, str], named: str
) -> None:
    assert named in refusal(endless, *flags, **environment)


def test_a_bad_line_in_the_settings_file_and_bundles_of_one_name_are_named(endless: Path, tmp_path: Path) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text("max_slots = 8\nmax_slot = 9\n")
    line = refusal(endless, "--config", str(file))
    assert "max_slot:" in line and str(file) in line
    for copy in ("a", "b"):
        shutil.copytree(endless / "alpha", tmp_path / copy)
    assert '"alpha"' in refusal(tmp_path)


@pytest.mark.parametrize(
    ("num_frontends", "options"),
    [("1", ()), ("1", (socket.SO_REUSEADDR, socket.SO_REUSEPORT)), pytest.param("2", (socket.SO_REUSEPORT,), marks=ONLY_LINUX)],
)
def test_a_port_that_is_taken_is_named(endless: Path, num_frontends: str, options: tuple[int, ...]) -> None:
    """Also where another server's frontends share it among themselves."""
    with socket.socket() as taken:
        for option in options:
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name in ("port", "http-port", "metrics-port")[: 1 if options else 3]:
            said = refusal(endless / "alpha", f"--{name}", port, "--front-ends", num_frontends)
            assert f"{name.replace('-', '_')}: cannot listen on 127.0.0.1:{port}; is another process using it?" in said


NO_GPU = "this machine has no NVIDIA GPU, or no driver for it; "
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("precision", "device", "reason"),
    [
        pytest.param("fp16", "cuda", f"{NO_GPU}the installed onnxruntime", marks=NO_CUDA),
        pytest.param("fp32", "cuda:0", f"{NO_GPU}CUDA runs fp16 and bf16 bundles, and this one is fp32; export it", marks=NO_CUDA),
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
        maps, of_engine = (Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, engine))
        assert "libtorch" not in maps + of_engine
        assert "onnxruntime" in of_engine and "onnxruntime" not in maps and "grpc" in maps and "grpc" not in of_engine
    assert list(temporary.iterdir()) == [] and list(home.rglob("*")) == []


QUICK = ("--num-threads", "1")
WELL_AND_TWO = ("--ready-when", "alpha", "--front-ends", "2")


@pytest.fixture
def models(endless: Path, tmp_path: Path) -> Path:
    return shutil.copytree(endless, tmp_path / "models")


def make_unloadable(bundle: Path) -> None:
    """Have a bundle's decoder be no graph, and its manifest agree with that: only an engine can find out."""
    (bundle / "decoder.onnx").write_bytes(b"no graph at all")
    seal(bundle)


def readyz(server: Server) -> int:
    return requests.get(f"{server.metrics_address}/readyz", timeout=10).status_code


@pytest.mark.parametrize(
    ("flags", "is_ready"),
    [
        pytest.param((), True, id="by default"),
        pytest.param(("--ready-when", "all"), False, id="all"),
        pytest.param(WELL_AND_TWO, True, id="the one that is well, of two frontends", marks=ONLY_LINUX),
    ],
)
def test_a_model_that_crashes_again_and_again_takes_away_what_the_rule_says(
    models: Path, flags: tuple[str, ...], is_ready: bool
) -> None:
    with serving(models, *QUICK, *flags) as server, Client(server.address, retry=NO_RETRY) as client:
        server.wait_for_metric(1, "dragoman_model_ready", model="beta")  # no rule needs to have waited for it
        assert client.is_ready() and readyz(server) == 200
        graph = models / "beta" / "decoder.onnx"
        graph.write_bytes(bytes(graph.stat().st_size))  # frontends do not look at it
        kill(*server.engines("beta"))
        for _ in range(2):
            server.wait_for(Event.ENGINE_RESTARTS, model="beta")
        if server.num_frontends > 1:  # also one that is started meanwhile
            kill(server.frontends()[0])
            server.wait_for(Event.FRONTEND_READY, front_end=0)
            wait_until(lambda: readyz(server) == 200, "the server is ready with both frontends")
        for _ in range(10 if server.num_frontends > 1 else 1):  # a connection each, so that both are asked
            with Client(server.address, retry=NO_RETRY) as other:
                assert other.is_ready() is is_ready and readyz(server) == (200 if is_ready else 503)
                assert other.is_ready("alpha") and not other.is_ready("beta"), "each model speaks for itself, whatever the rule"
        with Client(server.address, retry=NO_RETRY) as other:
            assert other.generate("a dog runs", model="alpha", max_new_tokens=3).usage.generated_tokens == 3
            with pytest.raises(Unavailable) as caught:
                other.generate("a dog runs", model="beta", max_new_tokens=3)
        assert caught.value.retry_after_seconds
        assert server.metric("dragoman_model_ready", model="alpha") == 1
        assert server.metric("dragoman_model_ready", model="beta") == 0


def test_a_model_that_need_not_be_ready_is_tried_again_while_the_others_are_served(topology: tuple[str, ...], models: Path) -> None:
    make_unloadable(models / "beta")
    with serving(models, *QUICK, "--ready-when", "alpha", *topology) as server, Client(server.address) as client:
        for _ in range(2):
            server.wait_for(Event.ENGINE_RESTARTS, model="beta")
        assert client.is_ready() and readyz(server) == 200 and not client.is_ready("beta")
        assert client.generate("a dog runs", model="alpha", max_new_tokens=3).usage.generated_tokens == 3


@pytest.mark.parametrize("rule", ["any", "all", "beta"])
def test_a_model_that_is_needed_and_cannot_be_loaded_stops_the_start(models: Path, rule: str) -> None:
    """So a rollout stops at the first pod, and those that have the last one that could be loaded go on serving."""
    make_unloadable(models / "beta")
    result = start_in_vain(models, "--num-threads", "1", "--ready-when", rule)
    assert result.returncode == 1
    [reason] = [line for line in result.stderr.splitlines() if f'"event":"{Event.CANNOT_SERVE}"' in line]
    assert "model 'beta': the engine cannot start" in reason


def test_engines_are_as_many_as_are_measured_to_be_fastest(bundles: Path, tmp_path: Path, captions: list[str]) -> None:
    """Once: a server that starts again knows. Answers have the same bits as with other engines and threads."""
    with serving(bundles / "en-de", "--num-threads", "1") as server, Client(server.address) as client:
        expected = [client.generate(text, return_log_probs=True) for text in captions[:9]]
    for num_measured in (1, 0):
        environment = {"DRAGOMAN_REPLICAS": "0", "DRAGOMAN_WEIGHTS_CACHE": str(tmp_path)}
        with serving(bundles / "en-de", environment=environment) as server, Client(server.address) as client:
            assert len(server.logged("engines measured")) == num_measured
            (engines,) = server.logged(Event.SERVING)[0]["engines_and_threads"].values()
            num_engines, num_threads = map(int, engines.split(" x "))
            assert num_engines * num_threads <= max(len(os.sched_getaffinity(0)), 1)
            wait_until(lambda wanted=num_engines: len(server.engines()) == wanted, "all engines run")
            found = [client.generate(text, return_log_probs=True) for text in captions[:9]]
            assert [answer.answers for answer in found] == [answer.answers for answer in expected]
