"""Real stores for tests: an S3 server, a registry, a web server with WebDAV; and bundles large enough to be interrupted."""

import base64
import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.signing import Keys
from dragoman.server.stores.address import Address
from dragoman.server.stores.cache import Cache
from dragoman.server.stores.pull import Order, pull
from tests.certificates import openssl
from tests.server.stores.proxy import Proxy, proxy_to

BIG_FILE = "notes.bin"
BIG_BYTES = 3_000_000
BUCKET = "models"
_VARIABLES = ("AWS_", "GOOGLE_", "STORAGE_EMULATOR", "DOCKER_CONFIG", "REGISTRY_AUTH", "SSL_CERT", "REQUESTS_CA", "NETRC")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the credentials of the user that runs the tests."""
    for name in list(os.environ):
        if name.upper().startswith((*_VARIABLES, "DRAGOMAN_STORE")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def make_bundle(tiny_bundle: Path) -> Callable[..., Path]:
    """Write a bundle with a file of `size` random bytes."""

    def make(directory: Path, name: str = "tiny", seed: int = 0, size: int = BIG_BYTES) -> Path:
        shutil.copytree(tiny_bundle, directory)
        content = random.Random(seed).randbytes(size)
        (directory / BIG_FILE).write_bytes(content)
        manifest = json.loads((directory / "bundle.json").read_text())
        manifest["name"] = name
        manifest["version"] = f"seed{seed}"
        manifest["files"][BIG_FILE] = {"size": size, "sha256": hashlib.sha256(content).hexdigest()}
        (directory / "bundle.json").write_text(json.dumps(manifest))
        return directory

    return make


@pytest.fixture
def bundle(make_bundle: Callable[..., Path], tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "source")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key as openssl makes it; `public.pem` lies beside it."""
    folder = tmp_path / "keys"
    folder.mkdir()
    openssl(folder, "genpkey", "-algorithm", "ed25519", "-out", "private.pem")
    openssl(folder, "pkey", "-in", "private.pem", "-pubout", "-out", "public.pem")
    return folder / "private.pem"


@pytest.fixture
def keys(key: Path) -> Keys:
    return Keys.load(key.with_name("public.pem"))


@pytest.fixture
def order(tmp_path: Path) -> Callable[..., Order]:
    """Return an order with a cache of its own; its arguments are those of `Order`."""
    return lambda **given: Order(**({"cache": Cache(tmp_path / "cache"), "silence_seconds": 20.0} | given))


def bring(address: str, folder: Path, order: Order) -> list[str]:
    """Pull what an address holds, and return the versions in the folder that it came to."""
    return [str(each.placed.directory.relative_to(folder)) for each in pull(Address.parse(address), folder, order)]


def seen(folder: Path) -> list[str]:
    """Return what a server would see in a folder; a pull that has ended leaves nothing else but a lock."""
    scratch = {path.name for path in folder.glob(".pulling/*")}
    assert scratch <= {"lock"}, scratch
    return sorted(path.name for path in folder.glob("[!.]*"))


def digest(bundle: Path) -> str:
    return hashlib.sha256((bundle / "bundle.json").read_bytes()).hexdigest()


def files(directory: Path) -> dict[str, bytes]:
    """Return the files of a bundle's folder but for the hidden ones."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


class S3:
    """An S3 server, and a client to fill it."""

    def __init__(self, port: int) -> None:
        import boto3
        from botocore.config import Config

        self.port = port
        self.put_options: dict[str, Any] = {}
        options = {"aws_access_key_id": "id", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self.client: Any = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{port}", config=Config(retries={"max_attempts": 1}), **options
        )

    def put(self, folder: Path, prefix: str) -> None:
        """Upload a folder, the manifest last."""
        for path in sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name == "bundle.json"):
            key = f"{prefix}/{path.relative_to(folder)}"
            self.client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes(), **self.put_options)

    def remove(self, prefix: str) -> None:
        for each in self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", []):
            self.client.delete_object(Bucket=BUCKET, Key=each["Key"])


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """Port of moto's S3 server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(s3_server: int, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, empty; whoever asks by the environment finds it."""
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{s3_server}/moto-api/reset", method="POST")).close()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server}",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    found = S3(s3_server)
    found.client.create_bucket(Bucket=BUCKET)
    return found


