"""Supervision of engines: real processes with a tiny model, their restarts, and the absence of leftovers."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from dragoman.server.engine.messages import Finished, Request, ScoreRequest, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import Unavailable
from dragoman.server.system import start_process
from dragoman.server.workers import pool, supervisor
from dragoman.server.workers.pool import ReplicaPool
from dragoman.server.workers.supervisor import (
    STABLE_SECONDS,
    CannotStart,
    EngineCannotStart,
    Process,
    ProcessSupervisor,
    RestartPolicy,
)
from tests.server.conftest import until

QUICK = RestartPolicy(initial_backoff_seconds=0.05, max_backoff_seconds=0.2)
LONG = 20
SETTINGS = EngineSettings("", "", 1, 2, 100, 1000, "critical", "json", is_warmed_up=False)


class Watched:
    """Engines of a model, and what their callbacks were called with."""

    def __init__(self, *bundles: Path, policy: RestartPolicy = QUICK, **fields: Any) -> None:
        self.statistics: list[Statistics] = []
        self.engine_statistics: dict[int, Statistics] = {}
        self.readiness: list[bool] = []
        self.restarts: list[int] = []
        self.engine = ReplicaPool(
            "tiny",
            [msgspec.structs.replace(SETTINGS, bundle=str(bundle), **fields) for bundle in bundles],
            policy,
            on_statistics=self.statistics.append,
            on_engine_statistics=self.engine_statistics.__setitem__,
            on_change=lambda: self.readiness.append(self.engine.is_ready),
            on_engine_change=lambda _: None,
            on_restart=self.restarts.append,
        )

    async def started(self) -> "Watched":
        await self.engine.start()
        await self.until_all_ready()
        return self

    def kill(self, index: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        process_id = self.engine.replicas[index].process_id
        assert process_id is not None
        os.kill(process_id, number)

    async def generate(self, source: tuple[int, ...] = (5, 1)) -> Finished:
        return await self.engine.generate(Request(self.engine.next_id(), list(source), LONG, time.monotonic()))

    async def until_all_ready(self) -> None:
        await until(lambda: all(replica.is_ready for replica in self.engine.replicas))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of sockets, whose path has to be short; neither sockets nor file descriptors are left."""
    folder, num_files = Path(tempfile.mkdtemp(prefix="d-", dir="/tmp")), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "a socket's folder is left"
    folder.rmdir()
    assert len(os.listdir("/proc/self/fd")) <= num_files + 2, "file descriptors are left"


async def test_replicas_answer_as_one_engine_does_and_stop(tiny_bundle: Path) -> None:
    sources = [(4 + i, 7 + i % 5, 1) for i in range(30)]

    async def ask(*bundles: Path) -> list[Any]:
        watched = Watched(*bundles)
        with pytest.raises(Unavailable):
            await watched.generate()
        engine = (await watched.started()).engine
        ended = await asyncio.gather(*(watched.generate(source) for source in sources))
        pairs = [ScoreRequest(engine.next_id(), [5, 1], [6 + i, 1], 0.0) for i in range(5)]
        scored = await asyncio.gather(*map(engine.score, pairs))
        await engine.stop()
        assert watched.readiness == [True, False] and watched.restarts == [] and engine.process_ids == []
        assert (
            watched.engine_statistics == dict.fromkeys(range(len(bundles)), Statistics()) and watched.statistics[-1] == Statistics()
        )
        with pytest.raises(Unavailable):
            await watched.generate()
        return [*(one.answers for one in ended), *(one.log_probs for one in scored)]

    assert await ask(tiny_bundle) == await ask(tiny_bundle, tiny_bundle)


