"""A front end's process, told what to be and listened to as the process that starts it does."""

import asyncio
import os
from pathlib import Path

from dragoman.export.bundle import Bundle
from dragoman.server.config import ServerConfig
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings
from dragoman.server.fronts.host import FrontEndHost
from dragoman.server.fronts.messages import Collect, Counted, Desk, Drain, Serve, Served, Start, State
from dragoman.server.fronts.port import HeldPort
from dragoman.server.fronts.table import UsageTable


def start_of(bundle: Path, port: int, table: UsageTable) -> Start:
    """Return what makes a front end of a model that nobody runs."""
    config = ServerConfig(models=bundle, host="127.0.0.1", front_ends=2)
    opened = Bundle.open(bundle)
    [settings] = engine_settings(config, opened, EnginePlan(1, ((),)))
    desk = Desk(f"ipc://{bundle.parent}/nobody-{os.getpid()}", opened.manifest.version, str(bundle), settings, 1, False)
    served = Served(opened.manifest.name, desk.endpoint, [desk], {desk.label: 1.0}, {}, "request")
    folder = str(bundle.parent / "sockets")
    return Start(0, "front-0-0", port, 0, config.model_dump_json(), {}, Serve(0, [served]), folder, table.descriptor, "1")


def test_it_says_what_it_has_counted_also_when_nobody_asks(tiny_bundle: Path) -> None:
    """Else all that a front end had counted since the last scrape would be gone with it."""
    asyncio.run(listen_to_a_front_end(tiny_bundle))


async def listen_to_a_front_end(tiny_bundle: Path) -> None:
    table = UsageTable.open(2)
    with HeldPort("127.0.0.1", 0) as held:
        host = await FrontEndHost.start(start_of(tiny_bundle, held.port, table))
        try:
            messages = host.messages()
            assert await anext(messages) == State(is_listening=True)
            unasked = await anext(one async for one in messages if isinstance(one, Counted))
            assert not unasked.is_asked and "dragoman_requests_failed" in unasked.series
            host.send(Collect())
            asked = await anext(one async for one in messages if isinstance(one, Counted) and one.is_asked)
            assert asked.series.keys() == unasked.series.keys()
            host.send(Drain(0))
            assert await host.wait() == "exit code 0"
        finally:
            host.kill()
            await host.wait()
            table.close()
