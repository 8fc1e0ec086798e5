"""Load on a server that speaks TLS and asks for certificates: by the probe and by the sender processes."""

import subprocess
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


@pytest.fixture(scope="module")
def pem_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates for `server.example` and a client, with their keys."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        try:
            subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not installed")

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Test CA", "-days", "2")
    for name in ("server", "client"):
        (folder / "names").write_text(f"subjectAltName=DNS:{name}.example\n")
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}.example")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


@pytest.fixture
def secured(pem_files: Path):
    """A server that wants to see a certificate of its authority; with it, its address."""
    answers = Answers()
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(answers, server)
    pair = ((pem_files / "server.key").read_bytes(), (pem_files / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (pem_files / "ca.pem").read_bytes(), require_client_auth=True)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    yield answers, address
    server.stop(None).wait()


def test_a_certificate_is_shown_to_a_server_that_asks_for_one(secured, pem_files: Path) -> None:
    answers, address = secured
    files = ("--ca", pem_files / "ca.pem", "--certificate", pem_files / "client.pem", "--key", pem_files / "client.key")
    name = ("--server-name", "server.example")
    out, _ = run("--server", address, *files, *name, "--concurrency", 2, "--requests", 20, "--processes", 2)
    assert answers.num_answers == 21  # one of them is the probe
    assert "errors: none" in out
    for address_list in (f"{address},{address}",):  # several servers
        run("--server", address_list, *files, *name, "--concurrency", 1, "--requests", 5)


@pytest.mark.parametrize("missing", ["certificate", "name", "everything"])
def test_without_them_it_ends_at_once(secured, pem_files: Path, missing: str) -> None:
    answers, address = secured
    options = {
        "name": ("--server-name", "server.example"),
        "certificate": ("--certificate", pem_files / "client.pem", "--key", pem_files / "client.key"),
        "authority": ("--ca", pem_files / "ca.pem"),
    }
    given = [] if missing == "everything" else [word for name, words in options.items() if name != missing for word in words]
    _, err = run("--server", address, *given, "--rate", 5, "--duration", 1000, code=1)
    assert address in err and "UNAVAILABLE" in err and len(err.splitlines()) == 1
    assert not answers.num_answers
