"""The real server: its own process, on free ports, with the shipped models."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.v1.generation_pb2 import FinishReason, GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.e2e.versions import ModelFolder
from tests.shelf import Shelf

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("en-de", "en-fr")


class Server:
    """A running `dragoman serve` and what it logs."""

    def __init__(self, models: Path, *flags: str, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [
                *prefix,
                sys.executable,
                "-m",
                "dragoman",
                "serve",
                "--models",
                str(models),
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                *flags,
            ],
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"DRAGOMAN_METRICS_PORT": "0"} | (environment or {}),
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self._arrivals: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            serving = self.wait_for("serving")
        except BaseException:  # nobody else knows the process
            self.process.kill()
            self.wait()
            raise
        self.address = f"127.0.0.1:{serving['port']}"
        self.http_address = f"http://127.0.0.1:{serving.get('http_port')}"
        self.metrics_address = f"http://127.0.0.1:{serving['metrics_port']}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            event = json.loads(line) if line.startswith("{") else {"event": line.rstrip()}
            self.events.append(event)
            self._arrivals.put(event)
        self._arrivals.put(None)

    def wait_for(self, name: str, timeout_seconds: float = 60, **fields: object) -> dict[str, Any]:
        """Return the next log event of that name (and with those fields)."""
        while True:
            event = self._arrivals.get(timeout=timeout_seconds)
            assert event is not None, f"the server ended before it logged {name!r}: {self.events[-5:]}"
            if event["event"] == name and fields.items() <= event.items():
                return event

    def metrics_text(self) -> str:
        """Return what the metrics port says."""
        return str(urllib.request.urlopen(f"{self.metrics_address}/metrics", timeout=10).read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value, summed over the label sets that match; 0 if it has none."""
        text = self.metrics_text()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted)
        )

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Return the exit code."""
        code = self.process.wait(timeout=60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture(scope="session")
def bundles(shipped_bundle: Callable[[str], Path], shelf: Shelf) -> Path:
    """Folder of the shipped models' bundles."""

    def link(folder: Path) -> None:
        folder.mkdir()
        for name in MODELS:
            (folder / name).symlink_to(shipped_bundle(name))

    return shelf.get("shipped", link)


@pytest.fixture(scope="session")
def endless(shelf: Shelf) -> Path:
    """Bundles of two random models, `alpha` and `beta`, that never end a sequence: how long an answer is, is the test's choice."""
    return shelf.get("endless", make_endless) / "bundles"


def make_endless(folder: Path) -> None:
    for seed, name in enumerate(("alpha", "beta")):
        export_endless(folder, name, name, seed, 256)


def export_endless(folder: Path, directory: str, name: str, seed: int, d_model: int) -> None:
    """Export a random model that never ends a sequence."""
    tokenizer = ByteLevelTokenizer.train(["a dog runs over the grass"], 280)
    torch.manual_seed(seed)
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=d_model,
        num_encoder_layers=2,
        num_decoder_layers=2,
        encoder_ffn_dim=2 * d_model,
        decoder_ffn_dim=2 * d_model,
        max_source_positions=64,
        max_target_positions=1000,
        has_output_bias=True,
    )
    model = Transformer(config).eval()
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[config.eos_id] = -60
    Checkpoint(name, model, Tokenizers.shared(tokenizer)).save(folder / "checkpoints" / directory)
    export_checkpoint(folder / "checkpoints" / directory, folder / "bundles" / directory)


@pytest.fixture(scope="session")
def version_bundles(shelf: Shelf) -> Path:
    """Bundles of small models that never end a sequence: `one`, `two` and `three` are versions of `alpha`, `other` is of `beta`."""

    def make(folder: Path) -> None:
        for seed, (directory, name) in enumerate((("one", "alpha"), ("two", "alpha"), ("three", "alpha"), ("other", "beta"))):
            export_endless(folder, directory, name, seed, 64)

    return shelf.get("versions", make) / "bundles"


@pytest.fixture
def models(tmp_path: Path, version_bundles: Path) -> ModelFolder:
    """An empty folder of models."""
    return ModelFolder(tmp_path / "models", version_bundles)


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """Start a server; it is stopped, if it still runs, when the `with` ends."""

    @contextmanager
    def start(*arguments: Any, **keywords: Any) -> Iterator[Server]:
        server = Server(*arguments, **keywords)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.wait()

    return start


@pytest.fixture(scope="session")
def shared_server(serve: Callable[..., Any], bundles: Path) -> Iterator[Server]:
    """One server for tests that only ask; it must have drained cleanly in the end."""
    with serve(bundles) as server:
        yield server
        assert server.terminate() == 0


@pytest.fixture(scope="session")
def native(shared_server: Server) -> Callable[..., Any]:
    channel = grpc.insecure_channel(shared_server.address, options=[("grpc.enable_http_proxy", 0)])
    stub = GenerationStub(channel)

    def generate(text: str, **options: Any) -> dict[str, Any]:
        """Return what the native service answers, as outputs of the Open Inference Protocol."""
        response = stub.Generate(GenerateRequest(model="en-de", text=text, **options))
        return {
            "text_output": [answer.text for answer in response.answers],
            "score": [answer.score for answer in response.answers],
            "finish_reason": [FinishReason.Name(answer.finish_reason)[14:].lower() for answer in response.answers],
            "tokens": [list(answer.tokens) for answer in response.answers],
            "num_input_tokens": [response.usage.source_tokens],
            "num_output_tokens": [response.usage.generated_tokens],
        }

    return generate


@pytest.fixture(scope="session")
def captions() -> list[str]:
    """Sentences of the kind the shipped models know, 240 of them, all different."""
    who = ["A man", "A woman", "Two men", "Three women", "A young boy", "A little girl", "A group of people", "A brown dog"]
    what = ["is walking", "is standing", "is sitting", "is playing", "is running", "is waiting"]
    where = [
        "in the snow.",
        "on a busy street.",
        "in front of an old building.",
        "near the water, next to a red car.",
        "on a bench.",
    ]
    return [f"{subject} {verb} {place}" for subject in who for verb in what for place in where]
