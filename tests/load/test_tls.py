"""Load on a server that speaks TLS and asks for certificates: by the probe and by the sender processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from dragoman.v1 import generation_pb2, generation_pb2_grpc
from tests.load.test_session import run

PATIENCE_SECONDS = 60


class Answers(generation_pb2_grpc.GenerationServicer):
    """Answers everything at once, and counts."""

    def __init__(self) -> None:
        self.num_answers = 0
        self._lock = threading.Lock()

    def Generate(self, request, context):
        with self._lock:
            self.num_answers += 1
        return generation_pb2.GenerateResponse(request_id=request.request_id)

    def ListModels(self, request, context):
        return generation_pb2.ListModelsResponse()


@pytest.fixture
def secured(certificates: Path):
    """A server that wants to see a certificate of its authority; with it, its address."""
    answers = Answers()
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(answers, server)
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (certificates / "ca.pem").read_bytes(), require_client_auth=True)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    yield answers, address
    server.stop(None).wait()


def test_a_certificate_is_shown_to_a_server_that_asks_for_one(secured, certificates: Path) -> None:
    answers, address = secured
    files = ("--ca", certificates / "ca.pem", "--certificate", certificates / "client.pem", "--key", certificates / "client.key")
    name = ("--server-name", "server.example")
    out, _ = run("--server", address, *files, *name, "--concurrency", 2, "--requests", 20, "--processes", 2)
    assert answers.num_answers == 21  # one of them is the probe
    assert "errors: none" in out
    for address_list in (f"{address},{address}",):  # several servers
        run("--server", address_list, *files, *name, "--concurrency", 1, "--requests", 5)


@pytest.mark.parametrize("missing", ["certificate", "name", "everything"])
def test_without_them_it_ends_at_once(secured, certificates: Path, missing: str) -> None:
    answers, address = secured
    options = {
        "name": ("--server-name", "server.example"),
        "certificate": ("--certificate", certificates / "client.pem", "--key", certificates / "client.key"),
        "authority": ("--ca", certificates / "ca.pem"),
    }
    given = [] if missing == "everything" else [word for name, words in options.items() if name != missing for word in words]
    _, err = run("--server", address, *given, "--rate", 5, "--duration", 1000, code=1)
    assert address in err and "UNAVAILABLE" in err and len(err.splitlines()) == 1
    assert not answers.num_answers
