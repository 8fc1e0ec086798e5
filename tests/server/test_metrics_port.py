"""The metrics port of a whole server process: its settings reach it."""

import asyncio
import contextlib
import http.client
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dragoman.server import main, serving_process
from dragoman.server.config import load
from dragoman.server.model_source import ModelSource
from dragoman.server.telemetry.admin import AdminServer
from dragoman.server.telemetry.sampling import Sampler
from dragoman.server.terminal import Terminal


def status(port: int, path: str, **headers: str) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


def test_metrics_of_a_server_need_the_token_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("scraper\n")
    started: asyncio.Queue[AdminServer] = asyncio.Queue()

    class Observed(AdminServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.put_nowait(self)

    monkeypatch.setattr(main, "AdminServer", Observed)
    monkeypatch.setattr(serving_process, "gc", Mock())  # it is set for a process that serves
    local = {"host": "127.0.0.1", "metrics_host": "127.0.0.1", "port": 0, "metrics_port": 0, "num_threads": 1}
    config = load({"models": "bundles", "metrics_token_file": tmp_path / "token"} | local)

    async def scenario() -> None:
        service = main.Service(config, ModelSource(config, None), [], None, Terminal(), Sampler(lambda *_: None))
        running = asyncio.create_task(service.run())
        server = await started.get()
        assert await asyncio.to_thread(status, server.port, "/metrics") == 401
        assert await asyncio.to_thread(status, server.port, "/metrics", Authorization="Bearer scraper") == 200
        assert await asyncio.to_thread(status, server.port, "/healthz") == 200
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0
        await service.front.face.stop()  # the process would end here

    asyncio.run(scenario())
