"""Supervision of engines: real processes with a tiny model, their restarts, and nothing that is left when they are gone."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dragoman.server.engine.messages import Ready, Request, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import Unavailable
from dragoman.server.workers import hosts
from dragoman.server.workers.supervisor import STABLE_SECONDS, EngineCannotStart, RestartPolicy, SupervisedEngine
from tests.server.conftest import until

QUICK = RestartPolicy(initial_backoff_seconds=0.05, max_backoff_seconds=0.2)


class Watched:
    """A supervised engine and what it told."""

    def __init__(self, bundle: Path, policy: RestartPolicy = QUICK, *, is_inline: bool = False, **fields: Any) -> None:
        limits = {"num_threads": 1, "max_slots": 2, "max_waiting_requests": 100, "max_waiting_tokens": 1000}
        about = {"is_warmed_up": False, "log_level": "error", "log_format": "json"}
        settings = EngineSettings(endpoint="", bundle=str(bundle), **{**limits, **about, **fields})
        self.statistics: list[Statistics] = []
        self.readiness: list[bool] = []
        self.num_restarts = 0
        self.engine = SupervisedEngine(
            "tiny",
            settings,
            policy,
            is_inline=is_inline,
            on_statistics=self.statistics.append,
            on_change=lambda: self.readiness.append(self.engine.is_ready),
            on_restart=self._on_restart,
        )

    def _on_restart(self) -> None:
        self.num_restarts += 1

    async def generate(self) -> Any:
        return await self.engine.generate(Request(self.engine.next_id(), [5, 1], 20, time.monotonic()))

    async def started(self) -> "Watched":
        await self.engine.start()
        return self

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.engine.process_id is not None
        os.kill(self.engine.process_id, number)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of sockets, whose path has to be short; neither sockets nor file descriptors are left."""
    folder, num_files = Path(tempfile.mkdtemp(prefix="d-", dir="/tmp")), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "a socket's folder is left"
    folder.rmdir()
    assert len(os.listdir("/proc/self/fd")) <= num_files + 2, "file descriptors are left"


@pytest.mark.parametrize("is_inline", [False, True])
async def test_engine_answers_and_stops(tiny_bundle: Path, is_inline: bool) -> None:
    watched = Watched(tiny_bundle, is_inline=is_inline)
    with pytest.raises(Unavailable):
        await watched.generate()
    await watched.started()
    assert (await watched.generate()).num_generated == 20
    await watched.engine.stop()
    assert watched.readiness == [True, False] and watched.num_restarts == 0 and watched.engine.process_id is None
    with pytest.raises(Unavailable):
        await watched.generate()


async def test_killed_engine_fails_its_requests_once_and_is_replaced(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its process cannot be made at first, and wherever the server was started."""
    watched = await Watched(tiny_bundle).started()
    first = watched.engine.process_id
    start, failures = hosts.ProcessHost.start, [OSError("no room"), OSError("still none")]

    async def start_later(settings: EngineSettings) -> hosts.ProcessHost:
        if failures:
            raise failures.pop()
        return await start(settings)

    monkeypatch.setattr(hosts.ProcessHost, "start", start_later)
    watched.kill(signal.SIGSTOP)
    tasks = [asyncio.create_task(watched.generate()) for _ in range(5)]
    await asyncio.sleep(0.05)
    watched.kill()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 5
    await until(lambda: watched.engine.is_ready)
    assert watched.engine.process_id != first and watched.num_restarts == 3
    assert Statistics() in watched.statistics, "gauges do not keep the values of the dead engine"
    assert (await watched.generate()).num_generated == 20
    await watched.engine.stop()


async def test_damaged_bundle_keeps_the_model_down_until_it_is_back(bundle_copy: Path) -> None:
    with pytest.raises(EngineCannotStart, match=r"is now version .*, but the server started with 0123456789ab"):
        await Watched(bundle_copy, version="0123456789ab").engine.start()
    watched = await Watched(bundle_copy).started()
    manifest = bundle_copy / "bundle.json"
    content = manifest.read_text()
    manifest.write_text("{}")
    watched.kill()
    await until(lambda: watched.num_restarts >= 2)
    assert not watched.engine.is_ready
    manifest.write_text(content)
    await until(lambda: watched.engine.is_ready)
    await watched.engine.stop()


CANNOT_START = r"model 'tiny': the engine cannot start: .*decoder\.onnx"


@pytest.mark.parametrize(
    ("is_inline", "place", "reason"),
    [(False, "", CANNOT_START), (True, "", CANNOT_START), (False, "/nowhere", "/nowhere"), (False, "x" * 120, "too long")],
)
async def test_engine_that_cannot_start_says_why(
    bundle_copy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, is_inline: bool, place: str, reason: str
) -> None:
    (bundle_copy / "decoder.onnx").write_bytes(b"")
    watched = Watched(bundle_copy, is_inline=is_inline)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / place))
    if place.startswith("x"):
        (folder / place).mkdir()
    with pytest.raises(EngineCannotStart, match=reason):
        await asyncio.wait_for(watched.engine.start(), 10)
    assert not watched.engine.is_ready and watched.num_restarts == 0
    if place.startswith("x"):
        (folder / place).rmdir()


@pytest.mark.parametrize("num_turns", [0, 2, 50])
async def test_engine_stopped_while_it_starts_leaves_no_process(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    started: list[hosts.ProcessHost] = []
    start = hosts.ProcessHost.start

    async def start_noted(settings: EngineSettings) -> hosts.ProcessHost:
        started.append(await start(settings))
        return started[-1]

    monkeypatch.setattr(hosts.ProcessHost, "start", start_noted)
    watched = Watched(tiny_bundle)
    starting = asyncio.create_task(watched.engine.start())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await watched.engine.stop()
    assert isinstance((await asyncio.gather(starting, return_exceptions=True))[0], EngineCannotStart)
    assert all(host.process.returncode == -signal.SIGKILL for host in started)


async def test_silence_does_not_end_an_engine_where_this_process_was_paused_too(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.server.workers.supervisor.WATCH_SECONDS", 0.01)
    engine = Watched(tiny_bundle, RestartPolicy(watchdog_seconds=30)).engine
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    ready.set_result(Ready("cpu", 1, 0.0))
    client: Any = SimpleNamespace(ready=ready, last_heard=time.monotonic() - 1000, has_failed=False, fatal=None)
    assert await engine._until_end(client, asyncio.create_task(asyncio.sleep(0.1, "exit code 0"))) == "exit code 0"


def test_back_off_doubles_to_its_limit_and_is_reset_after_a_stable_time() -> None:
    policy = RestartPolicy(initial_backoff_seconds=1.0, max_backoff_seconds=5.0)
    waits: list[float] = []
    for _ in range(5):
        waits.append(policy.backoff_seconds(waits[-1] if waits else None, ready_seconds=STABLE_SECONDS))
    assert waits == [1, 2, 4, 5, 5]
    assert policy.backoff_seconds(5.0, STABLE_SECONDS + 1) == 1.0


async def test_engine_whose_parent_is_gone_ends_and_removes_its_socket(tiny_bundle: Path, folder: Path) -> None:
    place = folder / "dragoman-1"
    place.mkdir()
    watched = Watched(tiny_bundle)
    settings = msgspec.structs.replace(watched.engine.settings, endpoint=f"ipc://{place}/engine")
    host = await hosts.ProcessHost.start(settings)
    await until((place / "engine").exists)
    assert host.process.stdin is not None
    host.process.stdin.close()
    assert await host.wait() == "exit code 0" and not place.exists()
