"""Where work is done that must not hold up decode steps."""

import os
import threading

import pytest

from dragoman.server.engine.executors import Here, background


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_background_gives_way_and_so_does_what_it_starts() -> None:
    before = niceness()
    found: list[int] = []

    def look() -> None:
        found.append(niceness())
        inner = threading.Thread(target=lambda: found.append(niceness()))
        inner.start()
        inner.join()

    with background() as executor:
        executor.submit(look).result(10)
    assert found == [min(before + 10, 19)] * 2
    assert niceness() == before, "and nobody else"


def test_a_system_that_forbids_it_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "nice", forbid)
    with background() as executor:
        assert executor.submit(lambda: 1).result(10) == 1


def test_what_is_done_here_is_done_at_once() -> None:
    thread = Here().submit(threading.current_thread)
    assert thread.done() and thread.result() is threading.current_thread()
    assert isinstance(Here().submit(int, "no number").exception(), ValueError)
