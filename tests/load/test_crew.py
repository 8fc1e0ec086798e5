"""The sender processes: what is said to them before they listen, and what they say of a server that is not there."""

import asyncio
import sys

import pytest

from dragoman.client.errors import CallError, Unavailable
from dragoman.load import worker
from dragoman.load.crew import Crew
from dragoman.load.plan import Plan, Server
from dragoman.load.sender import Progress
from dragoman.load.worker import Message
from dragoman.model.errors import InputError

PATIENCE_SECONDS = 60


def run(plan: Plan, num_stops: int = 0) -> list[Progress]:
    """Run a crew that is told to stop before its clock is started; return what it said."""
    heard: list[Progress] = []

    async def main() -> None:
        async with Crew(plan, lambda number, progress: heard.append(progress)) as crew:
            for _ in range(num_stops):
                crew.stop()
            await asyncio.wait_for(crew.run(), PATIENCE_SECONDS)

    asyncio.run(main())
    return heard


@pytest.mark.parametrize("num_stops", [1, 2])
def test_a_stop_that_comes_before_the_start_is_not_lost(fake_server, make_plan, num_stops: int) -> None:
    *_, last = run(make_plan(fake_server.address, concurrency=1, seconds=1000.0), num_stops)
    assert last.is_last and last.end < 100


def test_senders_import_from_where_this_process_does(fake_server, make_plan, monkeypatch, tmp_path) -> None:
    """A folder whose name holds a colon, and the working directory, which an empty entry stands for."""
    for name in ("first:folder", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "first:folder" / "msgspec.py").write_text("raise RuntimeError('from the folder with a colon')\n")
    monkeypatch.chdir(tmp_path / "second")
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path / "first:folder")])
    assert run(make_plan(fake_server.address, concurrency=1, max_calls=3))[-1].num_sent == 3
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first:folder"), *sys.path])
    with pytest.raises(CallError, match="a sender process ended with exit code 1"):
        run(make_plan(fake_server.address, concurrency=1, max_calls=3))


def test_what_cannot_be_sent_is_said_by_the_sender(fake_server, make_plan, tmp_path) -> None:
    (tmp_path / "trace").write_text('0\n{"at": 0.01, "num_beams": 99999999999}\n')
    with pytest.raises(InputError, match="num_beams: 99999999999 is out of range"):
        run(make_plan(fake_server.address, trace=str(tmp_path / "trace"), seconds=1.0))


def test_a_server_that_is_not_there_is_a_failed_call_not_a_mistake(monkeypatch) -> None:
    monkeypatch.setattr(worker, "CONNECT_SECONDS", 0.05)

    async def connect() -> None:
        async with worker._connected(Server("127.0.0.1:1")):
            pass

    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: no connection within"):
        asyncio.run(connect())


def test_a_failed_call_of_a_sender_is_one_of_the_command(make_plan, monkeypatch) -> None:
    import msgspec

    crew = Crew(make_plan(concurrency=1), lambda number, progress: None)

    class Said:
        def __init__(self, message: Message) -> None:
            self.stdout = self
            self._line = msgspec.json.encode(message) + b"\n"

        async def readline(self) -> bytes:
            return self._line

    with pytest.raises(CallError) as failed:
        asyncio.run(crew._read(Said(Message(error="nobody there", code="UNAVAILABLE"))))
    assert failed.value.code == "UNAVAILABLE"
    with pytest.raises(InputError, match="wrong"):
        asyncio.run(crew._read(Said(Message(error="wrong"))))
