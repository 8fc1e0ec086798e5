"""Fixtures of system scenarios: real server processes, shipped models, and small models that never end a sequence."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.client.sync import Client
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.shelf import Shelf
from tests.system.harness.callers import NO_RETRY, connection
from tests.system.harness.models import ModelFolder, make_endless, make_quick, make_short, make_slow, make_versions
from tests.system.harness.server import Server, serving

MODELS = ("en-de", "en-fr")
ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides a port's connections")
ONE_ENGINE = pytest.param(("--replicas", "1"), id="one engine")
TWO_ENGINES = pytest.param(("--replicas", "2"), id="two engines")
TWO_OF_EACH = pytest.param(("--front-ends", "2", "--replicas", "2"), id="two of each", marks=ONLY_LINUX)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if is_coroutine := inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}))
    return is_coroutine or None


@pytest.fixture(scope="session", params=[ONE_ENGINE, TWO_OF_EACH])
def topology(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Flags of a server by its processes; promises hold for each."""
    return tuple(request.param)


@pytest.fixture(scope="session")
def bundles(shipped_bundle: Callable[[str], Path], shelf: Shelf) -> Path:
    def link(folder: Path) -> None:
        folder.mkdir()
        for name in MODELS:
            (folder / name).symlink_to(shipped_bundle(name))

    return shelf.get("shipped", link)


@pytest.fixture(scope="session")
def endless(shelf: Shelf) -> Path:
    """Bundles of two random models, `alpha` and `beta`, that never end a sequence: how long an answer is, is the test's choice."""
    return shelf.get("endless", make_endless) / "bundles"


@pytest.fixture(scope="session")
def short(shelf: Shelf) -> Path:
    """Bundle of a random model, `alpha`, that never ends an answer, none of which is longer than 64 tokens."""
    return shelf.get("short", make_short) / "bundles" / "alpha"


@pytest.fixture(scope="session")
def translators(shelf: Shelf) -> Path:
    """Bundles of two random models with languages, `alpha` (en to de) and `beta` (en to fr), of six tokens by default."""
    return shelf.get("translators", make_quick) / "bundles"


@pytest.fixture(scope="session")
def slow(shelf: Shelf) -> Path:
    """A bundle of a random model with languages, `alpha` (en to de), whose answers have 900 tokens and take their time."""
    return shelf.get("slow", make_slow) / "bundles"


@pytest.fixture(scope="session")
def version_bundles(shelf: Shelf) -> Path:
    """Bundles of small models that never end a sequence: `one`, `two` and `three` are versions of `alpha`, `other` is of `beta`."""
    return shelf.get("versions", make_versions) / "bundles"


@pytest.fixture
def models(tmp_path: Path, version_bundles: Path) -> ModelFolder:
    return ModelFolder(tmp_path / "models", version_bundles)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, version_bundles: Path) -> ModelFolder:
    """The folder that the servers of a module watch, one after the other; each scenario has a model of its own in it."""
    return ModelFolder(tmp_path_factory.mktemp("watched") / "models", version_bundles)


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    return serving


@pytest.fixture(scope="session")
def shared_server(bundles: Path) -> Iterator[Server]:
    """One server of the shipped translators for tests that only ask; it must have drained cleanly in the end."""
    with serving(bundles) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The server of the module; modules have their own fixture of this name where the shared one does not do."""
    return shared_server


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with connection(server) as opened:
        yield opened


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address, retry=NO_RETRY) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.Channel) -> GenerationStub:
    return GenerationStub(channel)


@pytest.fixture(scope="session")
def captions() -> list[str]:
    who = ["A man", "A woman", "Two men", "Three women", "A young boy", "A little girl", "A group of people", "A brown dog"]
    verbs = ["walking", "standing", "sitting", "playing", "running", "waiting"]
    places = ["in the snow", "on a busy street", "in front of an old building", "near the water, next to a red car", "on a bench"]
    return [f"{subject} is {verb} {place}." for subject in who for verb in verbs for place in places]
