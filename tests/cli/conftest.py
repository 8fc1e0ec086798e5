"""The command line run here or as a process of its own, against a real server whose answers are simple."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dragoman.cli import main as dragoman
from dragoman.v1 import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120


class Refused(Exception):
    """A request of a bulk ends with a status of its own."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.error = generation_pb2.Error(code=code.value[0], message=message)


class Item:
    """The context of one request of a bulk: it is refused alone, and leaves with the call."""

    def __init__(self, call: grpc.ServicerContext) -> None:
        self.add_callback = call.add_callback

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        raise Refused(code, message)


class Service(generation_pb2_grpc.GenerationServicer):
    """Shouts the source back, for the model `loud`; each answer after the first has a `!` more. Scores by length.

    Attributes:
        requests: What has come.
        refusals: Status and message that a text is refused with, or None.
        num_answers: Answers to a text where its request does not say.
        stuck: Set when a call for the text `stuck` has come, which stays until its caller goes.
    """

    def __init__(self) -> None:
        self.requests = []
        self.refusals = {}
        self.num_answers = 1
        self.stuck = threading.Event()

    def _begin(self, request, context) -> None:
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
        text, reason = request.text.upper(), generation_pb2.FINISH_REASON_EOS
        answers = [
            generation_pb2.Answer(text=text + "!" * i, score=-1.5 - i, finish_reason=reason)
            for i in range(request.num_return_sequences or self.num_answers)
        ]
        return generation_pb2.GenerateResponse(text=text, finish_reason=reason, answers=answers)

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
        self._begin(request, context)
        return generation_pb2.ScoreResponse(score=-1.5, log_prob=-1.5 * (len(request.target) + 1))

    def ListModels(self, request, context):
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(name="loud", version="1", is_ready=True)])


@pytest.fixture
def service() -> Service:
    return Service()


class Server:
    """Serves a service and the health of the model `loud` on a free port, over TLS if told so."""

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
    """Start a server; arguments as `Server`, less the first."""
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


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's shell says shall not change what the tests see."""
    for name in [name for name in os.environ if name.startswith("DRAGOMAN_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command here and return exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dragoman", *map(str, arguments)])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Typer puts its own there
        monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
        with pytest.raises(SystemExit) as ended:
            dragoman.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a command as a process of its own."""
    started = []

    def start(*arguments: object, stdout: object = subprocess.PIPE) -> subprocess.Popen:
        command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of files that are wrong, each in its way, and some that are right."""
    (tmp_path / "two").write_text("a dog\na cat\n")
    (tmp_path / "more").write_text("ein Hund\neine Katze\n")
    (tmp_path / "one").write_text("ein Hund\n")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin1").write_bytes(b"a dog\nein M\xe4dchen\n")
    (tmp_path / "blank").write_text("ein Hund\n\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "unknown.toml").write_text('models = "folder"\nmax_slotz = 9\n')
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text("{}")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.json").write_text("{}")
    (tmp_path / "damaged/model.safetensors").write_text("weights")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_text("weights")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/bundle.json").write_text('{"format_version": 1}')
    return tmp_path


# Runs commands one after the other, each in a fork that has loaded nothing but the command line, and tells what became of each.
ISOLATED = """
import json, os, sys

from dragoman.cli import main


class Blocker:
    def __init__(self, case):
        self.blocked, self.allowed = set(case.get("blocked", ())), case.get("allowed")

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in self.blocked or (self.allowed is not None and top not in {*self.allowed, *sys.stdlib_module_names}):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run(case, folder):
    os.chdir(case.get("folder", "."))
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.meta_path.insert(0, Blocker(case))
    sys.argv = ["dragoman", *case["arguments"]]
    try:
        main.main()
    except SystemExit as ended:
        code = ended.code or 0
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.path.join(folder, "end"), "w") as file:
        json.dump({"code": code, "modules": modules}, file)


folder, results = sys.argv[1], []
for case in json.load(sys.stdin):
    child = os.fork()
    if not child:
        try:
            run(case, folder)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    out, err = (open(os.path.join(folder, name), encoding="utf-8").read() for name in ("out", "err"))
    end = json.load(open(os.path.join(folder, "end"))) if status == 0 else {"code": f"status {status}", "modules": []}
    results.append({**end, "out": out, "err": err})
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[dict]], list[dict]]:
    """Run commands each in a process of its own.

    A case has `arguments`, and may have modules that cannot be imported (`blocked`), or the only ones beside the standard library
    that can (`allowed`), and the `folder` to run in. A result has `code`, `out`, `err` and the top-level `modules` that were
    imported at the end.
    """
    folder = tmp_path_factory.mktemp("isolated")

    def isolated(cases: list[dict]) -> list[dict]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
        ended = subprocess.run(
            [sys.executable, "-c", ISOLATED, str(folder)],
            input=json.dumps(cases),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=5 * PATIENCE_SECONDS,
        )
        return json.loads(ended.stdout)

    return isolated
