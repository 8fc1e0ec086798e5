"""`dragoman models` and its commands, which ask the admin service of a server."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from dragoman.v1 import repository_pb2, repository_pb2_grpc
from tests.cli.conftest import is_one_line

Run = Callable[..., tuple[int, str, str]]
UNREACHABLE = "127.0.0.1:1"


class Service(repository_pb2_grpc.RepositoryServicer):
    """Keeps what comes, refuses the model `bad` and has none called `nothing`."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.tokens: list[Any] = []
        self.problem = ""

    def __getattribute__(self, name: str) -> Any:
        if not name[0].isupper():
            return super().__getattribute__(name)

        def answer(request: Any, context: Any) -> Any:
            self.requests.append(request)
            self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
            if getattr(request, "model", "") == "nothing":
                context.abort(grpc.StatusCode.NOT_FOUND, 'model: "nothing" is not there; there: en-de')
            if getattr(request, "model", "") == "bad":
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "version 3 is refused: another answer")
            model = repository_pb2.RepositoryModel(name="en-de", versions=[repository_pb2.RepositoryVersion(name="3", state=6)])
            if name in ("ListRepository", "RefreshRepository"):
                return repository_pb2.ListRepositoryResponse(models=[model], problem=self.problem)
            return model

        return answer


@pytest.fixture
def admin() -> Service:
    return Service()


@pytest.fixture
def address(admin: Service) -> Iterator[str]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        repository_pb2_grpc.add_RepositoryServicer_to_server(admin, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("command", "request_"),
    [
        ("list", repository_pb2.ListRepositoryRequest()),
        ("list en-de", repository_pb2.ListRepositoryRequest(model="en-de")),
        ("refresh", repository_pb2.RefreshRepositoryRequest()),
        ("load en-de", repository_pb2.LoadModelRequest(model="en-de")),
        ("load en-de 3", repository_pb2.LoadModelRequest(model="en-de", version="3")),
        ("unload en-de", repository_pb2.UnloadModelRequest(model="en-de")),
        ("unload en-de 3", repository_pb2.UnloadModelRequest(model="en-de", version="3")),
        ("reload en-de", repository_pb2.ReloadModelRequest(model="en-de")),
        ("rollback en-de", repository_pb2.RollbackModelRequest(model="en-de")),
        ("rollback en-de 3", repository_pb2.RollbackModelRequest(model="en-de", version="3")),
        ("label en-de canary 3", repository_pb2.SetLabelRequest(model="en-de", label="canary", version="3")),
        ("label en-de canary", repository_pb2.SetLabelRequest(model="en-de", label="canary")),
    ],
)
def test_each_command_is_a_request(run_command: Run, address: str, admin: Service, command: str, request_: Any) -> None:
    code, out, err = run_command("models", *command.split(), "--server", address, "--token", "s")
    assert (code, err) == (0, "") and "en-de" in out and "serving" in out
    assert (admin.requests, admin.tokens) == ([request_], ["Bearer s"])
    code, out, err = run_command("models", *command.split(), "--server", address, "--json")
    assert (code, err) == (0, "") and json.loads(out)["versions"][0]["state"] == "serving"


def test_address_and_token_may_be_variables(run_command: Run, address: str, admin: Service, monkeypatch) -> None:
    for name, value in {"ADMIN_SERVER": address, "ADMIN_TOKEN": "s", "SERVER": UNREACHABLE, "TOKEN": "of-a-caller"}.items():
        monkeypatch.setenv(f"DRAGOMAN_{name}", value)
    assert run_command("models", "rollback", "en-de")[0] == 0
    assert admin.tokens == ["Bearer s"]


def test_what_cannot_be_done_is_a_line_and_exit_code_1(run_command: Run, address: str, admin: Service, server: str) -> None:
    for model, told in (
        ("bad", "version 3 is refused: another answer (FAILED_PRECONDITION)"),
        ("nothing", 'model: "nothing" is not there; there: en-de (NOT_FOUND)'),  # the model is no option
    ):
        assert run_command("models", "reload", model, "--server", address) == (1, "", f"dragoman: {told}\n")
    admin.problem = "models: no such folder"
    code, out, err = run_command("models", "list", "--server", address)
    assert code == 0 and "en-de" in out and is_one_line(err) and "models: no such folder" in err
    code, out, err = run_command("models", "list", "--server", UNREACHABLE)
    assert (code, out) == (1, "") and is_one_line(err)
    assert f"{UNREACHABLE}: nothing answers there" in err and "admin_port" in err
    code, out, err = run_command("models", "list", "--server", server)  # the port of the service itself
    assert (code, out) == (1, "") and is_one_line(err) and "admin_port" in err and "UNIMPLEMENTED" in err
