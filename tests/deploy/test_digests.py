"""The program that renews the digests of images, against a registry that is not one, and the files that name them."""

import hashlib
import importlib.util
import json
import re
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest


class Registry(BaseHTTPRequestHandler):
    """Gives manifests to who shows the token that it gives to anybody who asks for it."""

    manifests: ClassVar[dict[str, bytes]] = {}
    called: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/token":
            asked = urllib.parse.parse_qs(query)
            self._answer(json.dumps({"token": f"{asked['service'][0]} {asked['scope'][0]}"}).encode())
        elif self.headers["Authorization"] != "Bearer here repository:library/python:pull":
            self.send_response(401)
            realm = f"http://127.0.0.1:{self.server.server_address[1]}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="here",scope="repository:library/python:pull"')
            self.end_headers()
        elif path not in self.manifests or "oci.image.index" not in self.headers["Accept"]:
            self.send_error(404)
        else:
            self._answer(self.manifests[path], self.called.get(path, ""))

    def _answer(self, content: bytes, digest: str = "") -> None:
        self.send_response(200)
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    """A registry's address; it holds one image, whose manifest is `MANIFEST`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    Registry.manifests, Registry.called = {"/v2/library/python/manifests/3.11": MANIFEST}, {}
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


MANIFEST = b'{"schemaVersion": 2, "manifests": []}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
OLD = f"sha256:{'0' * 64}"


@pytest.fixture
def digests(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, on copies of its files."""
    specification = importlib.util.spec_from_file_location("digests", root / "deploy/docker/digests.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for name in (*module.USERS, "images.txt"):
        shutil.copy(root / "deploy/docker" / name, tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "LIST", tmp_path / "images.txt")
    return module


def test_every_file_names_the_images_of_the_list_by_their_digests(digests: Any) -> None:
    assert digests.main(["--check"]) == 0
    listed = {found[0] for found in digests.IMAGE.finditer(digests.LIST.read_text())}
    assert listed and all("@sha256:" in image for image in listed)
    line = re.compile(r"^(?:ARG PYTHON_IMAGE=| *image: )(\S+/\S+)$", re.MULTILINE)
    named = {image for name in digests.USERS for image in line.findall((digests.FOLDER / name).read_text())}
    assert named == listed, "no file names another image, and none is listed for nothing"


def test_a_file_that_names_another_image_is_told(digests: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = digests.FOLDER / "cpu.Dockerfile"
    path.write_text(path.read_text().replace("3.11.13-", "3.11.12-"))
    assert digests.main(["--check"]) == 1
    assert "cpu.Dockerfile names an image otherwise" in capsys.readouterr().err


def test_digests_are_asked_for_and_written_wherever_the_image_is_named(digests: Any, registry: str) -> None:
    digests.LIST.write_text(f"# {registry}/library/python:3.11 is not this line\n{registry}/library/python:3.11@{OLD}\n")
    users = dict.fromkeys(digests.USERS, f"FROM {registry}/library/python:3.10 AS a\nFROM {registry}/library/python:3.11@{OLD}\n")
    for name, text in users.items():
        (digests.FOLDER / name).write_text(text)
    assert digests.main([]) == 0
    image = f"{registry}/library/python:3.11@{DIGEST}"
    assert digests.LIST.read_text() == f"# {registry}/library/python:3.11 is not this line\n{image}\n"
    assert {(digests.FOLDER / name).read_text() for name in users} == {f"FROM {image} AS a\nFROM {image}\n"}
    assert digests.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("tag", "called", "reason"),
    [("3.11", OLD, "the registry calls it"), ("3.12", "", "404")],
    ids=["what it gives is not what it says", "there is no such tag"],
)
def test_what_a_registry_does_not_say_well_changes_nothing(
    digests: Any, registry: str, capsys: pytest.CaptureFixture[str], tag: str, called: str, reason: str
) -> None:
    Registry.called = {"/v2/library/python/manifests/3.11": called}
    digests.LIST.write_text(f"{registry}/library/python:{tag}@{OLD}\n")
    before = (digests.FOLDER / "cpu.Dockerfile").read_text()
    assert digests.main([]) == 1
    assert reason in capsys.readouterr().err
    assert digests.LIST.read_text() == f"{registry}/library/python:{tag}@{OLD}\n"
    assert (digests.FOLDER / "cpu.Dockerfile").read_text() == before
