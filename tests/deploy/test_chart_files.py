"""Files that the chart carries: generated copies, and the program that fetches archives of models."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.deploy.conftest import CHART, program, serving


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    assert program("helm/generate.py").main(["--check"]) == 0, capsys.readouterr().out + "run: make chart"


class Store(BaseHTTPRequestHandler):
    """Serves files, to a bearer of the token if there is one; `/moved/...` redirects to another host."""

    files: ClassVar[dict[str, bytes]] = {}
    tokens_seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.tokens_seen.append(self.headers["Authorization"])
        path = self.path.partition("?")[0]
        content = self.files.get(path.removeprefix("/cut").removeprefix("/slow").removeprefix("/private"))
        if path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}{path.removeprefix('/moved')}")
            self.end_headers()
        elif content is None or (path.startswith("/private") and self.headers["Authorization"] != "Bearer s3cret"):
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            for byte in content if path.startswith("/slow") else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(0.1)
            self.wfile.write(content[: len(content) // 2] if path.startswith("/cut") else content)

    def log_message(self, *_: object) -> None:
        pass


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


FILES = {
    "/a": tar({"en-de/bundle.json": b"{}", "en-de/encoder.onnx": b"e"}),
    "/b": tar({"en-fr/bundle.json": b"[]"}, "w"),
    "/text": b"text",
    "/up": tar({"../outside": b"x"}),
    "/large": tar({"a": bytes(4_000_000)}, "w"),
}
SHA = {path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()}


@pytest.fixture
def store() -> Iterator[str]:
    Store.files, Store.tokens_seen = FILES, []
    with serving(Store) as address:
        yield f"http://{address}"


@pytest.fixture
def fetch(tmp_path: Path, store: str) -> Any:
    """Run fetch.py as the init container does; return its exit code, its messages, and the files that it leaves."""

    def run(*archives: tuple[str, str], token: str | None = None, seconds: float = 60) -> tuple[int, str, dict[str, bytes]]:
        wanted = {"archives": [{"url": store + path, "sha256": sha256} for path, sha256 in archives], "timeout_seconds": seconds}
        (tmp_path / "archives.json").write_text(json.dumps(wanted))
        (folder := tmp_path / "models").mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        done = subprocess.run(
            [sys.executable, "-I", CHART / "files/fetch.py", tmp_path / "archives.json", folder],
            env=environment | ({"FETCH_TOKEN": token} if token else {}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return done.returncode, done.stderr, files

    return run


def test_archives_are_fetched_checked_and_unpacked(fetch: Any, tmp_path: Path) -> None:
    (tmp_path / "models" / "left").mkdir(parents=True)
    (tmp_path / "models" / "left" / "over").write_text("from an attempt that was interrupted")
    code, _, files = fetch(("/a", SHA["/a"]), ("/b", SHA["/b"].upper()))
    assert code == 0
    assert files == {"en-de/bundle.json": b"{}", "en-de/encoder.onnx": b"e", "en-fr/bundle.json": b"[]"}


@pytest.mark.parametrize(
    ("path", "sha256", "message"),
    [
        ("/a?X-Amz-Signature=hidden", "0" * 64, SHA["/a"]),
        ("/text", SHA["/text"], "/text: cannot be unpacked"),
        ("/missing?X-Amz-Signature=hidden", "0" * 64, "/missing: "),
        ("/cut/large", SHA["/large"], "/cut/large: "),
        ("[x", "0" * 64, "[x: "),
    ],
    ids=["another archive", "text", "missing", "cut short", "no address"],
)
def test_archive_that_cannot_be_used_is_named_and_nothing_is_left(fetch: Any, path: str, sha256: str, message: str) -> None:
    code, said, files = fetch((path, sha256))
    assert code == 1 and message in said and said.startswith("fetch: http://") and "Traceback" not in said
    assert "hidden" not in said and files.keys() <= {".incoming"}


def test_slow_download_ends_in_time(fetch: Any, store: str) -> None:
    assert fetch(("/slow/b", SHA["/b"]), seconds=0.5)[:2] == (1, f"fetch: {store}/slow/b: took too long\n")


def test_archive_cannot_write_outside_of_the_folder(fetch: Any, tmp_path: Path) -> None:
    fetch(("/up", SHA["/up"]))
    assert not (tmp_path / "outside").exists()


def test_token_is_shown_to_its_host_only(fetch: Any) -> None:
    assert fetch(("/private/b", SHA["/b"]))[0] == 1
    assert fetch(("/private/b", SHA["/b"]), token="s3cret")[0] == 0
    Store.tokens_seen = []
    assert fetch(("/moved/b", SHA["/b"]), token="s3cret")[0] == 0
    assert Store.tokens_seen == ["Bearer s3cret", None]
