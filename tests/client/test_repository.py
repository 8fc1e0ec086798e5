"""The client of the admin service: what is asked arrives, what is told is told, and nothing is tried twice."""

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

MESSAGE = repository_pb2.RepositoryModel(
    name="en-de",
    is_ready=True,
    versions=[
        repository_pb2.RepositoryVersion(
            name="3",
            version="0123456789ab",
            state=repository_pb2.VERSION_STATE_TRIAL,
            since=1000.5,
            labels=["canary", "new"],
            share=0.125,
            is_default=True,
            num_answered=2**40,
            num_failed=7,
        ),
        repository_pb2.RepositoryVersion(name="2", state=repository_pb2.VERSION_STATE_REFUSED, cause="proof", reason="\x1b[2J no"),
        repository_pb2.RepositoryVersion(name="1", state=99),  # type: ignore[arg-type]
    ],
    problems=["labels.old: there is no version '9'"],
    requested=repository_pb2.Requested(loaded=["1"], unloaded=["4"], pinned="3", labels={"x": "", "a": "3"}),
)
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


class Service(repository_pb2_grpc.RepositoryServicer):
    """Notes what comes, and answers with the same model."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    def __getattribute__(self, name: str) -> Any:
        if not name[0].isupper():
            return super().__getattribute__(name)

        def answer(request: Any, context: Any) -> Any:
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            if self.refusal is not None:
                context.abort(*self.refusal)
            if name in ("ListRepository", "RefreshRepository"):
                return repository_pb2.ListRepositoryResponse(models=[MESSAGE], problem="no such folder")
            return MESSAGE

        return answer


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
        server.stop(None).wait()


def test_everything_that_is_asked_arrives_and_all_that_is_told_is_told(client: RepositoryClient, service: Service) -> None:
    assert client.models("en-de") == client.refresh() == ([STATUS], "no such folder")
    assert client.load("en-de", "3") == client.unload("en-de", "3") == client.reload("en-de") == STATUS
    assert client.rollback("en-de", "3") == client.set_label("en-de", "canary", "3") == STATUS
    assert service.requests == [
        repository_pb2.ListRepositoryRequest(model="en-de"),
        repository_pb2.RefreshRepositoryRequest(),
        repository_pb2.LoadModelRequest(model="en-de", version="3"),
        repository_pb2.UnloadModelRequest(model="en-de", version="3"),
        repository_pb2.ReloadModelRequest(model="en-de"),
        repository_pb2.RollbackModelRequest(model="en-de", version="3"),
        repository_pb2.SetLabelRequest(model="en-de", label="canary", version="3"),
    ]
    assert {one["authorization"] for one in service.metadata} == {"Bearer s"}


def test_what_is_told_is_all_that_the_contract_has() -> None:
    messages = repository_pb2.RepositoryModel, repository_pb2.RepositoryVersion, repository_pb2.Requested
    for kind, message in zip((ModelStatus, VersionStatus, Requested), messages, strict=True):
        assert {field.name for field in dataclasses.fields(kind)} == {field.name for field in message.DESCRIPTOR.fields}
    assert {method.name for method in repository_pb2.DESCRIPTOR.services_by_name["Repository"].methods} == {
        *("ListRepository", "RefreshRepository", "LoadModel", "UnloadModel", "ReloadModel", "RollbackModel", "SetLabel")
    }


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION]
)
def test_nothing_is_tried_twice(client: RepositoryClient, service: Service, code: grpc.StatusCode) -> None:
    service.refusal = code, "no"
    with pytest.raises(errors.CallError, match="no") as caught:
        client.rollback("en-de")
    assert caught.value.code == code.name and len(service.requests) == 1


def test_a_name_that_is_no_text_is_named(client: RepositoryClient, service: Service) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"^version: 3 is of the wrong type"):
        client.load("en-de", 3)  # type: ignore[arg-type]
    assert service.requests == []


def test_versions_are_rows_and_reasons_are_told_below() -> None:
    out = StringIO()
    print_repository([STATUS, ModelStatus("fr-en", requested=Requested(is_unloaded=True))], out, clock=lambda: 1000.5 + 3 * 3600)
    lines = out.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert rows == [
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


@pytest.mark.parametrize(
    ("seconds", "told"), [(-5, "0s ago"), (119, "119s ago"), (120, "2m ago"), (7199, "119m ago"), (2e5, "2d ago")]
)
def test_times_are_told_in_their_largest_unit(seconds: float, told: str) -> None:
    out = StringIO()
    print_repository([ModelStatus("m", versions=(VersionStatus("1", since=100.0),))], out, clock=lambda: 100.0 + seconds)
    assert f" {told} " in out.getvalue()


def test_programs_get_all_of_it() -> None:
    out = StringIO()
    print_repository([STATUS, STATUS], out, is_json=True)
    [first, second] = map(json.loads, out.getvalue().splitlines())
    assert first == second == json.loads(json.dumps(dataclasses.asdict(STATUS)))
