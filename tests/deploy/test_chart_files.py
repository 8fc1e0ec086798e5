"""What the chart carries: copies that must be up to date, and the program that fetches models."""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest


def generator(root: Path) -> Any:
    pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    specification = importlib.util.spec_from_file_location("generate", root / "deploy/helm/generate.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_settings_rules_dashboards_and_the_table_of_values_are_up_to_date(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generator(root).main(["--check"]) == 0, capsys.readouterr().out + "run: make chart"


def test_generator_finds_copies_that_are_stale_missing_or_too_many(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    module = generator(root)
    rules, copies = tmp_path / "rules", tmp_path / "copies"
    rules.mkdir()
    copies.mkdir()
    for path, text in ((rules / "a.yaml", "new"), (copies / "a.yaml", "old"), (rules / "b.yaml", "b"), (copies / "c.yaml", "c")):
        path.write_text(text)
    for name, original in (("SCHEMA", module.SCHEMA), ("DOCUMENT", module.DOCUMENT)):
        monkeypatch.setattr(module, name, Path(shutil.copy(original, tmp_path)))
    monkeypatch.setattr(module, "COPIES", {copies: (rules, "*.yaml", module.as_it_is)})
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.main(["--check"]) == 1
    assert sorted(path.name for path in copies.iterdir()) == ["a.yaml", "c.yaml"], "only told"
    assert module.main([]) == 0
    assert {path.name: path.read_text() for path in copies.iterdir()} == {"a.yaml": "new", "b.yaml": "b"}
    assert module.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("query", "scoped"),
    [
        ("a:b > 1", "a:b > 1"),
        ("dragoman_x == 0", 'dragoman_x{scope="release"} == 0'),
        ('sum by (job) (rate(dragoman_x{code=~"A|B"}[5m]))', 'sum by (job) (rate(dragoman_x{scope="release",code=~"A|B"}[5m]))'),
        ("dragoman:x:ratio_rate1h > 1 * 0.1", 'dragoman:x:ratio_rate1h{scope="release"} > 1 * 0.1'),
        (
            'up{job=~".*dragoman.*"} == 0 and on (job) present_over_time(dragoman_x[1h])',
            'up{scope="release"} == 0 and on (job) present_over_time(dragoman_x{scope="release"}[1h])',
        ),
        (
            'kube_horizontalpodautoscaler_a{horizontalpodautoscaler=~".*dragoman.*"}',
            'kube_horizontalpodautoscaler_a{scope="autoscaler"}',
        ),
        ("process_x offset 6h", 'process_x{scope="release"} offset 6h'),
    ],
)
def test_the_charts_rules_have_a_placeholder_in_every_selector(root: Path, query: str, scoped: str) -> None:
    assert generator(root).scoped(query) == scoped


# --- fetch.py


class Store(BaseHTTPRequestHandler):
    """Gives what it holds, to who shows the token if there is one; `/moved/...` leads to another host."""

    files: ClassVar[dict[str, bytes]] = {}
    token = ""
    tokens_seen: ClassVar[list[str | None]] = []
    cut = False
    drip_seconds = 0.0

    def do_GET(self) -> None:
        self.tokens_seen.append(self.headers["Authorization"])
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}{self.path.removeprefix('/moved')}")
            self.end_headers()
            return
        content = self.files.get(self.path.partition("?")[0])
        if content is None or (self.token and self.headers["Authorization"] != f"Bearer {self.token}"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.drip_seconds:
            with contextlib.suppress(ConnectionError):
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(self.drip_seconds)
            return
        self.wfile.write(content[: len(content) // 2] if self.cut else content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[str]:
    Store.files, Store.token, Store.tokens_seen, Store.cut, Store.drip_seconds = {}, "", [], False, 0.0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def fetch(root: Path, tmp_path: Path) -> Any:
    """Run fetch.py as the init container does; return its exit code, what it says, and the files there are then."""

    def run(*archives: tuple[str, str], token: str | None = None, seconds: float = 60) -> tuple[int, str, dict[str, bytes]]:
        wanted = {"archives": [{"url": url, "sha256": sha256} for url, sha256 in archives], "timeout_seconds": seconds}
        (tmp_path / "archives.json").write_text(json.dumps(wanted))
        folder = tmp_path / "models"
        folder.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        done = subprocess.run(
            [sys.executable, "-I", root / "deploy/helm/dragoman/files/fetch.py", tmp_path / "archives.json", folder],
            env=environment | ({"FETCH_TOKEN": token} if token else {}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return done.returncode, done.stderr, files

    return run


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_archives_are_fetched_checked_and_unpacked(store: str, fetch: Any, tmp_path: Path) -> None:
    first, second = tar({"en-de/bundle.json": b"{}", "en-de/encoder.onnx": b"e"}), tar({"en-fr/bundle.json": b"[]"}, "w")
    Store.files = {"/a.tar.gz": first, "/b.tar": second}
    (tmp_path / "models" / "left").mkdir(parents=True)
    (tmp_path / "models" / "left" / "over").write_text("from an attempt that was interrupted")
    code, _, files = fetch((f"{store}/a.tar.gz", sha(first)), (f"{store}/b.tar", sha(second).upper()))
    assert code == 0
    assert files == {"en-de/bundle.json": b"{}", "en-de/encoder.onnx": b"e", "en-fr/bundle.json": b"[]"}


def test_an_archive_with_another_checksum_is_not_opened(store: str, fetch: Any) -> None:
    content = tar({"en-de/bundle.json": b"{}"})
    Store.files = {"/a": content}
    code, said, files = fetch((f"{store}/a", "0" * 64))
    assert (code, files) == (1, {})
    assert sha(content) in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_an_archive_cannot_write_outside_of_the_folder(store: str, fetch: Any, tmp_path: Path, name: str) -> None:
    content = tar({name: b"x"})
    Store.files = {"/a": content}
    code, _, files = fetch((f"{store}/a", sha(content)))
    assert not (tmp_path / "outside").exists() and not Path("/outside").exists()
    assert code == 1 or files == {"outside": b"x"}, "refused, or kept inside"


def test_what_is_no_archive_and_what_is_not_there_is_named(store: str, fetch: Any) -> None:
    Store.files = {"/a": b"text"}
    code, said, _ = fetch((f"{store}/a", sha(b"text")))
    assert code == 1 and f"{store}/a: cannot be unpacked" in said
    code, said, _ = fetch((f"{store}/b", "0" * 64))
    assert code == 1 and f"{store}/b: " in said and "Traceback" not in said


def test_a_download_that_breaks_off_is_noticed(store: str, fetch: Any) -> None:
    content = tar({"a": os.urandom(4_000_000)}, "w")
    Store.files, Store.cut = {"/a": content}, True
    code, said, files = fetch((f"{store}/a", sha(content)))
    assert (code, files.keys() - {".incoming"}) == (1, set())
    assert "Traceback" not in said


def test_a_download_that_drips_ends_in_time(store: str, fetch: Any) -> None:
    content = tar({"a": b"x"})
    Store.files, Store.drip_seconds = {"/a": content}, 0.2
    code, said, _ = fetch((f"{store}/a", sha(content)), seconds=1)
    assert (code, said) == (1, f"fetch: {store}/a: took too long\n")


def test_the_query_of_an_address_is_not_shown(store: str, fetch: Any) -> None:
    content = tar({"a": b"x"})
    Store.files = {"/a": content}
    for path, sha256 in (("/a", sha(content)), ("/a", "0" * 64), ("/b", "0" * 64)):
        said = fetch((f"{store}{path}?X-Amz-Signature=hidden", sha256))[1]
        assert f"{store}{path}" in said and "hidden" not in said


def test_an_address_that_is_none_is_named(fetch: Any) -> None:
    code, said, _ = fetch(("http://[x", "0" * 64))
    assert code == 1 and said.startswith("fetch: http://[x: ") and said.count("\n") == 1


def test_the_token_is_shown_to_its_host_only(store: str, fetch: Any) -> None:
    content = tar({"a": b"x"})
    Store.files, Store.token = {"/a": content}, "s3cret"
    assert fetch((f"{store}/a", sha(content)))[0] == 1
    assert fetch((f"{store}/a", sha(content)), token="s3cret")[0] == 0
    Store.token, Store.tokens_seen = "", []
    assert fetch((f"{store}/moved/a", sha(content)), token="s3cret")[0] == 0
    assert Store.tokens_seen == ["Bearer s3cret", None]
