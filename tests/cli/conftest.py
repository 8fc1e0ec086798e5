"""A server with scripted answers, valid and invalid files, and commands run as processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.training.file import EXAMPLE
from dragoman.v1 import generation_pb2
from tests.client.fake_server import Failed, FakeServer, Service, make_status

NUM_LAYERS = 3
ROOT = Path(__file__).resolve().parents[2]
SMALL = """
[model]
d_model = 16
num_heads = 2
num_encoder_layers = 1
num_decoder_layers = 1
encoder_ffn_dim = 16
decoder_ffn_dim = 16
[training]
max_steps = 3
"""


def score_with_attention(request: Any) -> generation_pb2.ScoreResponse:
    """Return attention of each layer to the source token with the layer's number; the mean is even."""
    layer = request.alignment_layer if request.HasField("alignment_layer") else None
    if layer is not None and layer >= NUM_LAYERS:
        reason = f"alignment_layer: {layer} is not in 0 to {NUM_LAYERS - 1}, the decoder layers of model loud"
        raise Failed(make_status("INVALID_ARGUMENT", reason))
    source, target = (
        [*(word.encode() for word in text.replace(" ", "\0 ").split("\0")), b""] for text in (request.text, request.target)
    )
    row = [1 / len(source)] * len(source) if layer is None else [float(n == layer) for n in range(len(source))]
    response = generation_pb2.ScoreResponse(model="loud", model_version="9")
    response.alignment.num_target_tokens, response.alignment.num_source_tokens = len(target), len(source)
    response.alignment.source_pieces.extend(source)
    response.alignment.weights.extend(row * len(target))
    response.tokens.extend(generation_pb2.TokenLogProb(token=n, piece=piece) for n, piece in enumerate(target))
    return response


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def serve(service: Service) -> Iterator[Callable[..., str]]:
    """Start a server, ready or not, and return its address; the health service knows the model `loud`."""
    with ExitStack() as servers:

        def serve(is_ready: bool = True, **options: object) -> str:
            server = servers.enter_context(FakeServer(service, **options))
            for name in ("", "readiness", "liveness", "loud"):
                server.set_health(name, is_ready or name == "liveness")
            return server.target

        yield serve


@pytest.fixture
def server(serve: Callable[..., str]) -> str:
    """Address of a server without TLS."""
    return serve()


def environment(**more: str) -> dict[str, str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    return settings | {"OMP_NUM_THREADS": "1"} | more


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a command as a process of its own, which is killed if it still runs at the end."""
    started = []

    def start(*arguments: object, stdout: object = subprocess.PIPE, **more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment(**more), **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def is_one_line(text: str) -> bool:
    return text.startswith("dragoman: ") and text.count("\n") == 1 and text.endswith("\n")


def assert_refused(result: tuple[int, str, str], *named: str, code: int = 2, out: str = "") -> None:
    """Assert that a command ended with a code, an output and one line of error in which these texts are."""
    assert result[:2] == (code, out) and is_one_line(result[2]), result
    assert all(text in result[2] for text in named), result[2]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of texts, configurations, checkpoints and a bundle, some of them wrong."""
    texts = {"two": "a dog\na cat\n", "more": "ein Hund\neine Katze\n", "one": "ein Hund\n", "blank": "ein Hund\n\n", "empty": ""}
    texts |= {f"train.{side}": "a dog runs\nthe dog sleeps\na cat runs\n" * 9 for side in ("en", "de")}
    texts |= {f"val.{side}": "a dog\na cat\n" for side in ("en", "de")}
    texts |= {
        "config.toml": 'models = "folder"\nmax_slotz = 9\n',
        "small.toml": EXAMPLE.partition("\n[model]\n")[0] + SMALL,
        "unknown.toml": f"{EXAMPLE}max_step = 9\n",
        "lengths.toml": EXAMPLE.replace('"train.de"', '"one"'),
    }
    for name, files in {
        "folder": {},
        "checkpoint": {"config.json": "{}"},
        "damaged": {"config.json": "{}", "model.safetensors": "weights"},
        "model": {"model.safetensors": "weights"},
        "bundle": {"bundle.json": '{"format_version": 1}'},
    }.items():
        (tmp_path / name).mkdir()
        texts |= {f"{name}/{file}": text for file, text in files.items()}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "latin1").write_bytes(b"a dog\nein M\xe4dchen\n")
    return tmp_path
