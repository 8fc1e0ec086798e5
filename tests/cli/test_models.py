"""`dragoman models` and what is behind it: each command asks the admin service for its thing, and says in a line what it cannot."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from dragoman.v1 import repository_pb2, repository_pb2_grpc

NOBODY = "127.0.0.1:1"


class Service(repository_pb2_grpc.RepositoryServicer):
    """Notes what comes, refuses the model `bad` and has none called `nothing`."""

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
def test_each_command_asks_for_its_thing(run: Any, address: str, admin: Service, command: str, request_: Any) -> None:
    code, out, err = run("models", *command.split(), "--server", address, "--token", "s")
    assert (code, err) == (0, "") and "en-de" in out and "serving" in out
    assert (admin.requests, admin.tokens) == ([request_], ["Bearer s"])
    code, out, err = run("models", *command.split(), "--server", address, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["versions"][0]["state"] == "serving"


def test_address_and_token_may_be_variables(run: Any, address: str, admin: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_ADMIN_SERVER", address)
    monkeypatch.setenv("DRAGOMAN_ADMIN_TOKEN", "s")
    monkeypatch.setenv("DRAGOMAN_SERVER", NOBODY)
    monkeypatch.setenv("DRAGOMAN_TOKEN", "of-a-caller")
    assert run("models", "rollback", "en-de")[0] == 0
    assert admin.tokens == ["Bearer s"]


def test_what_cannot_be_done_is_a_line_and_exit_code_1(run: Any, address: str) -> None:
    told = run("models", "reload", "bad", "--server", address)
    assert told == (1, "", "dragoman: version 3 is refused: another answer (FAILED_PRECONDITION)\n")


def test_a_model_that_is_not_there_is_no_option(run: Any, address: str) -> None:
    told = run("models", "reload", "nothing", "--server", address)
    assert told == (1, "", 'dragoman: model: "nothing" is not there; there: en-de (NOT_FOUND)\n')


def test_a_folder_that_cannot_be_looked_at_is_told(run: Any, address: str, admin: Service) -> None:
    admin.problem = "models: no such folder"
    code, out, err = run("models", "list", "--server", address)
    assert code == 0 and "en-de" in out
    assert err == "dragoman: the folder of models cannot be looked at: models: no such folder\n"


def test_a_service_that_is_not_there_is_told_with_what_to_do(run: Any) -> None:
    code, out, err = run("models", "list", "--server", NOBODY)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert f"{NOBODY}: nothing answers there" in err and err.endswith("; the admin service is there if admin_port is set\n")


def test_the_servers_own_port_is_told_to_be_the_wrong_one(run: Any, server: str) -> None:
    code, out, err = run("models", "list", "--server", server)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "admin_port" in err and "UNIMPLEMENTED" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", NOBODY, "load", "en-de"], "--server: stands behind load, if that has it"),
        (["--wait", "3", "list"], "--wait: stands behind list, if that has it"),
        (["--json", "rollback", "en-de"], "--json: stands behind rollback, if that has it"),
    ],
)
def test_options_before_a_command_are_refused_for_they_would_do_nothing(run: Any, arguments: list[str], message: str) -> None:
    assert run("models", *arguments) == (2, "", f"dragoman: {message}\n")


@pytest.mark.parametrize(
    "arguments",
    [["load"], ["label", "en-de"], ["nothing"], ["load", "a", "b", "c"], ["list", "--server", "a b"], ["list", "--timeout", "0"]],
)
def test_arguments_that_cannot_be_are_told_in_a_line(run: Any, arguments: list[str]) -> None:
    code, out, err = run("models", *arguments)
    assert (code, out) == (2, "") and err.startswith("dragoman: ") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["list", "refresh", "load", "unload", "reload", "rollback", "label"])
def test_each_command_has_help(run: Any, command: str) -> None:
    short, long = run("models", command, "-h"), run("models", command, "--help")
    assert short == long and short[0] == 0 and f"Usage: dragoman models {command}" in short[1]
