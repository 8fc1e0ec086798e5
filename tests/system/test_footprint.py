"""What a running server leaves behind: nothing outside of its temporary folder, so that the rest may be read-only."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.client.sync import Client

pytestmark = pytest.mark.e2e


def test_a_server_writes_nothing_but_its_sockets(serve: Any, endless: Path, tmp_path: Path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    # What would keep ONNX Runtime quiet under test must not be what keeps it quiet here.
    environment = {"HOME": str(home), "XDG_CACHE_HOME": "", "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "CI": ""}
    with serve(endless / "alpha", environment=environment) as server, Client(server.address) as client:
        assert client.generate("a dog runs", max_new_tokens=5).finish_reason == "length"
        (folder,) = temporary.iterdir()
        assert [path.name for path in folder.iterdir()] == ["engine"] and (folder / "engine").is_socket()
        assert list(home.rglob("*")) == []
        assert server.terminate() == 0
    assert list(temporary.iterdir()) == [] and list(home.rglob("*")) == []
