"""A real server whose answers are simple, files to use and to refuse, and commands run as processes of their own."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dragoman.model.training.example import EXAMPLE
from dragoman.v1 import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120
NUM_LAYERS = 3
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


class Refused(Exception):
    """A request of a bulk ends with a status of its own."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.error = generation_pb2.Error(code=code.value[0], message=message)


class Item:
    """The context of one request of a bulk, which is refused alone and ends with the call."""

    def __init__(self, call: grpc.ServicerContext) -> None:
        self.add_callback = call.add_callback

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        raise Refused(code, message)


class Service(generation_pb2_grpc.GenerationServicer):
    """Answers for the model `loud` with the source in capitals; each answer after the first has a `!` more. Scores by length.

    Attributes:
        requests: What has come.
        refusals: Status and message that a text is refused with.
        num_answers: Answers to a text whose request does not give their number.
        stuck: Set when a call for the text `stuck` has come, which is not answered.
    """

    def __init__(self) -> None:
        self.requests = []
        self.refusals = {}
        self.num_answers = 1
        self.stuck = threading.Event()

    def _begin(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        if request.model != "loud":
            context.abort(grpc.StatusCode.NOT_FOUND, f"model: {request.model!r} is not loaded; loaded: loud")
        if request.text in self.refusals:
            context.abort(*self.refusals[request.text])
        if request.text == "stuck":
            gone = threading.Event()
            if context.add_callback(gone.set):
                self.stuck.set()
                assert gone.wait(PATIENCE_SECONDS)

    def Generate(self, request, context):
        self._begin(request, context)
        text, is_cut = request.text.upper(), request.HasField("max_new_tokens")
        reason = generation_pb2.FINISH_REASON_LENGTH if is_cut else generation_pb2.FINISH_REASON_EOS
        answers = [
            generation_pb2.Answer(text=text + "!" * i, score=-1.5 - i, finish_reason=reason)
            for i in range(request.num_return_sequences or self.num_answers)
        ]
        answer = {"text": text, "finish_reason": reason, "tokens": [7, 8]}
        return generation_pb2.GenerateResponse(**answer, answers=answers, model="loud", model_version="9")

    def GenerateBulk(self, messages, context):
        for message in messages:
            for request in message.requests:
                answer = generation_pb2.GenerateBatchResponse(request_id=request.request_id)
                try:
                    answer.response.CopyFrom(self.Generate(request, Item(context)))
                except Refused as refused:
                    answer.error.CopyFrom(refused.error)
                yield generation_pb2.GenerateBulkResponse(answers=[answer])

    def Score(self, request, context):
        """The attention of each layer is at the source's token with the layer's number; the mean is even."""
        self._begin(request, context)
        response = generation_pb2.ScoreResponse(score=-1.5, log_prob=-1.5 * (len(request.target) + 1))
        if not request.return_alignment:
            return response
        layer = request.alignment_layer if request.HasField("alignment_layer") else None
        if layer is not None and layer >= NUM_LAYERS:
            reason = f"alignment_layer: {layer} is not in 0 to {NUM_LAYERS - 1}, the decoder layers of model loud"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        source, target = (
            [*(word.encode() for word in text.replace(" ", "\0 ").split("\0")), b""] for text in (request.text, request.target)
        )
        row = [1 / len(source)] * len(source) if layer is None else [float(n == layer) for n in range(len(source))]
        response.alignment.num_target_tokens, response.alignment.num_source_tokens = len(target), len(source)
        response.alignment.source_pieces.extend(source)
        response.alignment.weights.extend(row * len(target))
        response.tokens.extend(generation_pb2.TokenLogProb(token=n, piece=piece) for n, piece in enumerate(target))
        response.model, response.model_version = "loud", "9"
        return response

    def ListModels(self, request, context):
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(name="loud", version="1", is_ready=True)])


@pytest.fixture
def service() -> Service:
    return Service()


class Server:
    """Serves a service and the health of the model `loud` on a free port, over TLS with credentials."""

    def __init__(self, service: Service, credentials: grpc.ServerCredentials | None = None, status: str = "SERVING") -> None:
        self._threads = ThreadPoolExecutor(8)
        self._server = grpc.server(self._threads)
        generation_pb2_grpc.add_GenerationServicer_to_server(service, self._server)
        healths = health.HealthServicer()
        for name in ("", "readiness", "liveness", "loud"):
            healths.set(name, health_pb2.HealthCheckResponse.ServingStatus.Value(status if name != "liveness" else "SERVING"))
        health_pb2_grpc.add_HealthServicer_to_server(healths, self._server)
        address = "127.0.0.1:0"
        add = self._server.add_insecure_port
        port = add(address) if credentials is None else self._server.add_secure_port(address, credentials)
        self._server.start()
        self.target = f"127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._threads.shutdown()


@pytest.fixture
def serve(service: Service) -> Iterator[Callable[..., Server]]:
    """Start a server; arguments as `Server`, without the service."""
    started = []

    def serve(*arguments: object) -> Server:
        started.append(Server(service, *arguments))
        return started[-1]

    yield serve
    for server in started:
        server.stop()


@pytest.fixture
def server(serve: Callable[..., Server]) -> str:
    """Address of a server without TLS."""
    return serve().target


def environment(**more: str) -> dict[str, str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    return settings | {"OMP_NUM_THREADS": "1"} | more


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a command as a process of its own, which is killed if it still runs at the end."""
    started = []

    def start(*arguments: object, stdout: object = subprocess.PIPE) -> subprocess.Popen:
        command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes))
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
    (tmp_path / "latin1").write_bytes(b"a dog\nein M\xe4dchen\n")
    return tmp_path
