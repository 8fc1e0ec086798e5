"""The admin service of a real server: versions change as they are asked to, and whoever asks for text meanwhile gets it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import CallError, Cancelled, ModelNotFound, Unauthenticated, Unavailable
from dragoman.client.repository import ModelStatus, RepositoryClient
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client
from tests.server.repository.copies import copy

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
NO_RETRY = RetryPolicy(max_attempts=1)


@pytest.fixture
def models(endless: Path, tmp_path: Path) -> Path:
    """A folder of one model, `alpha`, in two versions that answer differently."""
    for version, bundle in (("1", "alpha"), ("2", "beta")):
        (tmp_path / "models/alpha").mkdir(parents=True, exist_ok=True)
        copy(endless / bundle, tmp_path / "models/alpha" / version, "alpha")
    (tmp_path / "models/alpha/model.toml").write_text("[swap]\nprobation_seconds = 1\n")
    return tmp_path / "models"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "operators.toml"
    path.write_text('[callers.anna]\ntoken = "anna-s"\n[callers.bert]\ntoken = "bert-s"\nmodels = ["other"]\n')
    return path


def dragoman(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dragoman", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def default(status: ModelStatus) -> str:
    return next(version.name for version in status.versions if version.is_default)


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_versions_change_as_they_are_asked_to_and_nobody_is_refused_meanwhile(
    serve: Any, models: Path, tokens: Path, front_ends: str
) -> None:
    flags = ("--admin-port", "0", "--admin-tokens-file", str(tokens), "--front-ends", front_ends)
    with serve(models, *flags) as server, ThreadPoolExecutor(8) as pool:
        is_over = threading.Event()

        def keep_asking() -> set[str]:
            with Client(server.address, retry=NO_RETRY) as client:
                seen = set()
                while not is_over.is_set():
                    seen.add(client.generate("a dog runs", max_new_tokens=4).model_version)
                return seen

        callers = [pool.submit(keep_asking) for _ in range(4)]
        try:
            with RepositoryClient(server.admin_address, token="anna-s") as admin, Client(server.address, retry=NO_RETRY) as client:

                def answering(version: str = "") -> str:
                    return client.generate("a dog runs", max_new_tokens=2, model_version=version).model_version

                [status], _ = admin.models()
                assert (default(status), [one.state for one in status.versions]) == ("2", ["serving", "found"])
                new = answering()
                status = admin.rollback("alpha", "1")
                old = answering()
                assert default(status) == "1" and old != new
                status = admin.load("alpha", "2")
                assert answering() == old and answering("2") == answering(new) == new, "it is there by its name"
                admin.set_label("alpha", "canary", "2")
                assert answering("canary") == new
                told = client.model("alpha", "canary")
                assert told.version == new
                assert [(one.name, one.version, one.labels, one.share, one.is_default) for one in told.versions] == [
                    ("2", new, ("canary",), 0.0, False),
                    ("1", old, (), 1.0, True),
                ]
                for _ in range(3):
                    assert default(admin.load("alpha")) == "2" and answering() == new
                    assert default(admin.rollback("alpha", "1")) == "1" and answering() == old
                assert default(admin.unload("alpha", "1")) == "2" and answering() == new
                with pytest.raises(CallError, match="2 is the last that can be served") as refused:
                    admin.unload("alpha", "2")
                assert refused.value.code == "FAILED_PRECONDITION" and answering() == new
                copy(models / "alpha/1", models / "alpha/3", "alpha")
                with (models / "alpha/3/encoder.weights").open("r+b") as file:
                    file.write(b"no weights")
                with pytest.raises(CallError, match=r"version 3 is refused: .*SHA-256") as refused:
                    admin.reload("alpha")
                assert refused.value.code == "FAILED_PRECONDITION" and answering() == new
                [status], _ = admin.models()
                three = status.versions[0]
                assert (three.name, three.state, three.cause) == ("3", "refused", "bundle") and "SHA-256" in three.reason
                assert next(one for one in status.versions if one.is_default).num_answered > 0
        finally:
            is_over.set()
        seen = set.union(*(caller.result() for caller in callers))
        assert seen == {old, new}, "and every call of theirs was answered"
        with RepositoryClient(server.admin_address, token="anna-s") as admin, Client(server.address, retry=NO_RETRY) as client:
            assert not admin.unload("alpha").is_ready
            with pytest.raises(ModelNotFound):
                client.generate("a dog runs", model="alpha")
            assert client.models() == []
            assert default(admin.load("alpha")) == "2"
            assert client.generate("a dog runs", model="alpha", max_new_tokens=2).model_version == new
        assert [event for event in server.events if "exception" in event] == []
        made = [event for event in server.events if event["event"] == "a change is made"]
        assert {event["by"] for event in made} == {"anna"} and made[0]["change"] == "rollback"
        assert server.terminate() == 0


def test_the_command_line_asks_for_changes_and_tokens_decide_who_may(serve: Any, models: Path, tokens: Path) -> None:
    callers = tokens.with_name("callers")
    callers.write_text("web:web-s")
    flags = ("--admin-port", "0", "--admin-tokens-file", str(tokens), "--auth-tokens-file", str(callers))
    with serve(models, *flags) as server:
        where = {"DRAGOMAN_ADMIN_SERVER": server.admin_address}
        code, out, err = dragoman("models", "rollback", "alpha", "1", **where, DRAGOMAN_ADMIN_TOKEN="anna-s")
        assert (code, err) == (0, "") and "1 (default)" in out and "rolled back to 1" in out
        code, out, err = dragoman("models", "load", "alpha", "7", **where, DRAGOMAN_ADMIN_TOKEN="anna-s")
        assert (code, out, err) == (1, "", 'dragoman: version: "7" is not there; there: 2, 1 (NOT_FOUND)\n')
        for token in ("web-s", "wrong"):
            with RepositoryClient(server.admin_address, token=token) as admin, pytest.raises(Unauthenticated):
                admin.unload("alpha")
        with RepositoryClient(server.admin_address, token="bert-s") as admin, pytest.raises(ModelNotFound, match="there: none"):
            admin.unload("alpha")
        with Client(server.address, token="anna-s") as client, pytest.raises(Unauthenticated):
            client.models()
        with RepositoryClient(server.address, token="web-s") as admin, pytest.raises(CallError) as refused:
            admin.models()
        assert refused.value.code == "UNIMPLEMENTED", "not on the port of callers"
        with Client(server.address, token="web-s") as client:
            assert client.models()[0].versions[0].name == "1"
        assert server.terminate() == 0


@pytest.mark.parametrize(
    ("protocol", "statuses"),
    [
        ("grpc", ("StatusCode.UNAUTHENTICATED", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")),
        ("http", ("401", "400", "404")),
    ],
)
def test_operators_load_and_unload_with_tritons_clients(
    serve: Any, models: Path, tokens: Path, protocol: str, statuses: tuple[str, ...]
) -> None:
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("needs tritonclient, which `make setup` installs")
    flags = ("--admin-port", "0", "--admin-tokens-file", str(tokens), "--http-admin", "true")
    with serve(models, *flags) as server, Client(server.address, retry=NO_RETRY) as client:
        address = server.admin_address if protocol == "grpc" else server.http_address.removeprefix("http://")
        caller = Path(__file__).parent / "foreign" / "triton_operator.py"
        done = subprocess.run(
            [sys.executable, str(caller), protocol, address, "anna-s", "alpha"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["unload"], told["load"]) == ("done", "done")
        assert tuple(told[what].partition(":")[0] for what in ("by nobody", "otherwise", "another")) == statuses
        assert "parameters: a model is loaded as it lies in its folder" in told["otherwise"]
        assert [event["change"] for event in server.events if event["event"] == "a change is made"] == ["unload", "load"]
        assert client.generate("a dog runs", model="alpha", max_new_tokens=2).model == "alpha"
        assert server.terminate() == 0


def test_who_does_not_wait_ends_nothing_and_the_end_of_the_server_ends_everything(serve: Any, models: Path) -> None:
    with serve(models, "--admin-port", "0") as server, Client(server.address, retry=NO_RETRY) as client:
        with ThreadPoolExecutor(1) as pool:
            with RepositoryClient(server.admin_address) as hasty:
                change = pool.submit(hasty.rollback, "alpha", "1")
                server.wait_for("loading a version", version="1")
            assert isinstance(change.exception(), Cancelled)
        server.wait_for("a change is made", change="rollback")
        old = client.generate("a dog runs", max_new_tokens=2).model_version
        assert [one.name for one in client.models()[0].versions] == ["1"]
        server.wait_for("a version has ended", version="2")
        with RepositoryClient(server.admin_address) as admin, ThreadPoolExecutor(3) as pool:
            changes = [
                pool.submit(admin.load, "alpha", "2"),
                pool.submit(admin.unload, "alpha", "1"),
                pool.submit(admin.load, "alpha"),
            ]
            server.wait_for("loading a version", version="2")
            server.process.send_signal(signal.SIGTERM)
            errors = [change.exception() for change in changes]
            assert all(isinstance(error, Unavailable) for error in errors), errors
            assert "the server is shutting down" in map(str, errors)
        assert server.wait() == 0
        assert old


def test_an_address_that_others_reach_is_refused_without_tokens(models: Path) -> None:
    code, out, err = dragoman("serve", "--models", str(models), "--admin-port", "0", "--admin-host", "0.0.0.0")
    assert (code, out) == (2, "")
    assert err == "dragoman: admin_host is 0.0.0.0, which others may reach, and admin_tokens_file is not set\n"
