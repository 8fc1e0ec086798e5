import threading

import pytest

from dragoman.client.opening import opened

PATIENCE_SECONDS = 60


class Call:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def test_main_thread_has_its_calls_started_by_another() -> None:
    starters = []

    def start() -> Call:
        starters.append(threading.current_thread())
        return call

    call = Call()
    assert opened(start) is call
    assert starters != [threading.main_thread()]


def test_other_threads_start_their_calls_themselves() -> None:
    starters = []
    thread = threading.Thread(target=lambda: opened(lambda: starters.append(threading.current_thread())))
    thread.start()
    thread.join()
    assert starters == [thread]


def test_call_whose_start_is_interrupted_is_cancelled_when_it_has_started(monkeypatch) -> None:
    call = Call()
    may_start = threading.Event()

    def start() -> Call:
        assert may_start.wait(PATIENCE_SECONDS)
        return call

    def interrupted(future: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dragoman.client.opening.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opened(start)
    assert not call.cancelled.is_set()
    may_start.set()
    assert call.cancelled.wait(PATIENCE_SECONDS)


def test_failure_to_start_is_the_callers() -> None:
    def start() -> Call:
        raise ValueError("closed")

    with pytest.raises(ValueError, match="closed"):
        opened(start)