@pytest.fixture
def s3_proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before that server, which is found instead of it."""
    with proxy_to(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


@pytest.fixture
def google(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The same server as Google's, whose XML API differs in its credentials only."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{s3.port}")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3.put_options = {"ACL": "public-read"}  # emulators are asked without credentials
    return s3


class Registry(BaseHTTPRequestHandler):
    """An OCI registry in this process, which asks for a password if it has one; see `run_registry`."""

    blobs: dict[str, bytes]
    password: str
    port: int

    @classmethod
    def push(cls, folder: Path, name: str) -> str:
        """Push a folder file by file, and return the digest of its manifest."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        titles = [{"org.opencontainers.image.title": str(path.relative_to(folder))} for path in files]
        layers = [{"digest": cls.add(path.read_bytes()), "annotations": title} for path, title in zip(files, titles, strict=True)]
        digest = cls.add(json.dumps({"schemaVersion": 2, "layers": layers}).encode())
        cls.blobs[name.rpartition(":")[2]] = cls.blobs[digest]
        return digest

    @classmethod
    def add(cls, content: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        cls.blobs[digest] = content
        return digest

    def do_GET(self) -> None:
        shown = f"Basic {base64.b64encode(f'reader:{self.password}'.encode()).decode()}"
        content, kind = b"", self.path.strip("/").split("/")[-2:]
        headers = {}
        if self.password and self.headers["Authorization"] != shown:
            status, headers = 401, {"WWW-Authenticate": 'Basic realm="models"'}
        elif self.path == "/v2/":
            status = 200
        elif kind[0] in ("blobs", "manifests") and kind[1] in self.blobs:
            status, content = 200, self.blobs[kind[1]]
            if (part := self.headers["Range"]) is not None:
                start = int(part.removeprefix("bytes=").removesuffix("-"))
                status = 206 if start < len(content) else 416
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                content = content[start:]
        else:
            status = 404
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Run an HTTP server on a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def run_registry(password: str = "") -> Iterator[type[Registry]]:
    handler = type("RunningRegistry", (Registry,), {"blobs": {}, "password": password})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        handler.port = server.server_port  # type: ignore[attr-defined]
        yield handler  # type: ignore[misc]


@pytest.fixture
def registry() -> Iterator[type[Registry]]:
    with run_registry() as found:
        yield found


@contextlib.contextmanager
def run_web(folder: Path, certificates: Path | None = None, users: dict[str, str] | None = None) -> Iterator[int]:
    """Serve a folder with WebDAV, and lend the port; over TLS if certificates are given, for users if there are any."""
    from cheroot.ssl.builtin import BuiltinSSLAdapter
    from cheroot.wsgi import Server
    from wsgidav.wsgidav_app import WsgiDAVApp

    accounts: Any = {name: {"password": password} for name, password in (users or {}).items()} or True
    app = WsgiDAVApp(
        {
            "provider_mapping": {"/": str(folder)},
            "simple_dc": {"user_mapping": {"*": accounts}},
            "http_authenticator": {"accept_digest": False, "default_to_digest": False},
            "verbose": 0,
            "logging": {"enable": False},
        }
    )
    server = Server(("127.0.0.1", 0), app, numthreads=4)
    server.shutdown_timeout = 0
    if certificates is not None:
        server.ssl_adapter = BuiltinSSLAdapter(str(certificates / "server.pem"), str(certificates / "server.key"))
    server.prepare()
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield int(server.bind_addr[1])
    finally:
        server.stop()
        thread.join()


@pytest.fixture
def web_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "web"
    folder.mkdir()
    return folder


@pytest.fixture
def web(web_folder: Path) -> Iterator[int]:
    """Port of a web server with WebDAV that gives `web_folder`."""
    with run_web(web_folder) as port:
        yield port
