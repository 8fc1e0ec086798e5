"""The admin service of a real server: versions change as they are asked to, and callers are answered meanwhile."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dragoman.client.errors import CallError, Cancelled, ModelNotFound, Unauthenticated, Unavailable
from dragoman.client.repository import ModelStatus, RepositoryClient
from dragoman.client.sync import Client
from tests.system.harness.callers import NO_RETRY, Callers
from tests.system.harness.models import ModelFolder
from tests.system.harness.server import Event, Server, dragoman, serving
from tests.system.test_open_inference import printed, triton

pytestmark = pytest.mark.e2e

TOKENS = '[callers.anna]\ntoken = "anna-s"\n[callers.bert]\ntoken = "bert-s"\nmodels = ["other"]\n'


def make(folder: ModelFolder) -> tuple[str, str]:
    """Put down one model, `alpha`, in two versions that answer differently; return what their contents give."""
    folder.say("alpha", "[swap]\nprobation_seconds = 1\n")
    return folder.put("alpha", "1", "one"), folder.put("alpha", "2", "two")


@pytest.fixture(scope="module")
def server(topology: tuple[str, ...], folder: ModelFolder) -> Iterator[Server]:
    """A server whose operators are known; after each scenario it serves version 2."""
    flags = ("--num-threads", "1", "--admin-port", "0", "--http-admin", "true", "--models-poll-seconds", "0")
    if not folder.asked:
        make(folder)
    with serving(folder.path, *topology, *flags, operators=TOKENS) as server:
        yield server
        assert [event for event in server.events if "exception" in event] == []


@pytest.fixture
def admin(server: Server) -> Iterator[RepositoryClient]:
    with RepositoryClient(server.admin_address, token="anna-s") as admin:
        yield admin


def default(status: ModelStatus) -> str:
    return next(version.name for version in status.versions if version.is_default)


def test_versions_change_as_operators_ask_and_no_call_is_refused_meanwhile(
    server: Server, folder: ModelFolder, admin: RepositoryClient, client: Client
) -> None:
    old, new = folder.content("one"), folder.content("two")

    def answering(version: str = "") -> str:
        return client.generate("a dog runs", max_new_tokens=2, model_version=version).model_version

    with Callers(server, num=4, pause_seconds=0.02, max_new_tokens=4) as callers:
        [status], _ = admin.models()
        assert (default(status), [one.state for one in status.versions]) == ("2", ["serving", "found"])
        assert answering() == new
        assert default(admin.rollback("alpha", "1")) == "1" and answering() == old
        admin.load("alpha", "2")
        assert answering() == old and answering("2") == answering(new) == new, "it is there by its name"
        admin.set_label("alpha", "canary", "2")
        assert answering("canary") == new
        told = client.model("alpha", "canary")
        assert told.version == new
        described = [(one.name, one.version, one.labels, one.share, one.is_default) for one in told.versions]
        assert described == [("2", new, ("canary",), 0.0, False), ("1", old, (), 1.0, True)]
        for _ in range(2):
            assert default(admin.load("alpha")) == "2" and answering() == new
            assert default(admin.rollback("alpha", "1")) == "1" and answering() == old
        assert default(admin.unload("alpha", "1")) == "2" and answering() == new
        with pytest.raises(CallError, match="2 is the last that can be served") as refused:
            admin.unload("alpha", "2")
        assert refused.value.code == "FAILED_PRECONDITION" and answering() == new
        folder.put("alpha", "3", "one", lambda bundle: (bundle / "encoder.weights").write_bytes(b"no weights"))
        with pytest.raises(CallError, match=r"version 3 is refused: .*encoder\.weights") as refused:
            admin.reload("alpha")
        assert refused.value.code == "FAILED_PRECONDITION" and answering() == new
        [status], _ = admin.models()
        three = status.versions[0]
        assert (three.name, three.state, three.cause) == ("3", "refused", "bundle") and "encoder.weights" in three.reason
        assert next(one for one in status.versions if one.is_default).num_answered > 0
        callers.wait_for_more()
    assert callers.failures == [] and {answer.version for answer in callers.answers} == {old, new}
    assert not admin.unload("alpha").is_ready
    with pytest.raises(ModelNotFound):
        client.generate("a dog runs", model="alpha")
    assert client.models() == []
    folder.remove("alpha", "3")
    assert default(admin.load("alpha")) == "2" and answering() == new
    made = server.logged(Event.OPERATOR_CHANGE)
    assert {event["by"] for event in made} == {"anna"} and made[0]["change"] == "rollback"


def test_the_command_line_changes_versions_and_tokens_limit_operators(server: Server, client: Client) -> None:
    where = {"DRAGOMAN_ADMIN_SERVER": server.admin_address, "DRAGOMAN_ADMIN_TOKEN": "anna-s"}
    done = dragoman("models", "rollback", "alpha", "1", **where)
    assert (done.returncode, done.stderr) == (0, "") and "1 (default)" in done.stdout and "rolled back to 1" in done.stdout
    done = dragoman("models", "load", "alpha", "7", **where)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'dragoman: version: "7" is not there; there: 2, 1 (NOT_FOUND)\n'
    options = {"grpc.max_send_message_length": 2**23}
    with RepositoryClient(server.admin_address, token="anna-s", options=options) as admin:
        for length, code in ((60_000, "INVALID_ARGUMENT"), (4_200_000, "RESOURCE_EXHAUSTED")):
            with pytest.raises(CallError) as refused:
                admin.unload("x" * length)
            assert refused.value.code == code
    with RepositoryClient(server.admin_address, token="wrong") as stranger, pytest.raises(Unauthenticated):
        stranger.unload("alpha")
    with RepositoryClient(server.admin_address, token="bert-s") as other, pytest.raises(ModelNotFound, match="there: none"):
        other.unload("alpha")
    with RepositoryClient(server.address, token="anna-s") as admin, pytest.raises(CallError) as refused:
        admin.models()
    assert refused.value.code == "UNIMPLEMENTED", "not on the port of callers"
    assert [one.name for one in client.models()[0].versions if one.is_default] == ["1"]
    assert dragoman("models", "load", "alpha", **where).returncode == 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_operators_load_and_unload_with_tritons_clients(server: Server, client: Client, protocol: str) -> None:
    statuses = ("StatusCode.UNAUTHENTICATED", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
    statuses = statuses if protocol == "grpc" else ("401", "400", "404")
    num_before = len(server.logged(Event.OPERATOR_CHANGE))
    address = server.admin_address if protocol == "grpc" else server.http_address
    told = printed(triton(protocol, address, "operate", "anna-s", "alpha"))
    assert told["unload"][0] == told["load"][0] == "done"
    assert tuple(told[what][0] for what in ("without a token", "otherwise", "another")) == statuses
    assert "parameters: a model is loaded as it lies in its folder" in told["otherwise"][1]
    assert [event["change"] for event in server.logged(Event.OPERATOR_CHANGE)[num_before:]] == ["unload", "load"]
    assert client.generate("a dog runs", model="alpha", max_new_tokens=2).model == "alpha"


def test_a_change_goes_on_without_its_operator_and_ends_with_the_server(models: ModelFolder) -> None:
    old, _ = make(models)
    with serving(models.path, "--admin-port", "0") as server, Client(server.address, retry=NO_RETRY) as client:
        with ThreadPoolExecutor(1) as pool:
            with RepositoryClient(server.admin_address) as hasty:
                change = pool.submit(hasty.rollback, "alpha", "1")
                server.wait_for(Event.VERSION_LOADING, version="1")
            assert isinstance(change.exception(), Cancelled)
        server.wait_for(Event.OPERATOR_CHANGE, change="rollback")
        assert client.generate("a dog runs", max_new_tokens=2).model_version == old
        assert [one.name for one in client.models()[0].versions] == ["1"]
        server.wait_for(Event.VERSION_ENDED, version="2")
        with RepositoryClient(server.admin_address) as admin, ThreadPoolExecutor(3) as pool:
            verbs = ((admin.load, "alpha", "2"), (admin.unload, "alpha", "1"), (admin.load, "alpha"))
            changes = [pool.submit(*each) for each in verbs]
            server.wait_for(Event.VERSION_LOADING, version="2")
            server.process.send_signal(signal.SIGTERM)
            errors = [change.exception() for change in changes]
            assert all(isinstance(error, Unavailable) for error in errors), errors
            assert "the server is shutting down" in map(str, errors)
        assert server.wait() == 0
