"""Files that change while the server runs. No test waits: looks are taken one at a time."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ConfigError
from dragoman.server.telemetry.reload_metrics import ReloadMetrics
from dragoman.server.watching import Source, Watcher, fingerprint


class Watched:
    """A file, what watches it, and what has been put to use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: list[str] = []
        self.num_loads = 0
        self.registry = CollectorRegistry()
        self.watcher = Watcher(ReloadMetrics(self.registry))
        path.write_text("first")
        self.watcher.add(Source("words", [path], self.load, self.used.append))

    def load(self) -> str:
        self.num_loads += 1
        text = self.path.read_text() if self.path.exists() else "bad: missing"
        if text.startswith("bad"):
            raise ConfigError(f"{self.path}: {text}")
        if text.startswith("odd"):
            raise KeyError("secret")
        return text

    def count(self, result: str) -> float | None:
        return self.registry.get_sample_value("dragoman_reloads_total", {"source": "words", "result": result})

    @property
    def is_stale(self) -> bool:
        return self.registry.get_sample_value("dragoman_reload_stale", {"source": "words"}) == 1


def run(test: Callable[[Watched], Awaitable[None]], folder: Path) -> None:
    async def running() -> None:
        await test(Watched(folder / "words"))

    asyncio.run(running())


def test_a_change_is_used_when_two_looks_have_found_the_same(tmp_path: Path, logged: Any) -> None:
    """What is half written at one look is not what is there at the next."""

    async def test(watched: Watched) -> None:
        for text in ("se", "second"):
            watched.path.write_text(text)
            await watched.watcher.look()
        assert watched.used == []
        await watched.watcher.look()
        assert watched.used == ["second"]
        await watched.watcher.look()
        assert (watched.used, watched.num_loads, watched.count("used")) == (["second"], 1, 1)

    run(test, tmp_path)


def test_a_look_that_fails_is_not_the_last_one(tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def running() -> None:
        watcher = Watcher(ReloadMetrics(CollectorRegistry()), poll_seconds=0)
        num_looks, is_seen = 0, asyncio.Event()

        async def look() -> None:
            nonlocal num_looks
            num_looks += 1
            if num_looks == 1:
                raise RuntimeError("can't start new thread")
            is_seen.set()

        monkeypatch.setattr(watcher, "look", look)
        task = asyncio.create_task(watcher.run())
        await asyncio.wait([task, asyncio.create_task(is_seen.wait())], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert is_seen.is_set()
        task.cancel()

    asyncio.run(running())
    assert [line["event"] for line in logged()] == ["cannot look whether files have changed"]


def test_nothing_is_read_where_nothing_changes(tmp_path: Path, logged: Any) -> None:
    async def test(watched: Watched) -> None:
        for _ in range(3):
            os.utime(watched.path)
            await watched.watcher.look()
        await watched.watcher.check()
        assert (watched.num_loads, watched.count("used"), watched.count("failed")) == (0, 0, 0)

    run(test, tmp_path)


@pytest.mark.parametrize("change", ["bad", "odd", None])
def test_what_cannot_be_used_is_told_once_and_changes_nothing(tmp_path: Path, logged: Any, change: str | None) -> None:
    async def test(watched: Watched) -> None:
        if change is None:
            watched.path.unlink()
        else:
            watched.path.write_text(change)
        for _ in range(5):
            await watched.watcher.look()
        assert (watched.used, watched.count("failed"), watched.is_stale) == ([], 1, True)
        [line] = [line for line in logged() if line["level"] == "error"]
        assert (line["source"], line["event"]) == ("words", "cannot be used, what was read before stays in use")
        watched.path.write_text("second")
        for _ in range(2):
            await watched.watcher.look()
        assert (watched.used, watched.is_stale) == (["second"], False)

    run(test, tmp_path)


def test_what_was_there_before_the_damage_is_in_use_still(tmp_path: Path, logged: Any) -> None:
    async def test(watched: Watched) -> None:
        watched.path.write_text("bad")
        await watched.watcher.check()
        assert watched.is_stale
        watched.path.write_text("first")
        await watched.watcher.look()
        assert (watched.used, watched.is_stale, watched.num_loads) == ([], False, 1)

    run(test, tmp_path)


def test_who_asks_is_not_made_to_wait_and_damage_is_tried_again(tmp_path: Path, logged: Any) -> None:
    async def test(watched: Watched) -> None:
        watched.path.write_text("second")
        await watched.watcher.check()
        assert watched.used == ["second"]
        watched.path.write_text("bad")
        await watched.watcher.check()
        await watched.watcher.check()
        assert watched.count("failed") == 2

    run(test, tmp_path)


def test_a_link_that_is_swapped_above_the_files_is_a_change(tmp_path: Path) -> None:
    """It is how Kubernetes changes the files of a secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_text(name)
        os.utime(tmp_path / name / "tls.crt", (1, 1))
    (tmp_path / "data").symlink_to("one")
    before = fingerprint([tmp_path / "data" / "tls.crt"])
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "data")
    assert fingerprint([tmp_path / "data" / "tls.crt"]) != before


def test_what_is_no_file_has_a_fingerprint_too(tmp_path: Path) -> None:
    """A pipe with nobody at its other end used to be waited for, for ever, wherever files were just opened."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    found = {fingerprint([tmp_path / name]) for name in ("pipe", "folder", "none", "file")}
    assert len(found) >= 3


def test_a_certificates_days_are_counted_when_somebody_asks() -> None:
    registry, now = CollectorRegistry(), [1_000_000.0]
    metrics = ReloadMetrics(registry, lambda: now[0])
    metrics.set_expiry("server", 1_000_000.0 + 86_400)
    name, labels = "dragoman_tls_certificate_days_left", {"certificate": "server"}
    assert registry.get_sample_value(name, labels) == 1
    now[0] += 3 * 86_400
    assert registry.get_sample_value(name, labels) == -2
    metrics.set_expiry("server", 1_000_000.0 + 13 * 86_400)
    assert registry.get_sample_value(name, labels) == 10


def test_parts_are_told_apart_by_where_they_end(tmp_path: Path) -> None:
    for name, text in (("a", "xy"), ("b", "z"), ("c", "x"), ("d", "yz")):
        (tmp_path / name).write_text(text)
    assert fingerprint([tmp_path / "a", tmp_path / "b"]) != fingerprint([tmp_path / "c", tmp_path / "d"])
