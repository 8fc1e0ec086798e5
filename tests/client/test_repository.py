"""The client of the admin service and its table: each request is sent once, and all that the server reports is shown."""

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from typing import Any

import grpc
import pytest

from dragoman.client import errors
from dragoman.client.repository import ModelStatus, RepositoryClient, Requested, VersionStatus
from dragoman.client.repository_table import print_repository
from dragoman.v1 import repository_pb2, repository_pb2_grpc
from tests.client.fake_server import filled, plain

STATUS = ModelStatus(
    "en-de",
    True,
    (
        VersionStatus("3", "0123456789ab", "trial", 1000.5, "", "", ("canary", "new"), 0.125, True, 2**40, 7),
        VersionStatus("2", "", "refused", 0.0, "proof", "\x1b[2J no"),
        VersionStatus("1", state="unspecified"),
    ),
    ("labels.old: there is no version '9'",),
    Requested(False, ("1",), ("4",), "3", {"x": "", "a": "3"}),
)
MESSAGE = filled(repository_pb2.RepositoryModel, requested=filled(repository_pb2.Requested, labels={"a": "3", "x": ""}))
MESSAGE.versions[1].state = 99


class Service(repository_pb2_grpc.RepositoryServicer):
    """Records the requests and answers each with the same model."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.tokens: set[Any] = set()
        self.refusal: grpc.StatusCode | None = None

    def __getattribute__(self, name: str) -> Any:
        return self._answer if name[0].isupper() else super().__getattribute__(name)

    def _answer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.tokens.add(dict(context.invocation_metadata())["authorization"])
        if self.refusal is not None:
            context.abort(self.refusal, "no")
        if type(request).__name__ in ("ListRepositoryRequest", "RefreshRepositoryRequest"):
            return repository_pb2.ListRepositoryResponse(models=[MESSAGE], problem="no such folder")
        return MESSAGE


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def client(service: Service) -> Iterator[RepositoryClient]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        repository_pb2_grpc.add_RepositoryServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with RepositoryClient(f"127.0.0.1:{port}", token="s", timeout_seconds=60) as client:
            yield client
        with pytest.raises(errors.Cancelled, match=r"^the client is closed$"):
            client.models()
        server.stop(None).wait()


def test_each_request_is_sent_and_each_answer_converted(client: RepositoryClient, service: Service) -> None:
    assert client.models("en-de") == client.refresh()
    [status], problem = client.models("en-de")
    assert (dataclasses.asdict(status), problem) == (plain(MESSAGE), "no such folder")
    assert client.load("en-de", "3") == client.unload("en-de", "3") == client.reload("en-de") == status
    assert client.rollback("en-de", "3") == client.set_label("en-de", "canary", "3") == status
    assert service.requests == [
        repository_pb2.ListRepositoryRequest(model="en-de"),
        repository_pb2.RefreshRepositoryRequest(),
        repository_pb2.ListRepositoryRequest(model="en-de"),
        repository_pb2.LoadModelRequest(model="en-de", version="3"),
        repository_pb2.UnloadModelRequest(model="en-de", version="3"),
        repository_pb2.ReloadModelRequest(model="en-de"),
        repository_pb2.RollbackModelRequest(model="en-de", version="3"),
        repository_pb2.SetLabelRequest(model="en-de", label="canary", version="3"),
    ]
    assert service.tokens == {"Bearer s"}
    with pytest.raises(errors.InvalidArgument, match=r"^version: 3 is of the wrong type"):
        client.load("en-de", 3)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_no_request_is_tried_again(client: RepositoryClient, service: Service, code: grpc.StatusCode) -> None:
    service.refusal = code
    with pytest.raises(errors.CallError, match="no") as caught:
        client.rollback("en-de")
    assert caught.value.code == code.name and len(service.requests) == 1


def test_versions_are_rows_with_reasons_below_them() -> None:
    out = StringIO()
    print_repository([STATUS, ModelStatus("fr-en", requested=Requested(is_unloaded=True))], out, clock=lambda: 1000.5 + 3 * 3600)
    lines = out.getvalue().splitlines()
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")] == [
        ["en-de", "3 (default)", "0123456789ab", "trial", "3h ago", "canary, new", "12.5%", str(2**40), "7"],
        ["en-de", "2", "", "refused", "", "", "", "0", "0"],
        ["en-de", "1", "", "unspecified", "", "", "", "0", "0"],
        ["fr-en", "", "", "no version", "", "", "", "", ""],
    ]
    assert [line for line in lines if line.startswith(("en-de", "fr-en"))] == [
        "en-de 2: proof: \ufffd[2J no",
        "en-de: labels.old: there is no version '9'",
        "en-de: asked for by operators: rolled back to 3, load 1, unload 4, label a = 3, label x = none",
        "fr-en: asked for by operators: unloaded",
    ]
    out = StringIO()
    print_repository([STATUS, STATUS], out, is_json=True)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [json.loads(json.dumps(dataclasses.asdict(STATUS)))] * 2


def test_times_are_told_in_their_largest_unit() -> None:
    for seconds, told in ((-5, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (2 * 86400, "2d"), (2e5, "2d")):
        out = StringIO()
        print_repository([ModelStatus("m", versions=(VersionStatus("1", since=100.0),))], out, clock=lambda s=seconds: 100.0 + s)
        assert f" {told} ago " in out.getvalue()
