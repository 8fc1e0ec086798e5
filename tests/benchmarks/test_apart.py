"""Objects in processes of their own."""

import os

import pytest

from benchmarks.harness.apart import Apart


class Counter:
    """Lives on the other side."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError("a counter starts at 0 or above")
        self.count = start

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    def fail(self) -> None:
        raise KeyError("nothing there")

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(3)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_object_keeps_its_state_in_another_process() -> None:
    with Apart(Counter, 5) as counter:
        pid = counter.call("pid")
        assert pid != os.getpid()
        assert [counter.call("add", 2), counter.call("add", 3)] == [7, 10]
        with pytest.raises(KeyError, match="nothing there"):
            counter.call("fail")
        assert counter.call("add", 0) == 10
    assert not is_alive(pid)


def test_what_its_making_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match="starts at 0"), Apart(Counter, -1):
        raise AssertionError("it was made")


def test_a_process_that_ends_is_an_error_and_not_a_wait() -> None:
    with Apart(Counter, 0) as counter:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Counter ended with exit code 3"):
                counter.call("die")
