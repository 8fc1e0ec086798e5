"""The source of a server's models: a folder, or a store that its folder follows."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.client.sync import Client
from dragoman.export.bundle import BundleError
from dragoman.export.signing import Keys
from dragoman.model.errors import InputError
from dragoman.server.config import ServerConfig
from dragoman.server.models.source import ModelSource, default_folder
from tests.server.models.copies import copy
from tests.server.stores.conftest import S3
from tests.system.conftest import serve as serve
from tests.system.harness.server import wait_until

Make = Callable[..., Path]
ADDRESS = "s3://models/all"


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models of a store are kept below the caches of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def source(keys: Keys | None = None, **settings: object) -> ModelSource:
    return ModelSource(ServerConfig(models=ADDRESS, **settings), keys)  # type: ignore[arg-type]


def versions(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("[!.]*/*/bundle.json"))


@pytest.fixture
def put(s3: S3, make_bundle: Make, tmp_path: Path) -> Callable[[str], None]:
    """Put a version of `en-de` into the store."""

    def put_version(version: str) -> None:
        s3.put(make_bundle(tmp_path / f"source-{version}", "en-de", int(version), 1000), f"all/en-de/{version}")

    return put_version


@pytest.mark.parametrize(
    ("model_file", "own_file", "expected"),
    [
        (b"", "", ["10", "9"]),  # the newest, and one to spare
        (b'[labels]\nstable = "1"\n', "", ["1", "10", "9"]),
        (b'[labels]\nstable = "2"\n', '[labels]\nstable = "1"\n', ["1", "10", "9"]),
        (b"[labels\n", "", ["10", "9"]),
    ],
)
def test_versions_that_the_model_file_asks_for_are_fetched(
    put: Callable[[str], None], s3: S3, tmp_path: Path, model_file: bytes, own_file: str, expected: list[str]
) -> None:
    for version in ("1", "2", "9", "10"):
        put(version)
    if model_file:
        s3.client.put_object(Bucket="models", Key="all/en-de/model.toml", Body=model_file)
    (tmp_path / "files").mkdir()
    if own_file:
        (tmp_path / "files/en-de.toml").write_text(own_file)
    followed = source(model_files=tmp_path / "files")
    followed.fetch()
    assert versions(followed.folder) == expected
    if model_file == b"[labels\n":
        put("11")
        followed.fetch()
        assert versions(followed.folder) == expected, "while the file cannot be used, none comes and none goes"


def test_fetched_versions_suffice_while_the_store_is_away(
    put: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: Keys
) -> None:
    with pytest.raises(BundleError, match="s3://models/all: holds no bundle"):
        source().fetch()
    put("1")
    with monkeypatch.context() as other, pytest.raises(BundleError, match="is not signed"):
        other.setenv("XDG_CACHE_HOME", str(tmp_path / "signed"))
        source(keys).fetch()
    source().fetch()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    source().fetch()
    assert versions(default_folder(ADDRESS)) == ["1"]


def test_folder_is_used_as_it_is_and_each_address_has_one_of_its_own(tmp_path: Path) -> None:
    plain = ModelSource(ServerConfig(models=str(tmp_path)), None)  # type: ignore[arg-type]
    plain.fetch()
    assert plain.folder == tmp_path and not plain.is_followed
    one, other = default_folder("s3://models/a"), default_folder("s3://models/b")
    assert one != other and one.is_relative_to(tmp_path) and one == default_folder("s3://models/a")
    for address in ("ftp://models", "s3://"):
        with pytest.raises(InputError, match=r"ftp://: not a scheme|lacks a bucket"):
            ModelSource(ServerConfig(models=address), None)


@pytest.mark.e2e
def test_server_follows_a_store(serve: Callable[..., object], s3: S3, tiny_bundle: Path, tmp_path: Path) -> None:
    s3.put(copy(tiny_bundle, tmp_path / "one", "en-de"), "all/en-de/1")
    with serve(ADDRESS, "--models-poll-seconds", "0") as server, Client(server.address) as client:  # type: ignore[attr-defined]
        assert client.generate("a dog runs", model="en-de", max_new_tokens=3).usage.generated_tokens
        s3.put(copy(tiny_bundle, tmp_path / "two", "fr-de"), "all/fr-de/1")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(client.models()) == 2, "a model that came into the store is served")
        assert client.generate("a dog runs", model="fr-de", max_new_tokens=3).usage.generated_tokens
        s3.remove("all/fr-de/")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: [model.name for model in client.models()] == ["en-de"], "one that is gone from it is not")
        assert server.terminate() == 0