async def test_killed_engine_fails_its_requests_once_and_is_replaced(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its process cannot be made at first."""
    watched = await Watched(tiny_bundle).started()
    first = watched.engine.process_ids
    failures = [OSError("no room"), OSError("still none")]

    async def start_later(*arguments: Any, **options: Any) -> Process:
        if failures:
            raise failures.pop()
        return await start_process(*arguments, **options)

    monkeypatch.setattr(pool, "start_process", start_later)
    watched.kill(number=signal.SIGSTOP)
    tasks = [asyncio.create_task(watched.generate()) for _ in range(5)]
    await asyncio.sleep(0.05)
    watched.kill()
    ended = [end if isinstance(end, Exception) else end.reason for end in await asyncio.gather(*tasks, return_exceptions=True)]
    assert all(isinstance(end, Unavailable) or end == "lost" for end in ended)
    await until(lambda: watched.engine.is_ready)
    assert watched.engine.process_ids != first and watched.restarts == [0, 0, 0]
    assert Statistics() in watched.statistics, "gauges do not keep the values of the dead engine"
    assert (await watched.generate()).num_generated == LONG
    await watched.engine.stop()


async def test_damaged_bundle_keeps_the_model_down_until_it_is_back(bundle_copy: Path) -> None:
    with pytest.raises(EngineCannotStart, match=r"is now version .*, but the server started with 0123456789ab"):
        await Watched(bundle_copy, version="0123456789ab").engine.start()
    watched = await Watched(bundle_copy).started()
    manifest = bundle_copy / "bundle.json"
    content = manifest.read_text()
    manifest.write_text("{}")
    watched.kill()
    await until(lambda: len(watched.restarts) >= 2)
    assert not watched.engine.is_ready
    manifest.write_text(content)
    await until(lambda: watched.engine.is_ready)
    await watched.engine.stop()


async def test_replica_that_cannot_start_is_retried_and_does_not_keep_the_model_down(tiny_bundle: Path, bundle_copy: Path) -> None:
    manifest = bundle_copy / "bundle.json"
    content = manifest.read_text()
    manifest.write_text("{}")
    watched = Watched(bundle_copy, tiny_bundle)
    await watched.engine.start()
    assert watched.engine.is_ready
    assert (await watched.generate()).num_generated == LONG
    await until(lambda: len(watched.restarts) >= 2)
    assert set(watched.restarts) == {0}
    manifest.write_text(content)
    await watched.until_all_ready()
    await watched.engine.stop()


@pytest.mark.parametrize(
    ("num_replicas", "place", "reason"),
    [
        (1, "", r"model 'tiny': the engine cannot start: .*decoder\.onnx"),
        (2, "", r"model 'tiny': the engine cannot start: .*decoder\.onnx"),
        (1, "/nowhere", "/nowhere"),
        (1, "x" * 120, "too long"),
    ],
)
async def test_engine_that_cannot_start_says_why(
    bundle_copy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, num_replicas: int, place: str, reason: str
) -> None:
    (bundle_copy / "decoder.onnx").write_bytes(b"")
    watched = Watched(*[bundle_copy] * num_replicas)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / place))
    if place.startswith("x"):
        (folder / place).mkdir()
    with pytest.raises(EngineCannotStart, match=reason):
        await asyncio.wait_for(watched.engine.start(), 20)
    assert not watched.engine.is_ready and watched.engine.process_ids == []
    if place.startswith("x"):
        (folder / place).rmdir()


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("num_turns", [0, 2, 50])
async def test_engines_stopped_while_they_start_leave_no_process(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, num_turns: int, num_replicas: int
) -> None:
    started: list[Process] = []

    async def start_noted(*arguments: Any, **options: Any) -> Process:
        started.append(await start_process(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(pool, "start_process", start_noted)
    watched = Watched(*[tiny_bundle] * num_replicas)
    starting = asyncio.create_task(watched.engine.start())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    with capture_logs() as logged:
        await watched.engine.stop()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    assert logged == [], "an engine that is stopped has not failed"
    assert all(process.returncode == -signal.SIGKILL for process in started)


async def test_engine_whose_parent_is_gone_ends_and_removes_its_socket(tiny_bundle: Path, folder: Path) -> None:
    place = folder / "dragoman-1"
    place.mkdir()
    settings = msgspec.structs.replace(SETTINGS, bundle=str(tiny_bundle), endpoint=f"ipc://{place}/engine")
    process = await start_process("dragoman.server.engine.process", msgspec.json.encode(settings).decode())
    await until((place / "engine").exists)
    assert process.stdin is not None
    process.stdin.close()
    assert await process.wait() == -signal.SIGKILL and not place.exists()


class Program(ProcessSupervisor):
    """A supervised program that reports lines: `ready`, or any other as a sign of life."""

    def __init__(self, program: str, policy: RestartPolicy = QUICK) -> None:
        super().__init__("program", "program", policy, {})
        self._program = program

    @contextlib.asynccontextmanager
    async def _run_process(self) -> AsyncIterator[Process]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self._program, stdin=pipe, stdout=pipe, start_new_session=True
        )
        self._reading = asyncio.create_task(self._read(process))
        yield process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.hear()
            if line == b"ready\n":
                self.set_ready()

    def _request_stop(self) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.close()

    async def _read_last_words(self) -> None:
        await self._reading


READY = "import sys, time; print('ready', flush=True); "


async def test_hung_process_is_killed_unless_this_process_was_paused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.01)
    hung = Program(READY + "time.sleep(60)", RestartPolicy(0.05, 0.2, watchdog_seconds=0.05))
    await hung.begin()
    time.sleep(0.2)  # nothing can be heard meanwhile
    await asyncio.sleep(0)
    assert hung.is_ready and not hung.num_restarts
    await until(lambda: hung.num_restarts >= 2)
    await hung.stop()


async def test_stop_kills_a_process_that_does_not_end() -> None:
    stubborn = Program(READY + "time.sleep(60)")
    await stubborn.begin()
    await stubborn.stop(0.1)
    assert stubborn.process_id is None and not stubborn.is_ready
    obedient = Program(READY + "sys.stdin.read()")
    await obedient.begin()
    await obedient.stop(10)
    assert not obedient.num_restarts


async def test_process_that_ends_before_it_is_ready_is_retried_only_if_wanted() -> None:
    program = Program("raise SystemExit(7)")
    with pytest.raises(CannotStart, match="program: exit code 7"):
        await program.begin()
    await asyncio.sleep(0.1)
    assert not program.num_restarts
    with pytest.raises(CannotStart):
        await program.begin(is_persistent=True)
    await until(lambda: program.num_restarts >= 2)
    await program.stop()


def test_back_off_doubles_to_its_limit_and_is_reset_after_a_stable_time() -> None:
    policy = RestartPolicy(initial_backoff_seconds=1.0, max_backoff_seconds=5.0)
    waits: list[float] = []
    for _ in range(5):
        waits.append(policy.backoff_seconds(waits[-1] if waits else None, ready_seconds=STABLE_SECONDS))
    assert waits == [1, 2, 4, 5, 5]
    assert policy.backoff_seconds(5.0, STABLE_SECONDS + 1) == 1.0


# Attempts of another user of the machine: to reach the socket, to see the folder, to put another socket in its place.
INTRUDER = """
for attempt in 'test -e "$1"' 'test -w "$1"' 'ls "$2"' 'rm -f "$1"' 'touch "$2/engine2"' 'mv "$2" "$2.old"' 'chmod 777 "$2"'
do
  if eval "$attempt" >/dev/null 2>&1; then echo "$attempt"; fi
done
echo tried
"""


async def test_socket_cannot_be_reached_replaced_or_seen_by_others(tiny_bundle: Path, folder: Path) -> None:
    """With any umask."""
    before = os.umask(0)
    os.chmod(folder, 0o1777)
    try:
        watched = await Watched(tiny_bundle).started()
        (place,) = folder.iterdir()
        assert (stat.S_IMODE(place.stat().st_mode), place.stat().st_uid) == (0o700, os.getuid())
        if os.getuid() == 0:
            command = ["/bin/sh", "-c", INTRUDER, "sh", str(place / "engine"), str(place)]
            user: Any = {"user": 65534, "group": 65534, "extra_groups": []}
            assert subprocess.run(command, **user, cwd="/", capture_output=True, text=True, timeout=60).stdout.strip() == "tried"
        await watched.engine.stop()
    finally:
        os.umask(before)
