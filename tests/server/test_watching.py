"""Files that change while the server runs; looks are taken one at a time."""

import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ConfigError
from dragoman.server.telemetry.families import Families
from dragoman.server.telemetry.server_metrics import ReloadMetrics
from dragoman.server.watching import Source, Watcher, fingerprint


class Watched:
    """A watched file, and the texts of it that were used."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "words"
        self.used: list[str] = []
        self.num_loads = 0
        self.registry = CollectorRegistry()
        self.watcher = Watcher(ReloadMetrics(Families(self.registry)))
        self.path.write_text("first")
        self.watcher.add(Source("words", [self.path], self.load, self.used.append))

    def load(self) -> str:
        self.num_loads += 1
        text = self.path.read_text() if self.path.exists() else "bad: missing"
        if text.startswith("bad"):
            raise ConfigError(f"{self.path}: {text}")
        if text.startswith("odd"):
            raise KeyError("secret")
        return text

    async def look(self, text: str | None = None, times: int = 1) -> list[str]:
        """Write a text and look; return the texts used so far."""
        if text is not None:
            self.path.write_text(text)
        for _ in range(times):
            await self.watcher.poll()
        return self.used

    @property
    def is_stale(self) -> bool:
        return self.registry.get_sample_value("dragoman_reload_stale", {"source": "words"}) == 1


@pytest.fixture
def watched(tmp_path: Path, logged: Any) -> Watched:
    return Watched(tmp_path)


async def test_change_is_used_when_two_looks_have_found_the_same(watched: Watched) -> None:
    """A file that is half written at one look is another at the next."""
    for _ in range(3):
        os.utime(watched.path)
        await watched.look()
    await watched.watcher.check()
    assert watched.num_loads == 0 and not watched.is_stale, "nothing has changed"
    assert await watched.look("se") == [] == await watched.look("second")
    assert await watched.look() == ["second"] == await watched.look()
    assert watched.num_loads == 1
    watched.path.write_text("third")
    await watched.watcher.check()
    assert watched.used == ["second", "third"], "an operator who asks need not wait"


@pytest.mark.parametrize("change", ["bad", "odd", None])
async def test_unusable_file_is_reported_once_and_changes_nothing(watched: Watched, logged: Any, change: str | None) -> None:
    if change is None:
        watched.path.unlink()
    assert await watched.look(change, times=5) == []
    assert watched.is_stale
    [line] = [line for line in logged() if line["level"] == "error"]
    assert (line["source"], line["event"]) == ("words", "cannot be used, what was read before stays in use")
    num_loads = watched.num_loads
    await watched.watcher.check()
    assert watched.num_loads == num_loads + 1, "it is tried again for an operator who asks"
    num_loads = watched.num_loads
    assert await watched.look("first") == [] and (watched.is_stale, watched.num_loads) == (False, num_loads), "it is in use still"
    assert await watched.look("second", times=2) == ["second"] and not watched.is_stale


def test_fingerprint_follows_links_tells_files_apart_and_waits_for_no_pipe(tmp_path: Path) -> None:
    for name, text in (("one/crt", "1"), ("two/crt", "2"), ("a", "xy"), ("b", "z"), ("c", "x"), ("d", "yz"), ("file", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "data").symlink_to("one")
    before = fingerprint([tmp_path / "data" / "crt"])
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "data")  # as Kubernetes exchanges the files of a secret
    assert fingerprint([tmp_path / "data" / "crt"]) != before
    assert fingerprint([tmp_path / "a", tmp_path / "b"]) != fingerprint([tmp_path / "c", tmp_path / "d"])
    os.mkfifo(tmp_path / "pipe")
    assert len({fingerprint([tmp_path / name]) for name in ("pipe", "one", "none", "file")}) >= 3
