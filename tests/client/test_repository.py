"""The client of the admin service: each request is sent once, and its answer is converted with every field."""

import dataclasses

import pytest

from dragoman.client import errors
from dragoman.client.repository import RepositoryClient
from dragoman.v1 import repository_pb2
from tests.client.fake_server import AdminService, FakeServer, failing, filled, plain


def test_each_request_is_sent_once_and_each_answer_converted() -> None:
    admin = AdminService()
    requested = filled(repository_pb2.Requested, labels={"a": "3", "x": ""})
    admin.model, admin.problem = filled(repository_pb2.RepositoryModel, requested=requested), "no such folder"
    admin.model.versions[1].state = 99
    with FakeServer(admin=admin) as server, RepositoryClient(server.target, token="s", timeout_seconds=60) as client:
        [status], problem = client.models("en-de")
        assert (dataclasses.asdict(status), problem) == (plain(admin.model), "no such folder")
        assert client.refresh() == ([status], problem)
        assert client.load("en-de", "3") == client.unload("en-de", "3") == client.reload("en-de") == status
        assert client.rollback("en-de", "3") == client.set_label("en-de", "canary", "3") == status
        assert admin.requests == [
            repository_pb2.ListRepositoryRequest(model="en-de"),
            repository_pb2.RefreshRepositoryRequest(),
            repository_pb2.LoadModelRequest(model="en-de", version="3"),
            repository_pb2.UnloadModelRequest(model="en-de", version="3"),
            repository_pb2.ReloadModelRequest(model="en-de"),
            repository_pb2.RollbackModelRequest(model="en-de", version="3"),
            repository_pb2.SetLabelRequest(model="en-de", label="canary", version="3"),
        ]
        assert set(admin.tokens) == {"Bearer s"}
        with pytest.raises(errors.InvalidArgument, match=r"^version: 3 is of the wrong type"):
            client.load("en-de", 3)
        for code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            admin.requests.clear()
            admin.failures["en-de"] = failing(code)
            with pytest.raises(errors.CallError, match="no") as caught:
                client.rollback("en-de")
            assert caught.value.code == code and len(admin.requests) == 1
    with pytest.raises(errors.Cancelled, match=r"^the client is closed$"):
        client.models()
