"""Engines under supervision: real processes with a tiny model, and what is left when they are gone."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dragoman.server import hosts
from dragoman.server.engine.messages import Ready, Request, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import Unavailable
from dragoman.server.supervisor import STABLE_SECONDS, EngineCannotStart, RestartPolicy, SupervisedEngine

QUICK = RestartPolicy(initial_backoff_seconds=0.05, max_backoff_seconds=0.2)


class Watched:
    """A supervised engine and what it told."""

    def __init__(self, bundle: Path, policy: RestartPolicy = QUICK, *, is_inline: bool = False, **fields: Any) -> None:
        settings = EngineSettings(
            endpoint="",
            bundle=str(bundle),
            num_threads=1,
            max_slots=2,
            max_waiting_requests=100,
            max_waiting_tokens=1000,
            prefill_tokens_per_step=100,
            is_warmed_up=False,
            log_level="error",
            log_format="json",
            **fields,
        )
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

    async def until(self, is_ready: bool) -> None:
        async with asyncio.timeout(30):
            while self.engine.is_ready != is_ready:
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where engines have their sockets; short, for the system's sake."""
    folder = Path(tempfile.mkdtemp(prefix="d-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "a socket's folder is left"
    folder.rmdir()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario; no task may be left after it, and nothing may have gone wrong unseen."""

    async def watched() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        num_files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        await scenario()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert problems == []
        if num_files:
            assert len(os.listdir("/proc/self/fd")) <= num_files + 2, "file descriptors are left"

    asyncio.run(watched())


@pytest.mark.parametrize("is_inline", [False, True])
def test_an_engine_answers_and_stops(tiny_bundle: Path, is_inline: bool) -> None:
    async def scenario() -> None:
        watched = Watched(tiny_bundle, is_inline=is_inline)
        with pytest.raises(Unavailable):
            await watched.generate()
        await watched.engine.start()
        assert (await watched.generate()).num_generated == 20
        await watched.engine.stop()
        assert watched.readiness == [True, False] and watched.num_restarts == 0
        assert watched.engine.process_id is None
        with pytest.raises(Unavailable):
            await watched.generate()

    run(scenario)


def test_a_killed_engine_fails_its_requests_once_and_is_replaced(tiny_bundle: Path) -> None:
    async def scenario() -> None:
        watched = Watched(tiny_bundle)
        await watched.engine.start()
        first = watched.engine.process_id
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        tasks = [asyncio.create_task(watched.generate()) for _ in range(5)]
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable] * 5
        await watched.until(is_ready=True)
        assert watched.engine.process_id != first and watched.num_restarts == 1
        assert Statistics() in watched.statistics, "gauges do not keep what the dead engine said last"
        assert (await watched.generate()).num_generated == 20
        await watched.engine.stop()

    run(scenario)


def test_another_bundle_in_the_same_place_is_not_served_under_the_old_name(bundle_copy: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineCannotStart, match=r"is now version .*, but the server started with 0123456789ab"):
            await Watched(bundle_copy, version="0123456789ab").engine.start()

    run(scenario)


def test_a_bundle_that_went_bad_keeps_the_model_down_until_it_is_back(bundle_copy: Path) -> None:
    async def scenario() -> None:
        watched = Watched(bundle_copy)
        await watched.engine.start()
        manifest = bundle_copy / "bundle.json"
        content = manifest.read_text()
        manifest.write_text("{}")
        assert watched.engine.process_id is not None
        os.kill(watched.engine.process_id, signal.SIGKILL)
        async with asyncio.timeout(30):
            while watched.num_restarts < 2:
                await asyncio.sleep(0.01)
        assert not watched.engine.is_ready
        manifest.write_text(content)
        await watched.until(is_ready=True)
        await watched.engine.stop()

    run(scenario)


@pytest.mark.parametrize("is_inline", [False, True])
def test_an_engine_that_cannot_start_says_why(bundle_copy: Path, is_inline: bool) -> None:
    (bundle_copy / "decoder.onnx").write_bytes(b"")

    async def scenario() -> None:
        watched = Watched(bundle_copy, is_inline=is_inline)
        with pytest.raises(EngineCannotStart, match=r"model 'tiny': the engine cannot start: .*decoder\.onnx"):
            await watched.engine.start()
        assert not watched.engine.is_ready and watched.num_restarts == 0

    run(scenario)


def test_no_place_for_the_socket_stops_the_start(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
        with pytest.raises(EngineCannotStart, match="/nowhere"):
            await asyncio.wait_for(Watched(tiny_bundle).engine.start(), 10)

    run(scenario)


def test_a_path_too_long_for_a_socket_stops_the_start(tiny_bundle: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("x" * 120)
    long.mkdir()

    async def scenario() -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(EngineCannotStart, match="too long"):
            await asyncio.wait_for(Watched(tiny_bundle).engine.start(), 10)
        long.rmdir()

    run(scenario)


def test_a_process_that_cannot_be_made_is_tried_again(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        watched = Watched(tiny_bundle)
        await watched.engine.start()
        start, failures = hosts.ProcessHost.start, [OSError("no room"), OSError("still none")]

        async def start_later(settings: EngineSettings) -> hosts.ProcessHost:
            if failures:
                raise failures.pop()
            return await start(settings)

        monkeypatch.setattr(hosts.ProcessHost, "start", start_later)
        assert watched.engine.process_id is not None
        os.kill(watched.engine.process_id, signal.SIGKILL)
        await watched.until(is_ready=False)
        await watched.until(is_ready=True)
        assert watched.num_restarts == 3
        await watched.engine.stop()

    run(scenario)


def test_stopping_does_not_wait_for_a_back_off(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.server.supervisor.STOP_SECONDS", 1000)

    async def scenario() -> None:
        watched = Watched(tiny_bundle, RestartPolicy(initial_backoff_seconds=300, max_backoff_seconds=300))
        await watched.engine.start()
        assert watched.engine.process_id is not None
        os.kill(watched.engine.process_id, signal.SIGKILL)
        while not watched.num_restarts:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(watched.engine.stop(), 20)

    run(scenario)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 5, 50])
def test_an_engine_stopped_while_it_starts_leaves_no_process(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    started: list[hosts.ProcessHost] = []
    start = hosts.ProcessHost.start

    async def start_noted(settings: EngineSettings) -> hosts.ProcessHost:
        started.append(await start(settings))
        return started[-1]

    monkeypatch.setattr(hosts.ProcessHost, "start", start_noted)

    async def scenario() -> None:
        watched = Watched(tiny_bundle)
        starting = asyncio.create_task(watched.engine.start())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await watched.engine.stop()
        outcome = (await asyncio.gather(starting, return_exceptions=True))[0]
        assert isinstance(outcome, EngineCannotStart)
        assert all(host.process.returncode == -signal.SIGKILL for host in started)

    run(scenario)


def test_what_lies_in_the_working_directory_is_not_the_server(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise SystemExit('somebody else')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), str(Path(hosts.__file__).parents[1])])

    async def scenario() -> None:
        watched = Watched(tiny_bundle)
        await watched.engine.start()
        await watched.engine.stop()

    run(scenario)


class SilentClient(SimpleNamespace):
    """A ready engine that says nothing."""

    def __init__(self, last_heard: float) -> None:
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        ready.set_result(Ready("cpu", 1, 0.0))
        super().__init__(ready=ready, last_heard=last_heard, has_failed=False, fatal=None)


def test_time_in_which_nobody_could_listen_is_no_silence(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was paused wakes up with an old last message, and engines that were paused with it."""
    monkeypatch.setattr("dragoman.server.supervisor.WATCH_SECONDS", 0.01)

    async def scenario() -> None:
        engine = Watched(tiny_bundle, RestartPolicy(watchdog_seconds=30)).engine
        ended = asyncio.create_task(asyncio.sleep(0.1, "exit code 0"))
        client: Any = SilentClient(last_heard=time.monotonic() - 1000)
        assert await engine._until_end(client, ended) == "exit code 0"

    run(scenario)


def test_silence_is_noticed(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.server.supervisor.WATCH_SECONDS", 0.01)

    async def scenario() -> None:
        engine = Watched(tiny_bundle, RestartPolicy(watchdog_seconds=0.05)).engine
        ended = asyncio.create_task(asyncio.sleep(1000, ""))
        client: Any = SilentClient(last_heard=time.monotonic())
        assert (await engine._until_end(client, ended)).startswith("silent")
        ended.cancel()

    run(scenario)


def test_back_off_doubles_to_its_limit_and_is_forgotten_after_a_stable_time() -> None:
    policy = RestartPolicy(initial_backoff_seconds=1.0, max_backoff_seconds=5.0)
    waits: list[float] = []
    for _ in range(5):
        waits.append(policy.backoff_seconds(waits[-1] if waits else None, ready_seconds=1.0))
    assert waits == [1, 2, 4, 5, 5]
    assert policy.backoff_seconds(5.0, STABLE_SECONDS + 1) == 1.0


def test_an_engine_whose_parent_is_gone_ends_and_tidies_up(tiny_bundle: Path, folder: Path) -> None:
    place = folder / "dragoman-1"
    place.mkdir()

    async def scenario() -> None:
        settings = msgspec.structs.replace(Watched(tiny_bundle).engine.settings, endpoint=f"ipc://{place}/engine")
        host = await hosts.ProcessHost.start(settings)
        async with asyncio.timeout(30):
            while not (place / "engine").exists():
                await asyncio.sleep(0.01)
            assert host.process.stdin is not None
            host.process.stdin.close()
            assert await host.wait() == "exit code 0"
        assert not place.exists()

    run(scenario)
